"""`fleet_state` says of a fleet's report in one word and one sentence whether requests are answered, and which replicas are missing. Pure.

Ray Serve calls a deployment UNHEALTHY as soon as one replica is lost, even if the others answer every request.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from serve_app.autoscaling.rules import INGRESS
from serve_app.cli.rayservice import HEAD, Pod, RayService
from serve_app.ui.replicas import Report, models_of, replicas_of, target_of

_OF_SERVE = {
    "RUNNING": "ready",
    "UPDATING": "ready",
    "PENDING_MIGRATION": "ready",
    "STOPPING": "stopping",
    "STOPPED": "stopping",
    "IDLE": "idle",
}
"""State of a replica for Serve, or of a pod by `of_release` -> ours; in every other state it starts."""
_ANSWERING = ("ready", "asleep", "waking")
"""States of a replica that gets requests."""
_SHOWN = ("asleep", "waking", "starting", "idle", "draining", "stopping", "lost")
_TROUBLE = ("UNHEALTHY", "DEPLOY_FAILED")
_BEFORE = ("NOT_STARTED", "DEPLOYING")


class Verdict(NamedTuple):
    """What the first line of `serve-app status` says."""

    word: str
    """`serving`; `starting`, `deploying` or `scaling` on the way there; `degraded`: something was lost, and requests are answered;
    `failed` or `down`: no request is answered; `stopping`; `not running`."""
    said: str
    """Such as "1 of 2 replicas ready, 1 starting; requests are answered"."""


class _Group(NamedTuple):
    """The replicas of one model, or of one deployment if the report lacks models; on Kubernetes, the pods of a group."""

    name: str
    target: int
    states: Counter[str]
    """State -> replicas."""

    @property
    def answering(self) -> int:
        return sum(self.states[state] for state in _ANSWERING)


def fleet_state(report: Report) -> Verdict:
    """Return the state of the fleet in a report of `status.collect`, `status.asked_by_http` or `of_release`."""
    status, unit = report["status"], report.get("unit", "replica")
    if status == "NOT_FOUND":
        return Verdict("not running", "Ray Serve has no application of this name")
    groups = [*_groups(report)]
    without = [group.name for group in groups if group.target and not group.answering]
    short = any(group.answering < group.target for group in groups)
    lost = any(group.states["lost"] for group in groups)
    num_ingresses, wanted = _ingresses(report)
    can_answer = num_ingresses > 0 and any(group.answering for group in groups)
    if status == "DELETING":
        word = "stopping"
    elif not can_answer and (without or not num_ingresses):
        word = "starting" if status in _BEFORE else "failed" if status == "DEPLOY_FAILED" else "down"
    elif status in _TROUBLE or (lost and short and not status):
        word = "degraded"
    elif short or status == "DEPLOYING":
        word = {"DEPLOYING": "deploying", "": "starting"}.get(status, "scaling")
    else:
        word = "serving"
    parts = [_readiness(groups, unit)]
    if num_ingresses < wanted:
        parts[0] += f", {num_ingresses} of {wanted} ingresses ready"
    if not num_ingresses:
        parts.append("no request is answered")
    elif without:
        parts.append(f"requests for {', '.join(without)} wait for a {unit}")
    elif word != "serving":
        parts.append("requests are answered")
    return Verdict(word, "; ".join(parts))


def of_release(service: RayService, pods: Iterable[Pod]) -> Report:
    """Return the report of the cluster that serves, in the form of `status.collect`, with pods for replicas.

    The chart's pods are ready while the replica or ingress in them is. If Serve has all replicas that it wants, other model pods are idle.
    """
    serving = service.active or service.pending
    if serving is None:
        return {"status": "NOT_STARTED", "deployments": {}, "members": []}
    said = {application.status for application in serving.applications.values()}
    states: dict[str, Counter[str]] = defaultdict(Counter)
    lacks_none = bool(serving.deployments) and all(d.status == "HEALTHY" for d in serving.deployments.values())
    for p in pods:
        if p.cluster == serving.name and p.group != HEAD:
            is_idle = lacks_none and p.phase == "Running" and p.group != INGRESS
            other = "STOPPING" if p.phase == "Terminating" else "IDLE" if is_idle else "STARTING"
            states[p.group]["RUNNING" if p.is_ready and p.phase != "Terminating" else other] += 1
    deployments = {
        group: {"replica_states": count, "target": count["RUNNING"] + count["STARTING"]} for group, count in states.items()
    }
    is_moving = service.pending is not None or service.is_true("UpgradeInProgress")
    status = next(
        (word for word in _TROUBLE if word in said), "RUNNING" if said == {"RUNNING"} and not is_moving else "DEPLOYING"
    )
    return {"status": status, "deployments": deployments, "members": [], "unit": "model pod"}


def _groups(report: Report) -> Iterator[_Group]:
    """Yield the models as the ingress reports them, with lost replicas; else the deployments as Serve counts them."""
    if "time" in report:
        for name in models_of(report):
            count = Counter(replica.state for replica in replicas_of(report, name))
            answering = sum(count[state] for state in _ANSWERING)
            target = target_of(report, name)
            yield _Group(name, answering if target is None else target, count)
        return
    for name, deployment in report["deployments"].items():
        if name != INGRESS:
            count = Counter()
            for state, number in deployment["replica_states"].items():
                count[_OF_SERVE.get(state, "starting")] += number
            yield _Group(name, deployment.get("target", count["ready"]), count)


def _ingresses(report: Report) -> tuple[int, int]:
    """Return how many ingresses are ready and how many are wanted. An ingress that has reported is ready, whatever Serve says."""
    leases = sum(member["role"] == "ingress" and member["state"] == "ready" for member in report["members"])
    deployment: Mapping[str, Any] = report["deployments"].get(INGRESS, {})
    if not deployment:
        return leases, leases
    ready = deployment["replica_states"].get("RUNNING", 0)
    return ready, deployment.get("target", ready)


def _readiness(groups: list[_Group], unit: str) -> str:
    count = sum((group.states for group in groups), Counter[str]())
    target = sum(group.target for group in groups)
    others = "".join(f", {count[state]} {state}" for state in _SHOWN if count[state])
    return f"{count['ready']} of {target} {unit}{'s' * (target != 1)} ready{others}"
