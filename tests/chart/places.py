"""This module finds things in a rendering, and has the rows that several pods have in common, for test_values.py."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.chart.render import Object, Rendered, at, models

Place = Callable[[Rendered], Any]
Row = tuple[str, Any, Place, Any, dict[str, Any]]

CUDA = {"name": "m", "model": "/opt/m", "device": "cuda", "gpus_per_replica": 2}
GPU = models(CUDA)
NODES = {"model": "/opt/m", "device": "cuda", "gpus_per_replica": 16, "nodes": 2}
FT = at("gcsFaultTolerance.enabled", True)
OUTSIDE = {"gcsFaultTolerance": {"enabled": True, "address": "rediss://r:6380"}}
MONITORS = at("monitoring.podMonitors", True)
RULES = at("monitoring", {"podMonitors": True, "prometheusRules": True})
BOARD = at("monitoring.dashboards", True)
CLASSES = at("priorityClasses.create", True)
INGRESS = at("ingress.enabled", True)
OUTER = at("networkPolicies.clients", [{"ipBlock": {"cidr": "10.2.0.0/16"}}])
ALB = {"ingress": {"enabled": True, "alb": True, "hosts": ["h"]}, "config": {"ingress": {"unready_s": 15}}} | OUTER
ROUTE = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}
HUB = {"path": "m", "source": "hf:o/n", "revision": "a" * 40}
S3 = {"path": "s", "source": "s3://b/p", "sha256": "b" * 64}
LOADED = {"weights": {"enabled": True, "downloads": [HUB]}}
LOADED_S3 = {"weights": {"enabled": True, "downloads": [S3]}}
MAPPING = {"a/b": "c"}
TOLERATION = [{"key": "k", "operator": "Exists"}]
VARIABLE = {"name": "N", "value": "v"}
SOURCE = {"configMapRef": {"name": "c"}}
SIDECAR = {"name": "sidecar", "image": "i"}
MOUNT = {"name": "v", "mountPath": "/v"}
VOLUME = {"name": "v", "emptyDir": {}}
MODEL = "model"
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
"""The variable that each of our containers without a GPU has."""


def only(objects: dict[str, Object]) -> Object:
    (one,) = objects.values()
    return one


def size_of(group: str, volume: str) -> Place:
    return lambda r: next(v for v in r.pod(group)["volumes"] if v["name"] == volume)["emptyDir"]["sizeLimit"]


def weights_job(r: Rendered) -> Object:
    """Return the only job that downloads."""
    return dict(only({name: job for name, job in r.of("Job").items() if name.startswith("weights-")})["spec"])


def job(r: Rendered) -> Object:
    return dict(weights_job(r)["template"]["spec"])


def redis(r: Rendered) -> Object:
    return dict(only(r.of("StatefulSet"))["spec"])


def redis_container(r: Rendered) -> Object:
    return dict(redis(r)["template"]["spec"]["containers"][0])


def policy(name: str) -> Callable[[Rendered], Object]:
    return lambda r: dict(r.of("NetworkPolicy")[name]["spec"])


def annotations(kind: str, name: str = "") -> Place:
    return lambda r: r.of(kind)[name]["metadata"].get("annotations", {})


def resources(path: str, place: Place, context: dict[str, Any] | None = None, *, disk: bool = False) -> Iterator[Row]:
    """Rows of the amounts of a container, whose resources ``place`` finds; with ``disk``, of ephemeral storage, too."""
    if disk:
        name = "ephemeral-storage"
        yield f"{path}.requests.{name}", "13Mi", amount_at(place, "requests", name), "13Mi", context or {}
    for kind, name, amount in (
        ("requests", "cpu", "11m"),
        ("requests", "memory", "12Mi"),
        ("limits", "cpu", "130"),
        ("limits", "memory", "140Gi"),
    ):
        yield f"{path}.{kind}.{name}", amount, amount_at(place, kind, name), amount, context or {}


def amount_at(place: Place, kind: str, name: str) -> Place:
    return lambda r: place(r)[kind][name]


def pods(path: str, group: str) -> Iterator[Row]:
    """Rows that the pods of all three kinds have in common, but for resources."""
    yield f"{path}.priorityClassName", "p", lambda r: r.pod(group)["priorityClassName"], "p", {}
    yield f"{path}.nodeSelector", MAPPING, lambda r: r.pod(group)["nodeSelector"], MAPPING, {}
    yield f"{path}.tolerations", TOLERATION, lambda r: r.pod(group)["tolerations"], TOLERATION, {}
    yield f"{path}.affinity", {"nodeAffinity": {}}, lambda r: r.pod(group)["affinity"], {"nodeAffinity": {}}, {}

    def template(r: Rendered) -> Object:
        return dict(r.group(group)["template"]["metadata"])

    yield f"{path}.podAnnotations", MAPPING, lambda r: template(r)["annotations"], MAPPING, {}
    yield f"{path}.podLabels", MAPPING, lambda r: template(r)["labels"]["a/b"], "c", {}
    yield f"{path}.extraEnv", [VARIABLE], lambda r: r.environment(group)["N"], "v", {}
    yield f"{path}.extra", *extra_of(group), LOADED
    yield f"{path}.extraVolumes", [VOLUME], lambda r: r.pod(group)["volumes"][-1], VOLUME, {}
    volume = at(f"{path}.extraVolumes", [VOLUME])
    yield f"{path}.extraVolumeMounts", [MOUNT], lambda r: r.container(group)["volumeMounts"][-1], MOUNT, volume
    yield f"{path}.tmpSize", "3Mi", size_of(group, "tmp"), "3Mi", {}
    if path == "modelPods":
        yield f"{path}.homeSize", "3Mi", size_of(group, "home"), "3Mi", {}
        yield f"{path}.shmSize", "300Mi", size_of(group, "shm"), "300Mi", {}


def extra_of(group: str) -> tuple[dict[str, Any], Place, dict[str, Any]]:
    """Return all keys of the `extra` of pods, where they show, and what shows there."""
    spread = {"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    extra = {"envFrom": [SOURCE], "containers": [SIDECAR], "initContainers": [SIDECAR | {"name": "setup"}], "schedulerName": "s"}
    if group != "head":
        extra["topologySpreadConstraints"] = [spread]

    def shown(r: Rendered) -> dict[str, Any]:
        pod = r.pod(group)
        found = {
            "envFrom": pod["containers"][0]["envFrom"],
            "containers": pod["containers"][1:],
            "initContainers": pod["initContainers"][-1:],
            "schedulerName": pod["schedulerName"],
        }
        constraints = pod.get("topologySpreadConstraints")
        return found | (
            {"topologySpreadConstraints": [{key: c[key] for key in spread} for c in constraints]} if constraints else {}
        )

    return extra, shown, extra


def images(path: str, place: Place, context: dict[str, Any], *, name: str) -> Iterator[Row]:
    """Rows of an image whose container ``place`` finds."""
    digest = "sha256:" + "d" * 64
    yield f"{path}.repository", "h/i", lambda r: place(r)["image"].rpartition(":")[0], "h/i", context
    yield f"{path}.tag", "9.9", lambda r: place(r)["image"], f"{name}:9.9", context
    yield f"{path}.digest", digest, lambda r: place(r)["image"], f"{name}@{digest}", context


def pull_secrets(r: Rendered) -> dict[str, list[str]]:
    """Return the names of the Secrets by which each pod pulls."""
    return {where: [s["name"] for s in pod["spec"].get("imagePullSecrets", [])] for where, pod in r.pod_templates()}


def secrets_of(r: Rendered, group: str) -> list[str]:
    return [v["secret"]["secretName"] for v in r.pod(group)["volumes"] if "secret" in v]


def redis_password(r: Rendered) -> Any:
    return r.cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]


def weights_mounts(r: Rendered) -> list[bool]:
    return [any(m["mountPath"] == "/models" for m in r.container(group)["volumeMounts"]) for group in ("ingress", MODEL, "head")]


def claim(r: Rendered) -> Object:
    return dict(r.of("PersistentVolumeClaim")["weights"])


def variables(container: Object) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"]}


def variables_from(container: Object) -> dict[str, Object]:
    """Return of each variable that a Secret gives its name and key there."""
    return {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "valueFrom" in e}


def slo(path: str, value: float, name: str, said: str) -> Row:
    """Return the row of a value below monitoring.slo, which shows as ``said`` in the expression of an alert or a record."""
    return f"monitoring.slo.{path}", value, lambda r: said in alert(r, name)["expr"], True, RULES


def alert(r: Rendered, name: str) -> Object:
    groups = only(r.of("PrometheusRule"))["spec"]["groups"]
    return next(rule for group in groups for rule in group["rules"] if name in (rule.get("alert"), rule.get("record")))
