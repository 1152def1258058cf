"""This module checks Kubernetes manifests: the configuration inside a RayService and the timeouts around it."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from serve_app.config import parse_settings, problems
from serve_app.config.bounded_yaml import BoundedLoader
from serve_app.config.checks import load_yaml, shown, too_deep
from serve_app.config.timeouts import Timeouts, broken_rules, serve_shutdown_s
from serve_app.errors import ConfigError

INGRESS_LABEL = ("app.kubernetes.io/component", "ingress")
SPOT_NOTICE_S = 120.0  # AWS's notice; other clouds give less
_IDLE = re.compile(r"idle_timeout\.timeout_seconds=(\d+)")
_HEALTH_CHECK = "alb.ingress.kubernetes.io/healthcheck-interval-seconds"
_FAILURES = "alb.ingress.kubernetes.io/unhealthy-threshold-count"
_DEFAULT_FAILURES = 2
_DEFAULT_S = {"node_drain_s": 30.0, "gcs_reconnect_s": 60.0, "pod_grace_s": 30.0, "old_cluster_s": 60.0}
_SCHEMA = "validate it against KubeRay's schema first"
_VARIABLES = {
    "node_drain_s": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "gcs_reconnect_s": "RAY_gcs_rpc_server_reconnect_timeout_s",
}


def are_manifests(text: str) -> bool:
    return re.search(r"^kind: ", text, re.MULTILINE) is not None


def documents_in(text: str) -> list[Mapping[str, Any]]:
    """Return the YAML documents of ``text`` that are not empty.

    Raises:
        ConfigError: The text is not YAML or holds too many values, or a document is not a mapping.
    """
    try:
        documents = [d for d in yaml.load_all(text, BoundedLoader) if d is not None]
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a number by its form only, such as 0b_
        raise ConfigError("", f"not valid YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError:
        raise too_deep() from None
    return [mapping_at(d, f"document {number}") for number, d in enumerate(documents, 1)]


def manifest_problems(
    text: str, *, client_s: float | None, load_balancer_idle_s: float | None, ignored: Collection[str] = ()
) -> Iterator[ConfigError]:
    """Yield the problems of the RayServices in ``text``; a problem's path is the manifest's kind and name, and the key.

    Args:
        text: Manifests, as YAML documents.
        client_s: Seconds after which clients give an answer up.
        load_balancer_idle_s: Seconds of silence after which the load balancer closes; None: the value of the manifests.
        ignored: Names of timeout rules that are not checked.

    Raises:
        ConfigError: The text is not YAML or has no RayService, a RayService has no name or apiVersion, or a load balancer's annotation is
            not a number.
    """
    documents = documents_in(text)
    services = [d for d in documents if d.get("kind") == "RayService"]
    if not services:
        raise ConfigError("", "the manifests hold no RayService", "check the output of: helm template NAME helm/serve-app")
    idle_s = load_balancer_idle_s if load_balancer_idle_s is not None else _annotated_idle_s(documents)
    edge = {"client_s": client_s, "load_balancer_idle_s": idle_s, "health_check_s": _annotated_health_check_s(documents)}
    for service in services:
        where = called(service)
        try:
            for problem in _service_problems(mapping_at(service.get("spec"), "spec"), edge, ignored):
                yield inside(where, problem)
        except KeyError as exc:
            yield ConfigError(where, f"has no {exc.args[0]}", _SCHEMA)
        except ConfigError as exc:
            yield inside(where, exc)


def upgrade_lines(text: str) -> Iterator[str]:
    """Yield, for each RayService that upgrades by a second Ray cluster, the GPUs that this cluster starts with and waits for."""
    for service in (document for document in documents_in(text) if document.get("kind") == "RayService"):
        spec = mapping_at(service.get("spec"), "spec")
        groups = list_at(mapping_at(spec.get("rayClusterConfig"), "rayClusterConfig").get("workerGroupSpecs"), "workerGroupSpecs")
        gpus = sum(_gpus_of(mapping_at(group, "workerGroupSpecs")) for group in groups)
        strategy = mapping_at(spec.get("upgradeStrategy"), "upgradeStrategy").get("type", "NewCluster")
        if gpus and strategy != "None":
            yield (
                f"An upgrade by a new Ray cluster waits for {gpus:g} GPU{'' if gpus == 1 else 's'} beside those in use, without limit. "
                "If there will be none, set upgradeStrategy to None (helm/serve-app/UPGRADE.md)."
            )


def _gpus_of(group: Mapping[str, Any]) -> float:
    """Return the GPUs of a worker group's first pods."""
    of_pod = mapping_at(group.get("rayStartParams"), "rayStartParams").get("num-gpus")
    return _number(group.get("replicas"), "replicas", 0) * _number(of_pod, "num-gpus", 0)


