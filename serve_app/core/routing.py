"""Which replica gets the next attempt. Pure; only ``FleetState`` calls it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core.request import RequestState


@dataclass(slots=True)
class ReplicaState:
    """What this ingress knows of one replica with an open link.

    ``outstanding_tokens``: prompt tokens not yet prefilled plus output tokens still allowed, over this ingress's attempts.
    """

    replica_id: str
    credit: int
    heard_at: float
    held: dict[str, RequestState] = field(default_factory=dict)
    outstanding_tokens: int = 0
    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    draining: bool = False

    def has_room(self) -> bool:
        return not self.draining and len(self.held) < self.credit


class RoutingPolicy(Protocol):
    """Chooses among replicas that have room."""

    def pick(self, request: RequestState, replicas: Iterable[ReplicaState]) -> ReplicaState | None:
        """Return the replica for the next attempt of ``request``, None when ``replicas`` is empty."""
        ...


class LeastOutstandingTokens:
    """The replica with the fewest tokens still to compute for this ingress; then the one with fewer requests in its engine."""

    def pick(self, request: RequestState, replicas: Iterable[ReplicaState]) -> ReplicaState | None:
        return min(
            replicas,
            key=lambda r: (r.outstanding_tokens, len(r.held), r.running + r.waiting, r.replica_id),
            default=None,
        )
