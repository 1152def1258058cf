"""What a RayService and its pods say of a rollout: is it done, does it go on, has it failed, and why. Pure.

The fields are those of KubeRay 1.6's `ray.io/v1`. A change of `serveConfigV2` is made in the active cluster, any other in a new one:
it is `pending` until its applications run, then `active`, and the old cluster goes after `rayClusterDeletionDelaySeconds`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
"""Reasons of a waiting container that no waiting cures."""


@dataclass(frozen=True)
class State:
    """Of an application or a deployment, in Serve's words."""

    status: str
    message: str


@dataclass(frozen=True)
class RayCluster:
    """One of the two clusters of a RayService."""

    name: str
    applications: Mapping[str, State]
    deployments: Mapping[str, State]


@dataclass(frozen=True)
class RayService:
    """A RayService as far as rollouts go."""

    name: str
    namespace: str
    helm_release: str
    """"" where Helm did not make it."""
    generation: int
    observed_generation: int
    conditions: Mapping[str, State]
    """By type; the status is True, False or Unknown, the message has the reason in front."""
    active: RayCluster | None
    pending: RayCluster | None

    def is_true(self, condition: str) -> bool:
        return condition in self.conditions and self.conditions[condition].status == "True"

    def newest(self) -> RayCluster | None:
        return self.pending or self.active


@dataclass(frozen=True)
class Pod:
    """A pod of one of the clusters."""

    name: str
    cluster: str
    group: str
    phase: str
    """Its phase, or Terminating."""
    is_ready: bool
    restarts: int
    node: str
    reason: str
    """Why it does not run: a container's or the scheduler's; "" when it does."""
    message: str


def ray_service(value: Mapping[str, Any]) -> RayService:
    """Read what the API server says of a RayService."""
    metadata, status = value["metadata"], value.get("status") or {}
    conditions = {
        c["type"]: State(c["status"], ": ".join(filter(None, (c.get("reason"), c.get("message")))))
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
    )


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


def _state(value: Mapping[str, Any]) -> State:
    return State(value.get("status", ""), value.get("message", ""))


def pod(value: Mapping[str, Any]) -> Pod:
    """Read what the API server says of a pod."""
    metadata, status = value["metadata"], value.get("status") or {}
    labels = metadata.get("labels") or {}
    containers: Sequence[Mapping[str, Any]] = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    reason, message = _trouble(containers, status.get("conditions") or ())
    return Pod(
        name=metadata["name"],
        cluster=labels.get("ray.io/cluster", ""),
        group=labels.get("ray.io/group", ""),
        phase="Terminating" if metadata.get("deletionTimestamp") else status.get("phase", "Unknown"),
        is_ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()),
        restarts=sum(c.get("restartCount", 0) for c in containers),
        node=(value.get("spec") or {}).get("nodeName") or "",
        reason=reason,
        message=message,
    )


def _trouble(containers: Iterable[Mapping[str, Any]], conditions: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            ended = (container.get("lastState") or {}).get("terminated") or {}
            last = f"exit status {ended['exitCode']}" if "exitCode" in ended else ""
            return waiting["reason"], ", ".join(filter(None, (waiting.get("message"), last)))
    for condition in conditions:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    return "", ""


@dataclass(frozen=True)
class Verdict:
    """What a moment of a rollout means, in one line."""

    kind: Literal["done", "progressing", "failed"]
    line: str


def judge(service: RayService, pods: Sequence[Pod]) -> Verdict:
    """Return how the rollout of the newest generation stands; ``pods`` may be those of both clusters."""
    newest = service.newest()
    if service.observed_generation < service.generation or newest is None:
        return Verdict("progressing", "KubeRay has not acted on the change yet")
    mine = [p for p in pods if p.cluster == newest.name and p.phase != "Terminating"]
    if failure := _failure(service, newest, mine):
        return Verdict("failed", failure)
    running = newest.applications and all(a.status == "RUNNING" for a in newest.applications.values())
    healthy = all(d.status == "HEALTHY" for d in newest.deployments.values())
    if service.is_true("Ready") and not service.is_true("UpgradeInProgress") and not service.pending and running and healthy:
        return Verdict("done", f"cluster {newest.name} is ready")
    return Verdict("progressing", _progress(newest, mine, is_new=service.pending is not None and service.active is not None))


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


def _progress(newest: RayCluster, pods: Sequence[Pod], *, is_new: bool) -> str:
    parts = [f"{'new ' if is_new else ''}cluster {newest.name}: {sum(p.is_ready for p in pods)} of {len(pods)} pods ready"]
    parts += [f"{name} {state.status}" for name, state in newest.applications.items() if state.status]
    parts += [f"{name} {state.status}" for name, state in newest.deployments.items() if state.status != "HEALTHY"]
    parts += [f"pod {p.name} {p.reason}: {p.message}".rstrip(": ") for p in pods if p.reason]
    return "; ".join(parts)


def own_words(message: str) -> str:
    """Return our own error's text out of Serve's message, which wraps it in three tracebacks; else the whole message."""
    found = re.findall(r"^serve_app\.errors\.\w+: (.+)$", message, re.MULTILINE)
    return found[-1] if found else message