def called(manifest: Mapping[str, Any]) -> str:
    """Return the kind and the name of a manifest.

    Raises:
        ConfigError: The kind, the name or the apiVersion is missing or not a text.
    """
    kind, name = manifest.get("kind"), _metadata(manifest).get("name")
    for key, value in (("kind", kind), ("metadata.name", name), ("apiVersion", manifest.get("apiVersion"))):
        where = str(kind or "a document")
        if value is None:
            raise ConfigError(where, f"has no {key}", "give it one, or remove the document")
        if not isinstance(value, str):
            raise ConfigError(where, f"has {shown(value)} as its {key}, but should have text", "put it in quotes, or correct it")
    return f"{kind} {name}"


def inside(where: str, problem: ConfigError) -> ConfigError:
    return ConfigError(f"{where}: {problem.path}" if problem.path else where, problem.problem, problem.hint)


def timeout_problems(known: Iterable[Timeouts], ignored: Collection[str] = ()) -> list[ConfigError]:
    """Return an error for each broken rule that is not ignored, each sentence once; an error's path is the rule's name."""
    broken = dict.fromkeys(b for timeouts in known for b in broken_rules(timeouts, ignored))
    return [ConfigError(*b) for b in broken]


def _service_problems(
    spec: Mapping[str, Any], edge: Mapping[str, float | None], ignored: Collection[str]
) -> Iterator[ConfigError]:
    """Yield the problems of one RayService; ``edge`` has the timeouts of clients and load balancers in front of it.

    Raises:
        KeyError: A key is missing.
        ConfigError: A value has another type than its key.
    """
    for number, application in enumerate(applications_in(spec["serveConfigV2"])):
        arguments = mapping_at(application, f"serveConfigV2.applications[{number}]").get("args") or {}
        if wrong := problems(arguments):
            yield from wrong
            continue
        settings = parse_settings(arguments)
        delay = "rayClusterDeletionDelaySeconds"
        common: dict[str, float | None] = {
            "drain_s": settings.timeouts.drain_s,
            "unready_s": settings.ingress.unready_s,
            "no_replica_s": settings.timeouts.no_replica_s,
            "keep_alive_s": settings.ingress.keep_alive_s,
            "serve_shutdown_s": serve_shutdown_s(settings),
            **edge,
            "old_cluster_s": _number(spec.get(delay), delay, _DEFAULT_S["old_cluster_s"]),
        }
        cluster = mapping_at(spec["rayClusterConfig"], "rayClusterConfig")
        common["head_prestop_s"] = _prestop_s(_Pod.of(cluster["headGroupSpec"], "headGroupSpec"))
        groups = list_at(cluster.get("workerGroupSpecs"), "workerGroupSpecs")
        pods = [_Pod.of(group, f"workerGroupSpecs[{index}]") for index, group in enumerate(groups)]
        yield from timeout_problems((Timeouts(**common, **_pod_timeouts(pod)) for pod in pods), ignored)


def applications_in(serve_config: Any) -> Sequence[Any]:
    if not isinstance(serve_config, str):
        raise ConfigError("serveConfigV2", f"is {shown(serve_config)}, but should be text", "write it below `serveConfigV2: |`")
    config = mapping_at(load_yaml(serve_config), "serveConfigV2")
    if config.get("applications") is None:
        raise KeyError("applications")
    return list_at(config["applications"], "serveConfigV2.applications")


class _Pod(NamedTuple):
    """The part of a pod template that is read. The first container is Ray's."""

    at: str
    labels: Mapping[str, Any]
    spec: Mapping[str, Any]
    container: Mapping[str, Any]

    @classmethod
    def of(cls, group: Any, at: str) -> "_Pod":
        template = mapping_at(mapping_at(group, at)["template"], f"{at}.template")
        spec = mapping_at(template["spec"], f"{at}.template.spec")
        containers = list_at(spec["containers"], f"{at}.template.spec.containers")
        if not containers:
            raise ConfigError(f"{at}.template.spec.containers", "is empty", _SCHEMA)
        labels = mapping_at(_metadata(template).get("labels"), f"{at}.template.metadata.labels")
        return cls(at, labels, spec, mapping_at(containers[0], f"{at}.template.spec.containers[0]"))


