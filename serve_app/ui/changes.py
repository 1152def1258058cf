"""`changes` describes what happened in a fleet between two of its reports, in sentences for people who watch. Pure.

Several ingresses may answer in turn. Each has its own links, so only some of them have lost a replica, at times that differ a little.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from serve_app.ui.replicas import Report

CLOCK_S = 10.0
"""An ingress reuses a report for half a second. So a report that is this much older than the last one comes from another clock: a clock
that was set back, or that of another machine. Two ingresses that lose a replica report times that differ by less."""
MAX_KNOWN = 200
"""How many happenings a caller of `changes` keeps, the latest ones."""


class Happening(NamedTuple):
    """Something that happened in the fleet. ``time`` is in seconds since the epoch."""

    time: float
    text: str
    member_id: str = ""
    """The replica or ingress that changed its state or was lost."""
    is_loss: bool = False

    def clock(self) -> str:
        """Return hours, minutes and seconds in UTC."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S")


def is_older(report: Report, before: Report) -> bool:
    """Return whether another ingress answered with an older report. A comparison with it would show members leave and join again."""
    return before["time"] - CLOCK_S < report["time"] <= before["time"]


def changes(before: Report | None, after: Report, known: Sequence[Happening] = ()) -> list[Happening]:
    """Return what happened, the oldest first, and is not among ``known``.

    Without ``before`` the result has only the decisions and losses that the service remembers.
    """
    found = [*_remembered(after)]
    if before is not None:
        known = [*_remembered(before), *known]
        at = float(after["time"])
        found += [Happening(at, text, member_id) for member_id, text in _of_members(before, after)]
        found += [Happening(at, text) for text in (*_of_starts(before, after), *_of_counts(before, after))]
    new = [happening for happening in found if not _is_known(happening, known)]
    return sorted(new, key=lambda happening: happening.time)


def _remembered(report: Report) -> Iterator[Happening]:
    """Yield the decisions and losses of a report."""
    yield from (Happening(decision["time"], _decision(decision)) for decision in report["decisions"])
    yield from (Happening(lost["time"], _loss(lost), i, is_loss=True) for i, lost in _lost(report).items())


def _is_known(happening: Happening, known: Sequence[Happening]) -> bool:
    if not happening.member_id:
        return happening in known
    of_member = [each for each in known if each.member_id == happening.member_id]
    if happening.is_loss:
        return any(each.is_loss and abs(each.time - happening.time) < CLOCK_S for each in of_member)
    # When one ingress has lost a replica and another has not, the replica is "ready" again in every second report.
    return bool(of_member) and of_member[-1].text == happening.text


def _decision(decision: Mapping[str, Any]) -> str:
    return f"Autoscaler: {decision['model']} {decision['before']} → {decision['after']} replicas ({decision['rule']})"


def _lost(report: Report) -> dict[str, Mapping[str, Any]]:
    return {each["replica_id"]: each for each in report.get("lost", ())}


def _loss(lost: Mapping[str, Any]) -> str:
    return f"Replica of {lost['model']} {short(lost['replica_id'])} is lost: {lost['cause']}"


def _of_members(before: Report, after: Report) -> Iterator[tuple[str, str]]:
    """Yield id and sentence of each member that joined, left or changed its state. Losses are left out: `_loss` names their causes."""
    old, new = ({m["replica_id"]: m for m in report["members"]} for report in (before, after))
    lost = _lost(before).keys() | _lost(after).keys()
    for member_id, member in new.items():
        if member["state"] == "lost":
            continue
        if member_id not in old:
            load = member["load"]
            took = f" after a start of {load['start_s']:.0f} s" if "start_s" in load else ""
            yield member_id, f"{_name(member)} joined{took}"
        elif old[member_id]["state"] != member["state"]:
            yield member_id, f"{_name(member)} is {member['state']}"
    for member_id, member in old.items():
        if member_id not in new and member_id not in lost:
            yield member_id, f"{_name(member)} {'has drained and left' if member['state'] == 'draining' else 'is gone'}"


def _of_starts(before: Report, after: Report) -> Iterator[str]:
    """Yield the replicas that Serve has begun to start. If Serve did not answer for one of the reports, nothing is known."""
    for model, now in after.get("models", {}).items():
        if (earlier := before.get("models", {}).get(model)) is None:
            continue
        known = {start["replica_id"] for start in earlier["starting"]} | {m["replica_id"] for m in after["members"]}
        yield from (f"Replica of {model} {short(i)} starts" for s in now["starting"] if (i := s["replica_id"]) not in known)


def _name(member: Mapping[str, Any]) -> str:
    what = "Ingress" if member["role"] == "ingress" else f"Replica of {member['model']}"
    return f"{what} {short(member['replica_id'])}"


def short(member_id: str) -> str:
    """Return the part of an id that differs between members of one deployment."""
    return member_id.rsplit("#", 1)[-1]


_COUNTS = {
    "resumptions": ("answer resumed at another replica", "answers resumed at another replica"),
    "moved": ("answer moved away from a draining replica", "answers moved away from draining replicas"),
}


def _of_counts(before: Report, after: Report) -> Iterator[str]:
    """Yield the differences of counts of the ingresses that are in both reports."""
    old = {m["replica_id"]: m for m in before["members"] if m["role"] == "ingress"}
    for ingress in after["members"]:
        for model, load in ingress["load"].get("models", {}).items() if ingress["replica_id"] in old else ():
            earlier = old[ingress["replica_id"]]["load"].get("models", {}).get(model, {})
            for name, (one, many) in _COUNTS.items():
                if (more := load[name] - earlier.get(name, 0)) > 0:
                    yield f"{model}: {more} {one if more == 1 else many}"
            state = load.get("canary", {}).get("state")
            if state != earlier.get("canary", {}).get("state"):
                yield f"Canary {model} is {state}"
