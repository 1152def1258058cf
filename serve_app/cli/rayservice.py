"""`judge` reads from a RayService and its pods whether a rollout is done, in progress or failed, and why. Pure.

The fields are those of KubeRay 1.6's `ray.io/v1`. A change of `serveConfigV2` is made in the active cluster, any other change in a new
cluster: the new cluster is `pending` until its applications run, then `active`, and the old cluster goes after
`rayClusterDeletionDelaySeconds`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

LOST = "a replica was lost; Ray Serve starts another"
FATAL_REASONS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons of a waiting container that do not go away by themselves."""
NOT_READY = "NotReady"
"""The reason of a pod whose containers all run while one is not ready: its readiness probe fails, or has not succeeded yet."""
HEAD = "headgroup"
"""The group of Ray's head."""
REDIS = "redis"
"""The group of the chart's own Redis."""
_BEFORE_START = ("PodInitializing", "ContainerCreating")
"""Reasons of a waiting container that are normal in the first moments."""
_VAGUE = (NOT_READY, *_BEFORE_START)
"""Reasons that do not name the cause; an event may name it."""


@dataclass(frozen=True)
class ReportedStatus:
    """A status with its message: of an application or deployment, in Serve's words, or of a condition, in KubeRay's."""

    status: str
    message: str


@dataclass(frozen=True)
class RayCluster:
    """One of the two clusters of a RayService."""

    name: str
    applications: Mapping[str, ReportedStatus]
    deployments: Mapping[str, ReportedStatus]


@dataclass(frozen=True)
class RayService:
    """The parts of a RayService that concern rollouts."""

    name: str
    namespace: str
    helm_release: str
    """The Helm release that made it; "" if Helm did not."""
    generation: int
    observed_generation: int
    conditions: Mapping[str, ReportedStatus]
    """Type -> condition. The status is True, False or Unknown, and the message begins with the reason."""
    active: RayCluster | None
    pending: RayCluster | None
    redis_address: str
    """Address of the Redis in which Ray's head keeps its state; "" if it keeps the state in memory."""
    instance: str
    """The label `app.kubernetes.io/instance` of its own pods, Redis's pod among them."""

    def is_true(self, condition: str) -> bool:
        return condition in self.conditions and self.conditions[condition].status == "True"

    def newest(self) -> RayCluster | None:
        return self.pending or self.active


@dataclass(frozen=True)
class Pod:
    """A pod of one of the clusters, or of the chart's own Redis."""

    name: str
    cluster: str
    """The Ray cluster; "" for Redis."""
    group: str
    """The worker group, `HEAD`, or `REDIS`."""
    phase: str
    """The pod's phase, or Terminating."""
    is_ready: bool
    restarts: int
    node: str
    reason: str
    """Why the pod is not ready, in one word of a container, of the scheduler, or of ours; "" if it is ready."""
    message: str


def ray_service(value: Mapping[str, Any]) -> RayService:
    """Return a RayService from the API server's object."""
    metadata, status = value["metadata"], value.get("status") or {}
    conditions = {
        c["type"]: ReportedStatus(c["status"], ": ".join(filter(None, (c.get("reason"), c.get("message")))))
        for c in status.get("conditions") or ()
    }
    return RayService(
        name=metadata["name"],
        namespace=metadata["namespace"],
        helm_release=(metadata.get("annotations") or {}).get("meta.helm.sh/release-name", ""),
        generation=metadata.get("generation", 0),
        observed_generation=status.get("observedGeneration", 0),
        conditions=conditions,
        active=_cluster(status.get("activeServiceStatus")),
        pending=_cluster(status.get("pendingServiceStatus")),
        redis_address=_redis_address(value),
        instance=(metadata.get("labels") or {}).get("app.kubernetes.io/instance", metadata["name"]),
    )


def _redis_address(value: Mapping[str, Any]) -> str:
    options = value["spec"].get("rayClusterConfig", {}).get("gcsFaultToleranceOptions") or {}
    return str(options.get("redisAddress", ""))


