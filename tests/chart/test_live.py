"""The chart refuses what a running RayService rules out: helm asks an API server that has one RayService."""

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.chart.render import CHART, Object, Rendered, Values, at, render, tool
from tests.serving import serving

OWN = "redis://demo-redis.serving.svc:6379"
SERVICE = "/apis/ray.io/v1/namespaces/serving/rayservices/demo"
KINDS = {
    "v1": ["ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"],
    "apps/v1": ["StatefulSet"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "ray.io/v1": ["RayService"],
}


def _group(version: str) -> Object:
    this = {"groupVersion": version, "version": "v1"}
    return {"name": version.removesuffix("/v1"), "versions": [this], "preferredVersion": this}


def _resources(version: str) -> Object:
    names = {kind: "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s" for kind in KINDS[version]}
    listed = [{"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for kind, name in names.items()]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


DISCOVERY: dict[str, Object] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "groups": [_group(version) for version in KINDS if "/" in version]},
    **{f"/apis/{version}" if "/" in version else "/api/v1": _resources(version) for version in KINDS},
}


class FakeApi(ThreadingHTTPServer):
    """Knows the kinds of the chart; of all objects there is the RayService demo, or nothing."""

    service: Object | None = None


class _Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in DISCOVERY:
            return self._answer(200, DISCOVERY[path])
        if path == SERVICE and self.server.service is not None:
            return self._answer(200, self.server.service)
        self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi(("127.0.0.1", 0), _Handler)) as server:
        yield server


def upgraded(api: FakeApi, values: Values) -> "subprocess.CompletedProcess[str]":
    """Render as an upgrade does, with helm's `lookup` answered by ``api``."""
    if (helm := tool("helm")) is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")
    server = ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", f"http://127.0.0.1:{api.server_port}"]
    command = [helm, "template", "demo", str(CHART), "--namespace", "serving", *server, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)


FT = at("gcsFaultTolerance.enabled", True)
ELSEWHERE = {"gcsFaultTolerance": {"enabled": True, "address": "redis://other:6379"}}
OFF = at("gcsFaultTolerance.enabled", False)


def running(values: Values) -> Object:
    """Return the RayService that helm made of these values."""
    made = render(values).of("RayService")[""]
    owner = {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "serving"}
    return made | {"metadata": made["metadata"] | {"annotations": owner}}


@pytest.mark.parametrize(
    ("values", "said"), [(OFF, "enabled is false"), (ELSEWHERE, 'address is "redis://other:6379"')], ids=["off", "elsewhere"]
)
def test_the_redis_of_a_running_ray_cluster_is_not_taken_away(api: FakeApi, values: Values, said: str) -> None:
    api.service = running(FT)
    refused = upgraded(api, values)
    assert refused.returncode == 1
    assert [
        text for text in (OWN, said, "install another release", "uninstall this one first") if text not in refused.stderr
    ] == []


@pytest.mark.parametrize(
    ("before", "after", "own"),
    [(FT, FT, True), (OFF, OFF, False), (OFF, FT, True), (ELSEWHERE, OFF, False), (ELSEWHERE, FT, True), (None, OFF, False)],
    ids=["kept", "never", "new", "left another", "from another", "first install"],
)
def test_every_other_change_of_redis_is_made(api: FakeApi, before: Values | None, after: Values, own: bool) -> None:
    api.service = None if before is None else running(before)
    done = upgraded(api, after)
    assert done.returncode == 0, done.stderr
    assert ("redis" in Rendered(done.stdout).of("StatefulSet")) is own
