"""GPU time is what one HTTP request cost the GPUs, in GPU-seconds, by the step costs that the model's replicas measured.

A step of an engine takes ``step_s``, and more for each of its tokens (`serve_app/core/step_costs.py`). So a request costs

    GPUs of a replica x (computed prompt tokens x prompt_token_s + output tokens x (output_token_s + steps per token x step_s))

Steps per token divides the fixed cost of the steps among the requests that shared them: 0.1 where ten requests decode together. It is the
ratio of the engines' steps (by heartbeats) to the output tokens of this ingress over the last seconds. So the sum over all requests is the
time that the engines spent in steps, as far as the measured costs hold: contexts far longer than the measured 240 tokens cost more. What
a failover computes again is in the steps, and so is shared by all requests.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.core.fleet import FleetState
from serve_app.core.step_costs import MeasuredCosts, combined
from serve_app.ingress.exchange.engine_requests import Totals

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the fleet's counters: heartbeats bring steps once a second. A look costs some 0.2 us for each replica."""
KEEP = 0.8
"""Weight of the earlier looks in a new ratio. With one look a second, five seconds count for two thirds."""


class GpuTime:
    """The GPU time of the requests for one model at one ingress.

    Args:
        gpus: GPUs of a replica. A replica without one, simulated or on a CPU, counts as one.
    """

    def __init__(self, fleet: FleetState, gpus: int) -> None:
        self._fleet = fleet
        self._gpus = max(1, gpus)
        self._costs: MeasuredCosts | None = None
        self._looked_at = -math.inf
        self._steps_seen: dict[str, float] = {}
        self._tokens_seen = 0
        self._steps = self._tokens = 0.0

    def learn(self, measured: Iterable[Mapping[str, Any] | None]) -> None:
        """Take in the fields of `MeasuredCosts` from the leases of the model's replicas; without any, the last ones stay valid."""
        found = [costs for values in measured if (costs := _costs_of(values)) is not None]
        self._costs = combined(found) or self._costs

    def seconds(self, totals: Totals, now: float) -> float | None:
        """Return the GPU-seconds of a request that has ended at ``now``, in monotonic seconds; None if no replica measured its costs."""
        if not totals.num_answered:
            return 0.0
        if self._costs is None:
            return None
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look(now)
        tokens = totals.output_tokens or totals.num_answered  # an embedding has no output tokens and counts as one
        per_token_s = self._costs.output_token_s + self._steps_per_token() * self._costs.step_s
        return self._gpus * (totals.computed_tokens * self._costs.prompt_token_s + tokens * per_token_s)

    def _look(self, now: float) -> None:
        """Take in the steps and the output tokens since the last look."""
        self._looked_at = now
        steps = {replica.replica_id: replica.own_steps for replica in self._fleet.replicas.values()}
        new_steps = sum(max(0.0, each - self._steps_seen.get(replica_id, 0.0)) for replica_id, each in steps.items())
        tally = self._fleet.tally
        tokens = tally.output_tokens or tally.finished + tally.lines_finished
        if new_steps and tokens > self._tokens_seen:
            self._steps = KEEP * self._steps + new_steps
            self._tokens = KEEP * self._tokens + tokens - self._tokens_seen
            self._steps_seen, self._tokens_seen = steps, tokens

    def _steps_per_token(self) -> float:
        """Return the steps that a token takes; before a heartbeat has counted steps, by the requests that run now."""
        if self._tokens:
            return self._steps / self._tokens
        busy = [replica.load.running for replica in self._fleet.replicas.values() if replica.load.running]
        return len(busy) / sum(busy) if busy else 1.0


def _costs_of(values: Mapping[str, Any] | None) -> MeasuredCosts | None:
    """Return the costs in a lease; None if the replica measured none, or its release reports other fields."""
    try:
        return None if values is None else MeasuredCosts(**values)
    except TypeError:
        return None
