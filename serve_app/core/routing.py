"""A routing policy chooses the replica of an attempt. This module has the interface, its input `ReplicaState`, and the choice by load.

Pure; only ``FleetState`` calls it. `affinity.py` has the choice by what replicas have cached.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from serve_app.core.events import HeartbeatArrived
from serve_app.core.load import NO_LOAD, EngineLoad
from serve_app.core.request import RequestState, Trial


@dataclass(slots=True)
class ReplicaState:
    """What this ingress knows of one replica with an open link.

    ``outstanding_tokens``: prompt tokens not yet prefilled plus output tokens still allowed, over this ingress's attempts.
    ``queued_chats``: how many requests that are no batch's were in the engine's queue at the last heartbeat.
    ``kv_tokens``: tokens that its KV cache has room for, 0 where it did not say.
    """

    replica_id: str
    credit: int
    heard_at: float
    held: dict[str, RequestState] = field(default_factory=dict)
    outstanding_tokens: int = 0
    load: EngineLoad = NO_LOAD
    queued_chats: int = 0
    draining: bool = False
    weights: str = ""
    kv_tokens: int = 0
    adapters: frozenset[int] = frozenset()

    def has_room(self) -> bool:
        return not self.draining and len(self.held) < self.credit

    def has_adapter_of(self, request: RequestState) -> bool:
        """Return whether the engine has what the request is for: during a roll-out of an adapter, old replicas have not."""
        return request.adapter is None or request.adapter in self.adapters

    def takes(self, request: RequestState) -> bool:
        """Return whether an attempt of the request may start here: with other weights another answer would go on."""
        return self.has_room() and request.weights in (None, self.weights) and self.has_adapter_of(request)

    def take_heartbeat(self, event: HeartbeatArrived, *, now: float) -> None:
        """Note what the replica told of its load."""
        self.heard_at, self.load, self.draining = now, event.load, event.draining
        # Now, and not when it is asked for: by then lines that were in the queue may have begun.
        self.queued_chats = max(0, event.load.waiting - sum(r.background and not r.emitted_ids for r in self.held.values()))

    def queued(self) -> list[RequestState]:
        """Return the requests that seem to wait in the engine's queue only: the last ones, as many as are this ingress's part of it.

        Suspects on trial are none of them: the engine may be computing one, and an abort would hide that it was there at a crash.
        """
        running, waiting = self.load.running, self.load.waiting
        if not waiting:
            return []
        unstarted = [r for r in self.held.values() if not r.emitted_ids and r.trial is Trial.NONE]
        part = round(waiting * len(self.held) / (running + waiting))
        return unstarted[max(0, len(unstarted) - part) :]

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.outstanding_tokens == sum(r.outstanding_tokens for r in self.held.values()) >= 0
        assert all(r.replica_id == self.replica_id for r in self.held.values())
        assert len(self.held) <= self.credit

    def describe(self) -> dict[str, Any]:
        """Return the load as plain data."""
        held = {"held": len(self.held), "outstanding_tokens": self.outstanding_tokens}
        load = {"running": self.load.running, "waiting": self.load.waiting, "kv_usage": self.load.kv_usage}
        return held | load | {"draining": self.draining}


class Reason(StrEnum):
    """Why a request went where it did."""

    PREFIX = "prefix"
    """At least half of its prompt is cached there."""
    SESSION = "session"
    """Its session's requests go there."""
    HASH = "hash"
    """What is new in its prompt belongs there, by a rule that all ingresses share."""
    SPREAD = "spread"
    """Where one of these would have sent it was too much to do, or no room; so it went by load."""
    LOAD = "load"
    """The least was to do there."""
    TRIAL = "trial"
    """One like this suspect is tried there."""


class Choice(NamedTuple):
    """A replica for an attempt, and why."""

    replica: ReplicaState
    reason: Reason


class RoutingPolicy(Protocol):
    """Chooses among replicas that take a request."""

    def changed(self, replica_id: str) -> None:
        """Note that a replica is new or gone, or that anything of it that `pick` looks at may be another."""
        ...

    def forget(self, replica_id: str) -> None:
        """Note that a replica is gone, and all that it had cached."""
        ...

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        """Return the replica for the next attempt of ``request``, None when none of ``replicas`` takes it."""
        ...

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        """Note that an attempt of ``request`` starts at ``replica``; return the prompt tokens that are probably cached there."""
        ...

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        """Return those of a replica's queued requests that had better leave it for a new one, in the same order."""
        ...

    def validate(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Assert the invariants."""
        ...


Rank = tuple[int, int, int, str]


def rank_of(replica: ReplicaState) -> Rank:
    """Return what replicas are compared by; no two are equal."""
    return replica.outstanding_tokens, len(replica.held), replica.load.running + replica.load.waiting, replica.replica_id


class LeastOutstandingTokens:
    """The replica with the fewest tokens still to compute for this ingress; then the one with fewer requests in its engine.

    Cost of a pick, amortized: O(log n) for each replica that changed since the last, and a look at each version of the weights, of
    which a roll-out has two. A look at each of 1,000 replicas for every request would cost 0.15 ms, six times as much.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, list[Rank]] = {}
        """Heaps by weights. The rank of every replica with room is in its heap, but for those of ``_changed``; what is no replica's
        rank any more is dropped when it comes to the top."""
        self._changed: set[str] = set()

    def changed(self, replica_id: str) -> None:
        self._changed.add(replica_id)

    def forget(self, replica_id: str) -> None:
        self._changed.add(replica_id)

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        self._changed.add(replica.replica_id)
        return 0

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        return queued

    def validate(self, replicas: Mapping[str, ReplicaState]) -> None:
        for replica in replicas.values():
            if replica.has_room() and replica.replica_id not in self._changed:
                assert rank_of(replica) in self._ranks[replica.weights]

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        least = self.least(request, replicas)
        return None if least is None else Choice(least, Reason.LOAD)

    def least(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> ReplicaState | None:
        """Return the replica that takes the request and has the least to do. Replicas with equal weights ids have equal adapters."""
        self._take_changes(replicas)
        versions = list(self._ranks) if request.weights is None else [request.weights]
        least = [
            replica for weights in versions if (replica := self._least(weights, replicas)) and replica.has_adapter_of(request)
        ]
        return min(least, key=rank_of, default=None)

    def _least(self, weights: str, replicas: Mapping[str, ReplicaState]) -> ReplicaState | None:
        ranks = self._ranks.get(weights, [])
        while ranks:
            rank = ranks[0]
            replica = replicas.get(rank[-1])
            if replica is not None and replica.weights == weights and replica.has_room() and rank_of(replica) == rank:
                return replica
            heapq.heappop(ranks)
        self._ranks.pop(weights, None)
        return None

    def _take_changes(self, replicas: Mapping[str, ReplicaState]) -> None:
        changed: Iterable[str] = self._changed
        if sum(map(len, self._ranks.values())) + len(self._changed) > 2 * len(
            replicas
        ):  # more old ranks than true ones: all anew
            self._ranks.clear()
            changed = replicas
        for replica_id in changed:
            if (replica := replicas.get(replica_id)) is not None and replica.has_room():
                heapq.heappush(self._ranks.setdefault(replica.weights, []), rank_of(replica))
        self._changed.clear()
