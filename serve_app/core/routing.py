"""Which replica gets the next attempt. Pure; only ``FleetState`` calls it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

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

    def queued(self) -> list[RequestState]:
        """Return the requests that seem to wait in the engine's queue only: the last ones, as many as are this ingress's part of it."""
        unstarted = [r for r in self.held.values() if not r.emitted_ids]
        part = round(self.waiting * len(self.held) / max(1, self.running + self.waiting))
        return unstarted[max(0, len(unstarted) - part) :]

    def describe(self) -> dict[str, Any]:
        """Return the load as plain data."""
        load = {"held": len(self.held), "outstanding_tokens": self.outstanding_tokens, "running": self.running}
        return load | {"waiting": self.waiting, "kv_usage": self.kv_usage, "draining": self.draining}


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