def _cluster(status: Mapping[str, Any] | None) -> RayCluster | None:
    if not status or not status.get("rayClusterName"):
        return None
    applications = status.get("applicationStatuses") or {}
    return RayCluster(
        name=status["rayClusterName"],
        applications={name: _state(a) for name, a in applications.items()},
        deployments={
            name: _state(d) for a in applications.values() for name, d in (a.get("serveDeploymentStatuses") or {}).items()
        },
    )


def _state(value: Mapping[str, Any]) -> ReportedStatus:
    return ReportedStatus(value.get("status", ""), value.get("message", ""))


def pod(value: Mapping[str, Any]) -> Pod:
    """Return a pod from the API server's object."""
    metadata, status = value["metadata"], value.get("status") or {}
    labels = metadata.get("labels") or {}
    inits, containers = status.get("initContainerStatuses") or (), status.get("containerStatuses") or ()
    is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    reason, message = ("", "") if is_ready else _trouble(inits, containers, status.get("conditions") or ())
    return Pod(
        name=metadata["name"],
        cluster=labels.get("ray.io/cluster", ""),
        group=labels.get("ray.io/group") or labels.get("app.kubernetes.io/component", ""),
        phase="Terminating" if metadata.get("deletionTimestamp") else status.get("phase", "Unknown"),
        is_ready=is_ready,
        restarts=sum(c.get("restartCount", 0) for c in (*inits, *containers)),
        node=(value.get("spec") or {}).get("nodeName") or "",
        reason=reason,
        message=message,
    )


