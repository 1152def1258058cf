"""`LeastOutstandingTokens` places requests by load; `Loads` keeps the replicas in the order of what they have to do. Pure."""

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter

from serve_app.core.events import CacheReported
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Kind, Reason, ReplicaState

Rank = tuple[int, int, int, str]


def rank_of(replica: ReplicaState, request: RequestState) -> Rank:
    """Return the key by which replicas are compared for the request; no two are equal."""
    return _rank(replica, replica.tokens_before(request))


def _rank(replica: ReplicaState, tokens: int) -> Rank:
    return tokens, len(replica.held), replica.load.running + replica.load.waiting, replica.replica_id


class Loads:
    """The replicas in the order of what they have to do, kept up to date as they change.

    ``tokens``: replica -> its tokens by ``measure``, for replicas that do not drain; ``total`` is their sum. Both are as of the last
    `take_changes`.

    Cost of `least`, amortized: O(log n) for each replica that changed since the last, and a look at each kind of replica, of which a
    roll-out has two. A look at each of 1,000 replicas for every request would cost 0.15 ms, six times as much.
    """

    def __init__(self, measure: Callable[[ReplicaState], int], known: Iterable[str] = ()) -> None:
        self.tokens: dict[str, int] = {}
        self.total = 0
        self._measure = measure
        self._ranks: dict[Kind, list[Rank]] = {}
        """Heaps by kind. The rank of every replica with room is in its heap, except for replicas in ``_changed``. A rank that is no
        longer any replica's is dropped when it comes to the top."""
        self._changed = set(known)

    def changed(self, replica_id: str) -> None:
        self._changed.add(replica_id)

    def known(self) -> set[str]:
        """Return the ids of all replicas that `take_changes` has seen or will see."""
        return self._changed | self.tokens.keys()

    def least(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> ReplicaState | None:
        """Return the replica that takes the request and has the least to do."""
        self.take_changes(replicas)
        least = [replica for kind in list(self._ranks) if (replica := self._least(kind, replicas)) and replica.can_run(request)]
        return min(least, key=self._rank_of, default=None)

    def take_changes(self, replicas: Mapping[str, ReplicaState]) -> None:
        for replica_id in self._changed:
            self.total -= self.tokens.pop(replica_id, 0)
            if (replica := replicas.get(replica_id)) is not None and not replica.draining:
                tokens = self.tokens[replica_id] = self._measure(replica)
                self.total += tokens
                if replica.has_room():
                    heapq.heappush(self._ranks.setdefault(replica.kind, []), _rank(replica, tokens))
        self._changed.clear()
        if sum(map(len, self._ranks.values())) > 2 * len(replicas):  # more old ranks than current ones: make all anew
            self._ranks.clear()
            for replica in replicas.values():
                if replica.has_room():
                    self._ranks.setdefault(replica.kind, []).append(self._rank_of(replica))
            for ranks in self._ranks.values():
                heapq.heapify(ranks)

    def validate(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Assert the invariants."""
        for replica in replicas.values():
            if replica.has_room() and replica.replica_id not in self._changed:
                assert self._rank_of(replica) in self._ranks[replica.kind]
        self.take_changes(replicas)
        assert self.tokens == {i: self._measure(r) for i, r in replicas.items() if not r.draining}
        assert self.total == sum(self.tokens.values())

    def _rank_of(self, replica: ReplicaState) -> Rank:
        return _rank(replica, self._measure(replica))

    def _least(self, kind: Kind, replicas: Mapping[str, ReplicaState]) -> ReplicaState | None:
        ranks = self._ranks.get(kind, [])
        while ranks:
            rank = ranks[0]
            replica = replicas.get(rank[-1])
            if replica is not None and replica.kind == kind and replica.has_room() and self._rank_of(replica) == rank:
                return replica
            heapq.heappop(ranks)
        self._ranks.pop(kind, None)
        return None


class LeastOutstandingTokens:
    """Picks the replica with the fewest tokens still to compute for this ingress; among equals, the one with fewer requests in its engine.

    For a request that does not give way, tokens of those that do are not counted: an engine full of them starts it at once. Counted, the
    backlog of a tenant far ahead of its share would hide that one engine is full of others' answers, where nothing gives way. All requests
    that give way are placed by all tokens, whichever of them gives way to another.
    """

    def __init__(self) -> None:
        self.all_loads = Loads(attrgetter("tokens_to_do"))
        self._firm: Loads | None = None
        """None until the first request that gives way: up to then, both orders are equal."""

    def loads(self, request: RequestState) -> Loads:
        """Return the loads by which the request is placed."""
        return self.all_loads if self._firm is None or request.gives_way else self._firm

    def changed(self, replica_id: str) -> None:
        self.all_loads.changed(replica_id)
        if self._firm is not None:
            self._firm.changed(replica_id)

    def forget(self, replica_id: str) -> None:
        self.changed(replica_id)

    def cache_reported(self, event: CacheReported) -> None:
        """Do nothing: what is cached does not count."""

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        self.changed(replica.replica_id)
        if request.gives_way and self._firm is None:
            self._firm = Loads(attrgetter("firm_tokens"), self.all_loads.known())
        return 0

    def hit_tokens(self, request: RequestState, replica: ReplicaState) -> int:
        return 0

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        return queued

    def validate(self, replicas: Mapping[str, ReplicaState], placed: Container[str] | None = None) -> None:
        for loads in (self.all_loads, self._firm):
            if loads is not None:
                loads.validate(replicas)

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        least = self.least(request, replicas)
        return None if least is None else Choice(least, Reason.LOAD)

    def least(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> ReplicaState | None:
        """Return the replica that takes the request and has the least to do."""
        return self.loads(request).least(request, replicas)
