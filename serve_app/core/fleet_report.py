"""This module describes a fleet as plain data, for status, metrics and the autoscaler. Pure."""

from typing import Any, NamedTuple

from serve_app.core.fair_tags import FIRST_TAG
from serve_app.core.fleet import FleetState


class LongestWait(NamedTuple):
    """How long a tenant waits for one model at one ingress, in seconds.

    ``waited_s`` is the age of the tenant's oldest request without a first token. ``limit_s`` is the longest time that one of the tenant's
    requests without a first token was expected to wait when it arrived: its tenant's ``first_token_s`` or its model's ``refuse_after_s``,
    whichever is longer. It is None if no such request has a limit.
    """

    waited_s: float
    limit_s: float | None


def longest_waits(fleet: FleetState, now: float) -> dict[str, LongestWait]:
    """Return the wait of each named tenant that has requests without a first token. Only interactive ones count: the others may wait."""
    oldest: dict[str, float] = {}
    limits: dict[str, float] = {}
    for request in fleet.requests.values():  # in the order of arrival, so the first one of a tenant is its oldest
        if request.emitted_ids or request.priority >= FIRST_TAG["batch"] or not (tenant := request.tenant):
            continue
        arrived_at = request.arrived_at
        oldest.setdefault(tenant, arrived_at)
        for limit in (request.start_by, request.expected_by):
            if limit is not None:
                limits[tenant] = max(limit - arrived_at, limits.get(tenant, 0.0))
    return {tenant: LongestWait(now - at, limits.get(tenant)) for tenant, at in oldest.items()}


def low_priority_waiting(fleet: FleetState) -> tuple[int, int]:
    """Return how many requests of the priorities `batch` and `background` have no first token: without a replica, and at replicas."""
    first = FIRST_TAG["batch"]
    waiting = [request for request in fleet.requests.values() if not request.emitted_ids and request.priority >= first]
    at_ingress = sum(request.replica_id is None for request in waiting)
    return at_ingress, len(waiting) - at_ingress


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
    """Return counts and per-replica load, for status and metrics; with pools, also the replicas that compute long prompts."""
    prefill = fleet.prefill_ids()
    return {
        "requests": len(fleet.requests),
        "waiting": len(fleet.waiting),
        "outstanding_tokens": outstanding_tokens(fleet),
        "outcomes": dict(fleet.outcomes),
        "resumptions": fleet.failover.resumptions,
        "moved": fleet.drains.num_moved,
        "hand_overs": dict(fleet.hand_overs.results),
        "hand_overs_asked": dict(fleet.hand_overs.asked),
        "kv_read_tokens": fleet.hand_overs.tokens,
        "kv_read_bytes": fleet.hand_overs.num_bytes,
        "routed": dict(fleet.routed),
        "expected_hit_tokens": fleet.expected_hit_tokens,
        "blocked": len(fleet.quarantine),
        "cold_start_s": fleet.refusals.cold_starts.p90_s(),
        "replicas": {r.replica_id: r.describe() for r in fleet.replicas.values()},
        **({} if prefill is None else {"prefill": prefill}),
    }
