"""This module finds each model's replicas in a fleet's report, those that start or are lost included, for the fleet page and commands.

Pure. Members and decisions come from the lease board. Targets and starting replicas come from Serve's controller, and lost replicas from
the links of the ingress that answered. A report without these has none: an older release does not send them, and Serve may be silent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Report = Mapping[str, Any]
"""The answer to `/fleet`."""
SLEEP_STATES = {"falling_asleep": "asleep", "asleep": "asleep", "waking": "waking"}
"""The phase of a replica's engine (`core.sleep.Phase`) -> the replica's state; in other phases the replica is ready."""


class Replica(NamedTuple):
    """A replica of a model, and what it does now."""

    replica_id: str
    state: str
    """`ready`, `asleep`, `waking`, `draining`, `starting` or `lost`."""
    doing: str
    """What it does now; words that follow its state in a sentence if it starts or is lost."""
    member: Mapping[str, Any] | None = None
    """Its row of the report; None for a replica that starts or is lost."""
    started: float | None = None
    """For a replica that starts, the share of the usual time that has passed, 0 to 1; None where no start was measured."""


def models_of(report: Report) -> list[str]:
    """Return the names of all models of the report, sorted."""
    names = {name for member in report["members"] for name in member["load"].get("models", {})}
    names |= {member["model"] for member in report["members"] if member["role"] == "replica"}
    return sorted(names | report.get("models", {}).keys() | {lost["model"] for lost in report.get("lost", ())})


def replicas_of(report: Report, model: str) -> list[Replica]:
    """Return the replicas of a model: those with a lease, then those that start, then those that are lost."""
    leases = [m for m in report["members"] if m["role"] == "replica" and m["model"] == model and m["state"] != "lost"]
    present = {member["replica_id"] for member in leases}
    found = [_leased(member) for member in sorted(leases, key=lambda m: str(m["replica_id"]))]
    usual_s = _usual_start_s(report, model)
    for start in report.get("models", {}).get(model, {}).get("starting", ()):
        if start["replica_id"] not in present:  # a replica has its lease a moment before Serve knows that it has started
            found.append(_starting(start, report["time"], usual_s))
    for lost in report.get("lost", ()):
        if lost["model"] == model:
            doing = f"{span(report['time'] - lost['time'])} ago: {lost['cause']}"
            found.append(Replica(lost["replica_id"], "lost", doing))
    return found


def target_of(report: Report, model: str) -> int | None:
    """Return how many replicas the model is to have; None if the report does not say."""
    target = report.get("models", {}).get(model, {}).get("target")
    return None if target is None else int(target)


def ready_of(report: Report, model: str) -> str:
    """Return how many of the wanted replicas are ready, and how many are in each other state: "1 of 2 ready, 1 starting"."""
    return " ".join(_readiness(report, [model]))


def ready_of_all(report: Report) -> tuple[str, str]:
    """Return the same for the replicas of all models in two parts: "1 of 2" and "replicas ready, 1 starting"."""
    number, words = _readiness(report, models_of(report))
    return number, f"replica{'s' * (number != '1')} {words}"


def _readiness(report: Report, models: Sequence[str]) -> tuple[str, str]:
    """Return "1 of 2" and "ready, 1 starting" for the replicas of these models; only "1" if the report lacks the target of a model."""
    count = Counter(replica.state for model in models for replica in replicas_of(report, model))
    targets = [target for model in models if (target := target_of(report, model)) is not None]
    wanted = f" of {sum(targets)}" if targets and len(targets) == len(models) else ""
    others = [f"{count[state]} {state}" for state in ("asleep", "waking", "starting", "draining", "lost") if count[state]]
    return f"{count['ready']}{wanted}", ", ".join(["ready", *others])


def span(seconds: float) -> str:
    """Return a duration in its largest full unit: "12 s", "3 min", "5 h", "2 d". A negative one, between two clocks, is 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _leased(member: Mapping[str, Any]) -> Replica:
    state = member["state"]
    if state == "ready":
        state = SLEEP_STATES.get(member["load"].get("sleep", ""), state)
    doing = {"asleep": "its engine sleeps until the next request", "waking": "its engine wakes"}.get(state) or _work_of(member)
    return Replica(member["replica_id"], state, doing, member)


def _work_of(member: Mapping[str, Any]) -> str:
    running, waiting = int(member["load"]["running"]), int(member["load"]["waiting"])
    requests = f"{running} request{'s' * (running != 1)}"
    if member["state"] == "draining":
        return f"finishes {requests} and takes no new ones" if running else "takes no new requests"
    if not running and not waiting:
        return "idle"
    queue = f", {waiting} wait{'s' * (waiting == 1)} in its queue" if waiting else ""
    return f"answers {requests}{queue}"


def _starting(start: Mapping[str, Any], now: float, usual_s: float | None) -> Replica:
    for_s = max(0.0, now - start["since"])
    phase = "loads the model" if start["host"] else "waits for a place and a process"
    usually = "" if usual_s is None else f"; most starts take {usual_s:.0f} s or less"
    share = None if usual_s is None else min(1.0, for_s / usual_s)
    return Replica(start["replica_id"], "starting", f"for {span(for_s)}: {phase}{usually}", started=share)


def _usual_start_s(report: Report, model: str) -> float | None:
    """Return how long nine of ten starts take at most, as the ingresses measured them; None before the first start."""
    loads = (member["load"].get("models", {}).get(model, {}) for member in report["members"])
    return max((load["cold_start_s"] for load in loads if load.get("cold_start_s")), default=None)
