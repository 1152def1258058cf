"""`Drains` plans which requests leave a draining replica before its budget is over, and when.

Pure. Only ``FleetState`` calls this module. In the first part of the budget, streams may end by themselves. In the last part, the
*window*, the remaining ones move to other replicas, one after the other. At the end of the budget the replica says goodbye, and all that
it still holds is queued at once. That is correct too, but all of these requests then need a prefill at the same moment.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.core.least_loaded import rank_of
from serve_app.core.quarantine import Quarantine
from serve_app.core.request import RequestState, Resume, Trial
from serve_app.core.routing import Choice, Reason, ReplicaState, RoutingPolicy

WINDOW_SHARE = 0.5
"""The window, as a share of the budget that is left when the ingress learns of the drain."""
MAX_WINDOW_S = 60.0
"""The longest window. With 10 moves a second, whose prefills a few replicas can take, 450 streams leave in its first three quarters."""
LATE_SHARE = 0.25
"""The last part of the window, as a share of it. No move is planned there, so that requests which found no room earlier may move as soon
as some replica has room."""
MAX_UNANSWERED = 4
"""A replica gets no further moved request while this many of those it took over still wait for their next token there."""
MAX_UNANSWERED_LATE = 32
"""The same limit in the last part of the window: at the goodbye, the replica would get all that are left at once."""


@dataclass(slots=True)
class Drain:
    """The drain of one replica. ``paced_at``: the time for which the latest move was planned; before the first, the window's begin."""

    paced_at: float
    late_at: float
    """When the last part of the window begins."""

    @classmethod
    def noticed(cls, left_s: float, *, now: float) -> "Drain":
        """Return the drain of a replica that will say goodbye in ``left_s``, >= 0."""
        window_s = min(MAX_WINDOW_S, left_s * WINDOW_SHARE)
        return cls(paced_at=now + left_s - window_s, late_at=now + left_s - window_s * LATE_SHARE)

    def next_at(self, num_left: int) -> float:
        """Return when the next of ``num_left`` >= 1 requests should move: their moves divide the time until ``late_at`` equally."""
        return self.paced_at + max(0.0, self.late_at - self.paced_at) / num_left


@dataclass(frozen=True, slots=True)
class Move:
    """A request that is to leave ``replica_id`` now for ``target``."""

    request: RequestState
    replica_id: str
    target: Choice
    planned_at: float


class Drains:
    """The drains of which replicas gave this ingress notice."""

    def __init__(self) -> None:
        self.num_moved = 0
        self._drains: dict[str, Drain] = {}

    def notice(self, replica_id: str, left_s: float | None, *, now: float) -> None:
        """Plan from the replica's first drain notice. Later notices carry the same deadline and differ only by network delay.

        ``left_s`` is None while the replica does not drain.
        """
        if left_s is None:
            self.forget(replica_id)
        elif replica_id not in self._drains:
            self._drains[replica_id] = Drain.noticed(left_s, now=now)

    def forget(self, replica_id: str) -> None:
        self._drains.pop(replica_id, None)

    def due(
        self, replicas: Mapping[str, ReplicaState], routing: RoutingPolicy, quarantine: Quarantine, *, now: float
    ) -> Move | None:
        """Return the next move; None while none is due, or no replica takes one of the requests."""
        for replica_id, drain in self._drains.items():
            held = replicas[replica_id].held.values()  # one that was quarantined while it ran must not reach another replica
            left = movable(r for r in held if quarantine.refusal(r.fingerprint, now=now) is None)
            if left and now >= (planned_at := drain.next_at(len(left))):
                limit = MAX_UNANSWERED if now < drain.late_at else MAX_UNANSWERED_LATE
                for request in _most_urgent(left, replicas):
                    if (target := _target(request, replicas, routing, limit)) is not None:
                        return Move(request, replica_id, target, planned_at)
        return None

    def moved(self, move: Move) -> None:
        self.num_moved += 1
        self._drains[move.replica_id].paced_at = move.planned_at

    def validate(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Assert that every drain belongs to a replica that drains."""
        assert all(replicas[replica_id].draining for replica_id in self._drains)


def movable(requests: Iterable[RequestState]) -> list[RequestState]:
    """Return the requests that another replica can continue, without those that are being handed over.

    The others stay until the goodbye: their answers may end before it. Suspects at their trial stay, too: an abort might hide that the
    suspect has just ended its engine.
    """
    return [
        r for r in requests if not r.is_leaving and r.trial is Trial.NONE and (r.resume is not Resume.NEVER or not r.emitted_ids)
    ]


def _target(
    request: RequestState, replicas: Mapping[str, ReplicaState], routing: RoutingPolicy, max_unanswered: int
) -> Choice | None:
    """Return where the request moves: to routing's choice, or, if that takes no moved request now, to the least loaded that does."""
    choice = routing.pick(request, replicas)
    if choice is None or takes_moved(choice.replica, max_unanswered):
        return choice
    others = (r for r in replicas.values() if r.takes(request) and takes_moved(r, max_unanswered))
    least = min(others, key=lambda replica: rank_of(replica, request), default=None)
    return None if least is None else Choice(least, Reason.SPREAD)


def takes_moved(replica: ReplicaState, max_unanswered: int) -> bool:
    """Return whether the replica would compute a moved request at once.

    A request that moved to a full engine would be silent; where it is, its stream continues.
    """
    if not replica.has_room() or replica.load.waiting:
        return False
    return sum(r.lost_at is not None for r in replica.held.values()) + len(replica.coming) < max_unanswered


def _most_urgent(requests: Iterable[RequestState], replicas: Mapping[str, ReplicaState]) -> list[RequestState]:
    """Return the most urgent of the requests that the same replicas can run, the most urgent first."""
    kinds = {replica.kind: replica for replica in replicas.values()}.values()
    found: dict[tuple[bool, ...], RequestState] = {}
    for request in requests:
        need = tuple(replica.can_run(request) for replica in kinds)
        if need not in found or _urgency(request) > _urgency(found[need]):
            found[need] = request
    return sorted(found.values(), key=_urgency, reverse=True)


def _urgency(request: RequestState) -> tuple[bool, bool, int]:
    """Order requests: first those without a token, whose move no client notices; last those that are replayed or may soon be over."""
    return not request.emitted_ids, request.resume is not Resume.REPLAY, request.max_tokens