def _trouble(
    inits: Sequence[Mapping[str, Any]], containers: Sequence[Mapping[str, Any]], conditions: Iterable[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return the reason and the message of a pod that is not ready. The checks are ordered: an earlier cause hides the later ones."""
    for container in (*inits, *containers):
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, *_BEFORE_START):
            ended = (container.get("lastState") or {}).get("terminated") or {}
            return waiting["reason"], ", ".join(filter(None, (waiting.get("message"), _ended(ended))))
        if (state.get("terminated") or {}).get("exitCode"):
            return "Ended", f"{container['name']}: {_ended(state['terminated'])}"
    for condition in conditions:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    for container in inits:
        if "running" in (container.get("state") or {}):
            return "Init", f"{container['name']} has not ended yet"
    for container in containers:
        if reason := ((container.get("state") or {}).get("waiting") or {}).get("reason"):
            return reason, ""
    slow = [container["name"] for container in containers if not container.get("ready")]
    return NOT_READY, f"{', '.join(slow)} not ready" if slow else ""


def _ended(terminated: Mapping[str, Any]) -> str:
    """Return how a container ended, with the last line of its output, which the chart's containers keep as their message."""
    if "exitCode" not in terminated:
        return ""
    lines = (terminated.get("message") or "").strip().splitlines()
    return f"exit status {terminated['exitCode']}" + (f", after: {lines[-1].strip()}" if lines else "")


def with_warnings(pods: Iterable[Pod], events: Iterable[Mapping[str, Any]]) -> list[Pod]:
    """Return the pods. A pod whose state does not say why it is not ready gets the message of its newest Warning event."""
    newest: dict[str, Mapping[str, Any]] = {}
    for event in sorted(events, key=_seen_at):
        if event["reason"] != "FailedScheduling":  # a condition reports this for as long as it is true
            newest[event["involvedObject"]["name"]] = event
    return [_explained_by(newest[p.name], p) if p.reason in _VAGUE and p.name in newest else p for p in pods]


def _explained_by(event: Mapping[str, Any], p: Pod) -> Pod:
    message = re.sub(r"\d+\.\d+\.\d+\.\d+(?=:\d)", "POD", event["message"].splitlines()[0])  # the same message for pods of a kind
    return replace(p, reason=p.reason if event["reason"] == "Unhealthy" else event["reason"], message=message)


def _seen_at(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


@dataclass(frozen=True)
class RolloutResult:
    """The state of a rollout at one moment, in one line."""

    kind: Literal["done", "progressing", "failed"]
    line: str


def judge(service: RayService, pods: Sequence[Pod]) -> RolloutResult:
    """Return the state of the newest generation's rollout; ``pods`` may be the pods of both clusters."""
    newest = service.newest()
    if service.observed_generation < service.generation or newest is None:
        return RolloutResult("progressing", "KubeRay has not acted on the change yet")
    mine = [p for p in pods if p.cluster == newest.name and p.phase != "Terminating"]
    redis = [p for p in pods if p.group == REDIS and p.phase != "Terminating"]
    if failure := _failure(service, newest, [*mine, *redis]):
        return RolloutResult("failed", failure)
    running = newest.applications and all(a.status == "RUNNING" for a in newest.applications.values())
    healthy = all(d.status == "HEALTHY" for d in newest.deployments.values())
    if service.is_true("Ready") and not service.is_true("UpgradeInProgress") and not service.pending and running and healthy:
        return RolloutResult("done", f"cluster {newest.name} is ready")
    is_new = service.pending is not None and service.active is not None
    return RolloutResult("progressing", "; ".join([*_progress(newest, mine, is_new=is_new), *_reasons([*redis, *mine])]))


def _failure(service: RayService, newest: RayCluster, pods: Iterable[Pod]) -> str:
    if service.is_true("RollbackInProgress"):
        return f"KubeRay rolls back: {service.conditions['RollbackInProgress'].message}"
    if any(a.status == "DEPLOY_FAILED" for a in newest.applications.values()):
        failed = [(n, d) for n, d in newest.deployments.items() if d.status in ("DEPLOY_FAILED", "UNHEALTHY") and d.message]
        said = failed or [(n, a) for n, a in newest.applications.items() if a.status == "DEPLOY_FAILED"]
        return "; ".join(f"{name}: {own_words(state.message)}" for name, state in said)
    for p in pods:
        if p.reason in FATAL_REASONS:
            return f"pod {p.name}: {p.reason}" + (f": {p.message}" if p.message else "")
    return ""


def _progress(newest: RayCluster, pods: Sequence[Pod], *, is_new: bool) -> Iterator[str]:
    yield f"{'new ' if is_new else ''}cluster {newest.name}: {sum(p.is_ready for p in pods)} of {len(pods)} pods ready"
    said = {name: state for name, state in newest.applications.items() if own_words(state.message) or not state.message}
    yield from (f"{name} {state.status}" for name, state in said.items() if state.status)
    for name, state in newest.deployments.items():
        if own_words(state.message) == LOST:
            yield f"{name}: {LOST}"
        elif state.status != "HEALTHY":
            # Serve tries to start a replica several times before it calls the deployment failed.
            yield f"{name} {state.status}" + "".join(f": {error}" for error in _own_errors(state.message)[-1:])


def _reasons(pods: Iterable[Pod]) -> Iterator[str]:
    """Yield the reasons why pods are not ready; pods with the same reason share a line."""
    names: dict[str, list[str]] = defaultdict(list)
    for p in pods:
        if p.reason:
            names[f"{p.reason}: {p.message}".rstrip(": ")].append(p.name)
    yield from (f"{'pods' if len(same) > 1 else 'pod'} {', '.join(same)} {reason}" for reason, same in names.items())


def own_words(message: str) -> str:
    """Return the text of our own error in Serve's message, which wraps it in three tracebacks; without one, the whole message.

    Serve says of a lost replica that the deployment is UNHEALTHY until "a new deploy happens", though it starts another by itself; of the
    application it only repeats which deployments are UNHEALTHY.
    """
    if found := _own_errors(message):
        return found[-1]
    if message.startswith("A replica's health check failed."):
        return LOST
    return "" if re.fullmatch(r"The deployments \[.*\] are UNHEALTHY\.", message) else message


def own_reasons(deployments: Mapping[str, str], application: str, message: str) -> str:
    """Return each reason among Serve's messages once, a line each: the last deployment with this reason, and our own error's words.

    Args:
        deployments: Deployment -> its message.
        application: The application's name. Its ``message`` is the reason if no deployment has a message.
    """
    names = {own_words(said): name for name, said in deployments.items() if said} or {own_words(message): application}
    return "\n".join(f"{name}: {reason}" for reason, name in names.items())


def _own_errors(message: str) -> list[str]:
    return re.findall(r"^serve_app\.errors\.[\w.]+: (.+)$", message, re.MULTILINE)
