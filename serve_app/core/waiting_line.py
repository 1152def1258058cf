"""`WaitingLine` holds the requests of one model that wait at one ingress, in the order in which they start. Pure.

Answers that have begun come first, in the order of arrival: their clients wait for the next token. The others follow by priority
(`fair_order.py`), and for equal priorities by arrival. A thousand clients may go away at once, each from anywhere in the line.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping

from serve_app.core.quarantine import Quarantine
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Reason, ReplicaState, RoutingPolicy

_Key = tuple[bool, int, int]


class WaitingLine(Mapping[str, RequestState]):
    """The requests by id. Iteration is in the order of service."""

    def __init__(self) -> None:
        self._line: list[tuple[_Key, str]] = []
        self._requests: dict[str, RequestState] = {}

    def __getitem__(self, request_id: str) -> RequestState:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, request_id in self._line)

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: RequestState) -> None:
        """Put the request in its place."""
        insort(self._line, (_key(request), request.request_id))
        self._requests[request.request_id] = request

    def remove(self, request: RequestState) -> None:
        """Take the request out. Its fields that decide its place have not changed since `add`."""
        del self._line[bisect_left(self._line, (_key(request), request.request_id))]
        del self._requests[request.request_id]

    def first(self) -> RequestState | None:
        """Return the first request; None if none waits."""
        return self._requests[self._line[0][1]] if self._line else None

    def __reversed__(self) -> Iterator[RequestState]:
        """Return the requests, the last one first."""
        return (self._requests[request_id] for _, request_id in reversed(self._line))

    def next_start(
        self,
        kinds: Collection[ReplicaState],
        replicas: Mapping[str, ReplicaState],
        routing: RoutingPolicy,
        quarantine: Quarantine,
    ) -> tuple[RequestState, Choice] | None:
        """Return the first request that a replica takes, and the replica; None if none does. ``kinds``: a replica of each kind."""
        without_room: set[tuple[bool, ...]] = set()
        for request in self.values():
            if (only := quarantine.must_go_to(request)) is not None:
                if replicas[only].takes(request):
                    return request, Choice(replicas[only], Reason.TRIAL)
                continue
            needs = tuple([kind.can_run(request) for kind in kinds])
            if needs in without_room:
                continue
            choice = routing.pick(request, replicas)
            if choice is not None and choice.replica.takes(request):
                return request, choice
            if all(needs):
                return None
            without_room.add(needs)  # later requests may start where this one does not fit
        return None


def _key(request: RequestState) -> _Key:
    return (False, 0, request.number) if request.emitted_ids else (True, request.priority, request.number)
