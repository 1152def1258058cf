"""This module talks to Kubernetes for the command line. Each refusal says what is missing and the way out."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.cli.rayservice import REDIS, Pod, RayService, pod, ray_service, with_warnings
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed

_GROUP, _VERSION, _PLURAL = "ray.io", "v1", "rayservices"
_LIMIT_S = 15.0
FIELD_MANAGER = "serve-app"


@dataclass(frozen=True)
class Cluster:
    """A namespace of a Kubernetes cluster."""

    api: Any
    """The client's ApiClient."""
    context: str
    """"" inside a pod."""
    namespace: str

    def kubectl_options(self) -> str:
        """Return the options with which kubectl uses the same cluster and namespace."""
        context = f"--context {self.context} " if self.context else ""
        return f"{context}-n {self.namespace}"

    def helm_options(self) -> str:
        return self.kubectl_options().replace("--context", "--kube-context")

    def ray_service(self, name: str) -> RayService:
        """Return the RayService.

        Raises:
            ClusterFailed: There is no RayService of that name, or the cluster refused or did not answer.
        """
        return ray_service(self.raw_ray_service(name))

    def raw_ray_service(self, name: str) -> dict[str, Any]:
        from kubernetes.client import CustomObjectsApi

        with explained(self, "get rayservices.ray.io", missing=lambda: self._no_service(name)):
            api = CustomObjectsApi(self.api)
            found: dict[str, Any] = api.get_namespaced_custom_object(
                _GROUP, _VERSION, self.namespace, _PLURAL, name, _request_timeout=_LIMIT_S
            )
        return found

    def ray_services(self) -> list[str]:
        """Return the names of the namespace's RayServices."""
        from kubernetes.client import CustomObjectsApi

        with explained(self, "list rayservices.ray.io"):
            api = CustomObjectsApi(self.api)
            found = api.list_namespaced_custom_object(_GROUP, _VERSION, self.namespace, _PLURAL, _request_timeout=_LIMIT_S)
        return [item["metadata"]["name"] for item in found["items"]]

    def _no_service(self, name: str) -> ClusterFailed:
        names: list[str] = []
        with contextlib.suppress(ClusterFailed):  # the names are only for the hint
            names = self.ray_services()
        hint = (
            f"there: {', '.join(names)}"
            if names
            else f"install it with: helm install {name} helm/serve-app {self.helm_options()}"
        )
        return ClusterFailed(problem=f"no RayService {name!r} in the namespace {self.namespace!r}", hint=hint)

    def pods(self, service: RayService) -> list[Pod]:
        """Return the pods of the RayService's clusters and of the chart's own Redis, in the order of their names."""
        clusters = [c.name for c in (service.active, service.pending) if c is not None]
        found = self._pods(f"ray.io/cluster in ({','.join(clusters)})") if clusters else []
        if service.redis_address:
            found += self._pods(f"app.kubernetes.io/instance={service.instance},app.kubernetes.io/component={REDIS}")
        if any(p.reason and p.phase != "Terminating" for p in found):
            with contextlib.suppress(ClusterFailed):  # reading events needs another right, and events only add explanations
                found = with_warnings(found, self._warnings())
        return sorted(found, key=lambda p: p.name)

    def _pods(self, selector: str) -> list[Pod]:
        from kubernetes.client import CoreV1Api

        with explained(self, "list pods"):
            found = CoreV1Api(self.api).list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=_LIMIT_S, _preload_content=False
            )
            return [pod(item) for item in json.loads(found.data)["items"]]

    def _warnings(self) -> list[dict[str, Any]]:
        from kubernetes.client import CoreV1Api

        with explained(self, "list events"):
            found = CoreV1Api(self.api).list_namespaced_event(
                self.namespace,
                field_selector="involvedObject.kind=Pod,type=Warning",
                _request_timeout=_LIMIT_S,
                _preload_content=False,
            )
            events: list[dict[str, Any]] = json.loads(found.data)["items"]
        return events

    def helm_revisions(self, release: str) -> dict[int, str]:
        """Return revision -> status of each revision that Helm keeps of a release, in their order.

        Only the labels of Helm's Secrets are read: their content is large, and includes the release's values.

        Raises:
            ClusterFailed: The cluster refused or did not answer.
        """
        from kubernetes.client import CoreV1Api

        with explained(self, "list secrets"):
            found = CoreV1Api(self.api).list_namespaced_secret(
                self.namespace,
                label_selector=f"owner=helm,name={release}",
                _headers={"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"},
                _request_timeout=_LIMIT_S,
                _preload_content=False,
            )
        labels = [item["metadata"]["labels"] for item in json.loads(found.data)["items"]]
        return dict(sorted((int(each["version"]), each["status"]) for each in labels))

    def apply(self, manifests: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Apply each manifest by server-side apply, and yield its kind and name.

        Raises:
            ClusterFailed: The cluster refused a manifest; the manifests before it are applied.
        """
        from kubernetes.dynamic import DynamicClient

        with tempfile.TemporaryDirectory() as folder, explained(self, "read the API's kinds"):
            client = DynamicClient(
                self.api, cache_file=str(Path(folder, "kinds.json"))
            )  # the client's default is a shared file in /tmp
        for manifest in manifests:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            with explained(self, f"patch {kind} {name}", missing=lambda kind=kind: _no_kind(kind)):
                resource = client.resources.get(api_version=manifest["apiVersion"], kind=kind)
                namespace = manifest["metadata"].get("namespace", self.namespace) if resource.namespaced else None
                resource.server_side_apply(body=dict(manifest), name=name, namespace=namespace, field_manager=FIELD_MANAGER)
            yield f"{kind} {name}"


def connect(context: str | None, namespace: str | None) -> Cluster:
    """Return the cluster of a context of the kubeconfig (None: its current context), or of the pod in which this process runs.

    Raises:
        ClusterFailed: The client is not installed, or there is no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError as exc:
        hint = f"{as_typed('pip')} install 'serve-app[kubernetes]'"
        raise ClusterFailed(problem="the Kubernetes client is not installed", hint=hint) from exc
    configuration = client.Configuration()
    configuration.retries = False
    try:
        contexts, current = config.list_kube_config_contexts()
    except config.ConfigException as exc:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(configuration)
            return Cluster(client.ApiClient(configuration), "", namespace or _pods_namespace())
        hint = "set KUBECONFIG, or make one, for EKS: aws eks update-kubeconfig --name CLUSTER"
        raise ClusterFailed(problem=f"no kubeconfig: {_first_line(exc)}", hint=hint) from exc
    by_name = {c["name"]: c for c in contexts}
    chosen = by_name.get(context or current["name"])
    if chosen is None:
        raise ClusterFailed(problem=f"the kubeconfig has no context {context!r}", hint=f"it has: {', '.join(by_name)}")
    try:
        config.load_kube_config(context=chosen["name"], client_configuration=configuration)
    except config.ConfigException as exc:
        raise ClusterFailed(problem=f"the context {chosen['name']!r} cannot be used: {_first_line(exc)}", hint="") from exc
    return Cluster(client.ApiClient(configuration), chosen["name"], namespace or chosen["context"].get("namespace") or "default")


def _pods_namespace() -> str:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8").strip()


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _no_kind(kind: str) -> ClusterFailed:
    if kind == "RayService":
        return ClusterFailed(problem="the cluster knows no RayService: KubeRay is not installed", hint=_INSTALL_KUBERAY)
    return ClusterFailed(problem=f"the cluster knows no {kind}", hint="install what defines it, or leave it out of the manifests")


_INSTALL_KUBERAY = "install its operator and its CRDs: docs/runbook.md, Install"


@contextlib.contextmanager
def explained(cluster: Cluster, action: str, missing: Any = None) -> Iterator[None]:
    """Turn the client's errors into ours.

    Args:
        action: The request, in the form of ``kubectl auth can-i``.
        missing: Makes the error for an object, or a kind, that does not exist.

    Raises:
        ClusterFailed: The client raised an error.
    """
    from kubernetes.client import ApiException
    from kubernetes.dynamic.exceptions import ResourceNotFoundError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ResourceNotFoundError as exc:
        raise missing() if missing else ClusterFailed(problem=_first_line(exc), hint="") from exc
    except ApiException as exc:
        raise _refusal(cluster, action, exc, missing) from exc
    except HTTPError as exc:
        server = cluster.api.configuration.host
        hint = "is the cluster up, and its address reachable from here?"
        raise ClusterFailed(problem=f"the API server {server} does not answer: {_first_line(exc)}", hint=hint) from exc


def _refusal(cluster: Cluster, action: str, exc: Any, missing: Any) -> ClusterFailed:
    try:
        body = json.loads(exc.body)
    except (TypeError, ValueError):
        body = {}
    message = body.get("message") or exc.reason or f"status {exc.status}"
    match exc.status:
        case 401:
            return ClusterFailed(
                problem="the cluster does not accept the credentials (401)", hint="renew the kubeconfig's credentials"
            )
        case 403:
            hint = f"ask for the right; this command says yes once you have it: kubectl auth can-i {action} {cluster.kubectl_options()}"
            return ClusterFailed(problem=f"not allowed: {message}", hint=hint)
        case 404 if not body.get("details", {}).get("name"):  # the path itself is unknown
            return _no_kind("RayService")
        case 404 if missing:
            found: ClusterFailed = missing()
            return found
        case 409:
            hint = "let its owner change it: by helm upgrade if Helm owns it"
            return ClusterFailed(problem=f"another owner has fields that {action} would change: {message}", hint=hint)
    return ClusterFailed(problem=f"the cluster refused to {action}: {message}", hint="")
