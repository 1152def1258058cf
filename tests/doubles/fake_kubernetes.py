"""`FakeKubernetes` is an API server that answers the few calls of `serve-app status` and `serve-app rollout`, over real HTTP."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

_KINDS: dict[str, list[tuple[str, str, bool]]] = {
    "/api/v1": [("pods", "Pod", True), ("configmaps", "ConfigMap", True), ("namespaces", "Namespace", False)],
    "/apis/ray.io/v1": [("rayservices", "RayService", True)],
}
_SERVICE = re.compile(r"/apis/ray.io/v1/namespaces/([^/]+)/rayservices(?:/([^/]+))?")
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods")
_EVENTS = re.compile(r"/api/v1/namespaces/([^/]+)/events")
_SECRETS = re.compile(r"/api/v1/namespaces/([^/]+)/secrets")
_CONFIG_MAP = re.compile(r"/api/v1/namespaces/([^/]+)/configmaps/([^/]+)")


@dataclass
class FakeKubernetes:
    """The API server's objects, and the requests that it got. A RayService has a list of states: each read uses one up, the last stays."""

    services: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """The events of type Warning about pods."""
    applied: list[dict[str, Any]] = field(default_factory=list)
    after_apply: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """States of a RayService from the moment it is applied."""
    helm_revisions: dict[int, str] = field(default_factory=dict)
    """Status by revision, of every release."""
    has_kuberay: bool = True
    forbidden: tuple[str, ...] = ()
    """Methods and plurals that the client may not use, such as "list pods"."""
    conflict: str = ""
    """If set, every apply is answered with 409 and this message."""
    host: str = field(default="", init=False)

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(url)
        if method == "GET" and (found := self._discovery(parts.path)) is not None:
            return 200, found
        if (match := _SERVICE.fullmatch(parts.path)) and self.has_kuberay:
            return self._service(method, match[1], match[2], body)
        if match := _PODS.fullmatch(parts.path):
            return self._list_pods(match[1], parse_qs(parts.query).get("labelSelector", [""])[0])
        if match := _EVENTS.fullmatch(parts.path):
            return self._list_warnings(match[1], parse_qs(parts.query).get("fieldSelector", [""])[0])
        if match := _SECRETS.fullmatch(parts.path):
            return self._list_revisions(match[1], parse_qs(parts.query).get("labelSelector", [""])[0])
        if method == "PATCH" and _CONFIG_MAP.fullmatch(parts.path):
            return self._apply(body)
        return 404, {}  # as for an unknown path: without a Status

    def _discovery(self, path: str) -> dict[str, Any] | None:
        groups = ["/apis/ray.io/v1"] if self.has_kuberay else []
        if path == "/version":
            return {"major": "1", "minor": "34"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            version = {"groupVersion": "ray.io/v1", "version": "v1"}
            group = {"name": "ray.io", "versions": [version], "preferredVersion": version}
            return {"kind": "APIGroupList", "groups": [group for _ in groups]}
        if path in ["/api/v1", *groups]:
            verbs = ["get", "list", "patch"]
            resources = [{"name": n, "kind": k, "namespaced": s, "verbs": verbs} for n, k, s in _KINDS[path]]
            return {"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2], "resources": resources}
        return None

    def _service(self, method: str, namespace: str, name: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        verb = {"PATCH": "patch"}.get(method, "get" if name else "list")
        if f"{verb} rayservices" in self.forbidden:
            return self._forbidden(verb, "rayservices", namespace)
        if name is None:
            return 200, {"kind": "RayServiceList", "items": [states[0] for states in self.services.values()]}
        if method == "PATCH":
            return self._apply(body)
        states = self.services.get(name)
        if not states:
            return 404, status(404, f'rayservices.ray.io "{name}" not found', name)
        return 200, states.pop(0) if len(states) > 1 else states[0]

    def _apply(self, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.conflict:
            return 409, status(409, self.conflict)
        value = yaml.safe_load(body)
        self.applied.append(value)
        name = value["metadata"]["name"]
        if name in self.after_apply:
            self.services[name] = self.after_apply[name]
        return 200, value

    def _list_pods(self, namespace: str, selector: str) -> tuple[int, dict[str, Any]]:
        if "list pods" in self.forbidden:
            return self._forbidden("list", "pods", namespace)
        if match := re.fullmatch(r"ray\.io/cluster in \((.+)\)", selector):
            wanted = [{"ray.io/cluster": cluster} for cluster in match[1].split(",")]
        else:
            wanted = [dict(pair.split("=") for pair in selector.split(","))]
        items = [p for p in self.pods if any(labels.items() <= p["metadata"]["labels"].items() for labels in wanted)]
        return 200, {"kind": "PodList", "apiVersion": "v1", "items": items}

    def _list_warnings(self, namespace: str, selector: str) -> tuple[int, dict[str, Any]]:
        if "list events" in self.forbidden:
            return self._forbidden("list", "events", namespace)
        items = self.warnings if selector == "involvedObject.kind=Pod,type=Warning" else []
        return 200, {"kind": "EventList", "apiVersion": "v1", "items": items}

    def _list_revisions(self, namespace: str, selector: str) -> tuple[int, dict[str, Any]]:
        if "list secrets" in self.forbidden:
            return self._forbidden("list", "secrets", namespace)
        labels = dict(pair.split("=") for pair in selector.split(","))
        items = [{"metadata": {"labels": labels | {"version": str(r), "status": s}}} for r, s in self.helm_revisions.items()]
        return 200, {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "items": items}

    def _forbidden(self, verb: str, resource: str, namespace: str) -> tuple[int, dict[str, Any]]:
        message = f'{resource} is forbidden: User "u" cannot {verb} resource "{resource}" in the namespace "{namespace}"'
        return 403, status(403, message)


def status(code: int, message: str, name: str = "") -> dict[str, Any]:
    """Return a Kubernetes Status, the body of a refusal."""
    details = {"details": {"name": name}} if name else {}
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, **details}


@contextlib.contextmanager
def serving(fake: FakeKubernetes) -> Iterator[FakeKubernetes]:
    """Serve the API on a port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_PATCH(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            code, value = fake.answer(self.command, self.path, body)
            data = json.dumps(value).encode() if value else b"404 page not found"
            self.send_response(code)
            self.send_header("content-type", "application/json" if value else "text/plain")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.host = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(path: Path, host: str) -> None:
    """Write a kubeconfig with one context, ``test``, of the namespace ``llm``."""
    place = {"cluster": "c", "user": "u", "namespace": "llm"}
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": host}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "test", "context": place}],
    }
    path.write_text(yaml.safe_dump(value))
