"""`LostReplicas` keeps which replicas of a model an ingress has lost, when, and why, for people who watch the fleet. Pure."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from serve_app.core.events import LinkEnd
from serve_app.errors import EngineDied, EngineOutOfMemory, EngineSilent, StepTooLong

KEPT_S = 60.0
"""How long a replica is shown after its loss. A replica that still has a lease is shown longer."""
MAX_KEPT = 50
"""The most lost replicas of one model; the oldest are dropped first."""

_ORDERLY = (LinkEnd.SAID_GOODBYE, LinkEnd.ENDED_HERE)


class LostReplica(NamedTuple):
    """A replica without a link. ``time`` is in seconds since the epoch."""

    replica_id: str
    model: str
    time: float
    cause: str


class LostReplicas:
    """The lost replicas of one model, in the order of their loss."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lost: dict[str, LostReplica] = {}

    def lose(self, replica_id: str, end: LinkEnd, cause: str, *, time: float) -> None:
        """Note that a link has ended. A replica that drained, or whose link this ingress ended, is not lost."""
        if end in _ORDERLY:
            return
        self._lost.pop(replica_id, None)
        self._lost[replica_id] = LostReplica(replica_id, self._model, time, cause)
        if len(self._lost) > MAX_KEPT:
            del self._lost[next(iter(self._lost))]

    def link(self, replica_id: str) -> None:
        """Note that there is a link to the replica, so that the replica is not lost, or no longer."""
        self._lost.pop(replica_id, None)

    def cause(self, replica_id: str) -> str | None:
        """Return why the replica was lost; None if it is not lost, or was lost too long ago."""
        lost = self._lost.get(replica_id)
        return None if lost is None else lost.cause

    def shown(self, *, leased: Collection[str], now: float) -> list[LostReplica]:
        """Return those that have a lease, or that were lost within `KEPT_S` before ``now``."""
        return [lost for lost in self._lost.values() if lost.replica_id in leased or now - lost.time < KEPT_S]


def cause_of(end: LinkEnd, goodbye: tuple[str, str] | None = None) -> str:
    """Return why a link ended, in serve-app's words: an engine's own last words may hold parts of a request.

    Args:
        goodbye: Code and reason of the replica's Goodbye; None without one.
    """
    code, reason = goodbye or ("", "")
    if end is LinkEnd.ENGINE_DIED:
        if code == EngineOutOfMemory.code:
            return "the kernel killed its engine: out of memory"
        if code in (EngineSilent.code, StepTooLong.code):
            return "its engine hung, and its supervisor killed the engine"
        if reason == str(EngineDied(EngineDied.NO_MESSAGE)):
            return "its engine was killed, or crashed without a message"
    if end is LinkEnd.BROKE_OFF:
        return f"{end.value}: its process was killed, or the network failed"
    return end.value


def with_lost(report: Mapping[str, Any], replicas: Iterable[LostReplicas], *, now: float) -> dict[str, Any]:
    """Return the lease board's report with the lost replicas under ``lost``, and with the state `lost` in their leases."""
    leased = {member["replica_id"] for member in report["members"]}
    lost = [each for of_model in replicas for each in of_model.shown(leased=leased, now=now)]
    ids = {each.replica_id for each in lost}
    members = [{**member, "state": "lost"} if member["replica_id"] in ids else member for member in report["members"]]
    return {**report, "members": members, "lost": [each._asdict() for each in lost]}
