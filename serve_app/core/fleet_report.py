"""This module describes a fleet as plain data, for status, metrics and the autoscaler. Pure."""

from typing import Any

from serve_app.core.fleet import FleetState


def num_lines(fleet: FleetState) -> tuple[int, int]:
    """Return how many lines of batches replicas have, and how many of these wait in the queues of engines."""
    num_held = num_queued = 0
    for replica in fleet.replicas.values():
        lines = [request for request in replica.held.values() if request.background]
        num_held += len(lines)
        # Until the next heartbeat `waiting` is without the chats that moved to another replica, and `queued_chats` is not.
        num_queued += min(max(0, replica.load.waiting - replica.queued_chats), sum(not line.emitted_ids for line in lines))
    return num_held, num_queued


def num_on_draining(fleet: FleetState) -> int:
    """Return how many requests run on replicas that drain."""
    return sum(len(replica.held) for replica in fleet.replicas.values() if replica.draining)


def outstanding_tokens(fleet: FleetState) -> int:
    """Return the tokens that unfinished requests, waiting ones included, may still cost."""
    waiting = sum(request.tokens_left() for request in fleet.waiting.values())
    return waiting + sum(replica.outstanding_tokens for replica in fleet.replicas.values())


def describe(fleet: FleetState) -> dict[str, Any]:
    """Return counts and per-replica load, for status and metrics."""
    return {
        "requests": len(fleet.requests),
        "waiting": len(fleet.waiting),
        "outstanding_tokens": outstanding_tokens(fleet),
        "outcomes": dict(fleet.outcomes),
        "resumptions": fleet.failover.resumptions,
        "moved": fleet.drains.num_moved,
        "routed": dict(fleet.routed),
        "expected_hit_tokens": fleet.expected_hit_tokens,
        "blocked": len(fleet.quarantine),
        "cold_start_s": fleet.refusals.cold_starts.p90_s(),
        "replicas": {r.replica_id: r.describe() for r in fleet.replicas.values()},
    }