def _pod_timeouts(pod: _Pod) -> dict[str, float | None]:
    entries = [mapping_at(v, f"{pod.at}: env") for v in list_at(pod.container.get("env"), f"{pod.at}: env")]
    variables = {str(v.get("name")): v.get("value") for v in entries}
    found: dict[str, float | None] = {
        key: _number(variables.get(name) or None, f"{pod.at}: {name}", _DEFAULT_S[key]) for key, name in _VARIABLES.items()
    }
    grace = "terminationGracePeriodSeconds"
    found["pod_grace_s"] = _number(pod.spec.get(grace), f"{pod.at}: {grace}", _DEFAULT_S["pod_grace_s"])
    label, component = INGRESS_LABEL
    is_ingress = pod.labels.get(label) == component
    found["prestop_s"] = _prestop_s(pod)
    found["probe_s"] = _probe_s(pod) if is_ingress else None
    on_spot = mapping_at(pod.spec.get("nodeSelector"), f"{pod.at}: nodeSelector").get("karpenter.sh/capacity-type") == "spot"
    # When a node goes, the streams of a replica continue at another replica; the streams of an ingress end with it.
    found["spot_notice_s"] = SPOT_NOTICE_S if on_spot and is_ingress else None
    return found


def _probe_s(pod: _Pod) -> float | None:
    """Return for how long the readiness probe has to fail until the pod counts as not ready; None without a probe."""
    at = f"{pod.at}: readinessProbe"
    if not (probe := mapping_at(pod.container.get("readinessProbe"), at)):
        return None
    period_s = _number(probe.get("periodSeconds"), f"{at}.periodSeconds", 10)
    return period_s * _number(probe.get("failureThreshold"), f"{at}.failureThreshold", 3)


def _prestop_s(pod: _Pod) -> float:
    """Return the sleep of the preStop hook; 0 if there is no hook, or it does not sleep."""
    value: Mapping[str, Any] = pod.container
    for key in ("lifecycle", "preStop", "sleep"):
        value = mapping_at(value.get(key), f"{pod.at}: {key}")
    return _number(value.get("seconds"), f"{pod.at}: preStop.sleep.seconds", 0)


def _annotated_idle_s(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the idle timeout that the manifests set for an AWS load balancer."""
    for document in documents:
        for value in _annotations(document).values():
            if match := _IDLE.search(str(value)):
                return float(match[1])
    return None


def _annotated_health_check_s(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how long an AWS load balancer of the manifests still sends to an ingress that is no longer ready."""
    for document in documents:
        annotations = _annotations(document)
        if (interval := annotations.get(_HEALTH_CHECK)) is not None:
            failures = _number(annotations.get(_FAILURES), _FAILURES, _DEFAULT_FAILURES)
            return _number(interval, _HEALTH_CHECK, 0) * failures
    return None


def _annotations(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping_at(_metadata(document).get("annotations"), "metadata.annotations")


def _metadata(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping_at(manifest.get("metadata"), "metadata")


def mapping_at(value: Any, key: str) -> Mapping[str, Any]:
    """Return the value of ``key``; an empty mapping for null, which Kubernetes reads as a missing key.

    Raises:
        ConfigError: The value is not a mapping.
    """
    if not isinstance(value, Mapping | None):
        raise ConfigError(key, f"is {shown(value)}, but should be a mapping", _SCHEMA)
    return value or {}


def list_at(value: Any, key: str) -> Sequence[Any]:
    """Return a list, as `mapping_at` returns a mapping."""
    if not isinstance(value, list | None):
        raise ConfigError(key, f"is {shown(value)}, but should be a list", _SCHEMA)
    return value or []


def _number(value: Any, key: str, default: float) -> float:
    """Return a number, as `mapping_at` returns a mapping; the number may be in quotes, as in variables and annotations."""
    try:
        if math.isfinite(number := default if value is None else float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(key, f"is {shown(value)}, but should be a number", "correct it, or remove it")
