"""What Kubernetes manifests say of serve-app: the configuration inside a RayService and the timeouts around it."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from serve_app.config import parse_settings, problems
from serve_app.config.checks import load_yaml
from serve_app.config.timeouts import Timeouts, broken_rules, serve_shutdown_s
from serve_app.errors import ConfigError

INGRESS_LABEL = ("app.kubernetes.io/component", "ingress")
SPOT_NOTICE_S = 120.0  # AWS's; others give less
_IDLE = re.compile(r"idle_timeout\.timeout_seconds=(\d+)")
_HEALTH_CHECK = "alb.ingress.kubernetes.io/healthcheck-interval-seconds"
_FAILURES = "alb.ingress.kubernetes.io/unhealthy-threshold-count"
_DEFAULT_FAILURES = 2
_DEFAULT_S = {"node_drain_s": 30.0, "gcs_reconnect_s": 60.0, "pod_grace_s": 30.0, "old_cluster_s": 60.0}
_VARIABLES = {
    "node_drain_s": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "gcs_reconnect_s": "RAY_gcs_rpc_server_reconnect_timeout_s",
}


def are_manifests(text: str) -> bool:
    return re.search(r"^kind: ", text, re.MULTILINE) is not None


def manifest_problems(
    text: str, *, client_s: float | None, load_balancer_idle_s: float | None, ignored: Collection[str] = ()
) -> Iterator[ConfigError]:
    """Yield what is wrong in the RayServices of ``text``; the path is the manifest's kind and name, and the key.

    Args:
        text: Manifests, as YAML documents.
        client_s: After which clients give an answer up.
        load_balancer_idle_s: Silence after which the load balancer closes; None: what the manifests ask for.
        ignored: Names of rules of the timeouts that are not judged.

    Raises:
        ConfigError: Not YAML, or no RayService in it.
    """
    try:
        documents = [d for d in yaml.safe_load_all(text) if isinstance(d, Mapping)]
    except yaml.YAMLError as exc:
        raise ConfigError("", f"not valid YAML: {' '.join(str(exc).split())}") from exc
    services = [d for d in documents if d.get("kind") == "RayService"]
    if not services:
        raise ConfigError("", "the manifests hold no RayService", "check the output of: helm template NAME helm/serve-app")
    idle_s = load_balancer_idle_s if load_balancer_idle_s is not None else _annotated_idle_s(documents)
    edge = {"client_s": client_s, "load_balancer_idle_s": idle_s, "health_check_s": _annotated_health_check_s(documents)}
    for service in services:
        where = f"RayService {service['metadata']['name']}"
        try:
            for problem in _service_problems(service["spec"], edge, ignored):
                yield ConfigError(f"{where}: {problem.path}" if problem.path else where, problem.problem, problem.hint)
        except KeyError as exc:
            yield ConfigError(where, f"has no {exc.args[0]}", "validate it against KubeRay's schema first")


def timeout_problems(known: Iterable[Timeouts], ignored: Collection[str] = ()) -> list[ConfigError]:
    """Return the rules that do not hold and are not ignored, each sentence once; the path is the rule's name."""
    broken = dict.fromkeys(b for timeouts in known for b in broken_rules(timeouts))
    return [ConfigError(*b) for b in broken if b.rule not in ignored]


def _service_problems(
    spec: Mapping[str, Any], edge: Mapping[str, float | None], ignored: Collection[str]
) -> Iterator[ConfigError]:
    """Yield what is wrong in one RayService; ``edge`` has the timeouts of what stands before it."""
    for application in load_yaml(spec["serveConfigV2"])["applications"]:
        arguments = application.get("args") or {}
        if wrong := problems(arguments):
            yield from wrong
            continue
        settings = parse_settings(arguments)
        common: dict[str, float | None] = {
            "drain_s": settings.timeouts.drain_s,
            "unready_s": settings.ingress.unready_s,
            "no_replica_s": settings.timeouts.no_replica_s,
            "keep_alive_s": settings.ingress.keep_alive_s,
            "serve_shutdown_s": serve_shutdown_s(settings),
            **edge,
            "old_cluster_s": float(spec.get("rayClusterDeletionDelaySeconds", _DEFAULT_S["old_cluster_s"])),
        }
        cluster = spec["rayClusterConfig"]
        common["head_prestop_s"] = _prestop_s(cluster["headGroupSpec"]["template"])
        groups = cluster.get("workerGroupSpecs") or []
        yield from timeout_problems((Timeouts(**common, **_pod_timeouts(group["template"])) for group in groups), ignored)


def _pod_timeouts(template: Mapping[str, Any]) -> dict[str, float | None]:
    spec = template["spec"]
    container = spec["containers"][0]
    variables = {v["name"]: v.get("value") for v in container.get("env") or ()}
    pod: dict[str, float | None] = {key: float(variables.get(name) or _DEFAULT_S[key]) for key, name in _VARIABLES.items()}
    pod["pod_grace_s"] = float(spec.get("terminationGracePeriodSeconds", _DEFAULT_S["pod_grace_s"]))
    label, component = INGRESS_LABEL
    labels: Mapping[str, str] = template.get("metadata", {}).get("labels") or {}
    is_ingress = labels.get(label) == component
    probe = container.get("readinessProbe")
    pod["prestop_s"] = _prestop_s(template)
    pod["probe_s"] = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) if probe and is_ingress else None
    on_spot = (spec.get("nodeSelector") or {}).get("karpenter.sh/capacity-type") == "spot"
    # A replica's streams go on elsewhere when its node goes; an ingress's end with it.
    pod["spot_notice_s"] = SPOT_NOTICE_S if on_spot and is_ingress else None
    return pod


def _prestop_s(template: Mapping[str, Any]) -> float:
    """Return 0 where there is no hook, or one that does not sleep."""
    hook = (template["spec"]["containers"][0].get("lifecycle") or {}).get("preStop") or {}
    return float((hook.get("sleep") or {}).get("seconds", 0))


def _annotated_idle_s(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the idle timeout of an AWS load balancer that the manifests ask for."""
    for document in documents:
        for value in (document.get("metadata", {}).get("annotations") or {}).values():
            if match := _IDLE.search(str(value)):
                return float(match[1])
    return None


def _annotated_health_check_s(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how long an AWS load balancer that the manifests ask for sends on to an ingress that is no longer ready."""
    for document in documents:
        annotations: Mapping[str, str] = document.get("metadata", {}).get("annotations") or {}
        if (interval := annotations.get(_HEALTH_CHECK)) is not None:
            return float(interval) * float(annotations.get(_FAILURES, _DEFAULT_FAILURES))
    return None
