"""GPU time is what one HTTP request cost the GPUs, in GPU-seconds, by the step costs that the model's replicas measured. Pure.

A step of an engine takes ``step_s``, and more for each of its tokens (`serve_app/core/step_costs.py`). So a request costs

    GPUs of a replica x (computed prompt tokens x prompt_token_s + output tokens x output_token_s
                         + tokens before each of these beyond 241 x context_token_s + its part of the steps x step_s)

Its part of a step is 0.1 if ten requests got a token in it. So the sum over all requests is the time that the engines spent in steps, as
far as the measured costs hold: the later tokens of a prompt of thousands cost more than the measured 512. Not in the sum are steps in the
middle of a long prompt beside which no request decodes, and what a failover computes again.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.core.step_costs import MeasuredCosts, combined
from serve_app.ingress.exchange.engine_requests import Totals


class GpuTime:
    """The GPU time of the requests for one model.

    Args:
        gpus: GPUs of a replica. A replica without one, simulated or on a CPU, counts as one.
    """

    def __init__(self, gpus: int) -> None:
        self._gpus = max(1, gpus)
        self.costs: MeasuredCosts | None = None

    def learn(self, measured: Iterable[Mapping[str, Any] | None]) -> None:
        """Take in the fields of `MeasuredCosts` from the leases of the model's replicas; without any, the last ones stay valid."""
        found = [costs for values in measured if (costs := _costs_of(values)) is not None]
        self.costs = combined(found) or self.costs

    def seconds(self, totals: Totals) -> float | None:
        """Return the GPU-seconds of a request that has ended; None if no replica has measured its costs."""
        if not totals.num_answered:
            return 0.0
        if (costs := self.costs) is None:
            return None
        return self._gpus * costs.seconds(
            computed_tokens=totals.computed_tokens,
            output_tokens=totals.output_tokens,
            context_tokens=totals.context_tokens,
            step_part=totals.step_part,
        )


def _costs_of(values: Mapping[str, Any] | None) -> MeasuredCosts | None:
    """Return the costs in a lease; None if the replica measured none, or its release reports other fields."""
    try:
        return None if values is None else MeasuredCosts(**values)
    except TypeError:
        return None
