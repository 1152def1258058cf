"""`WaitMargin` learns by how much one tenant's requests wait longer than expected, so that few admitted ones begin too late. Pure.

The longest expected wait is still too short for some requests. The margin follows a high quantile of true wait / expected wait
by steps, up for each request above the margin and down for each one below. It only counts for admission: Retry-After has none of it.
"""

from serve_app.core.request import RequestState

LEAST_MARGIN = 1 / 0.8
"""With 1 / 0.9, 5 % of the admitted requests of a flood beside light tenants came too late, with this 1 %."""
_MOST = 3.0
"""A tenant whose waits are underestimated is still admitted up to a third of its limit."""
_ABOVE = 0.02
"""Share of the requests that wait longer than the margin allows, where the margin comes to rest. As it moves, some more do."""
_STEP = 0.05
_LEAST_PART = 0.125
"""Requests expected to wait for a smaller part of their limit teach nothing: their ratios scatter most, and they begin in time anyway."""


class WaitMargin:
    """The margin of one tenant: a request is admitted if its expected wait times ``factor`` is within its limit."""

    def __init__(self) -> None:
        self.factor = LEAST_MARGIN

    def learn(self, request: RequestState, now: float, *, has_begun: bool) -> None:
        """Learn from a request that no longer waits. One that ended without having begun counts only if it had waited for too long."""
        limit = request.expected_by if request.start_by is None else request.start_by
        if limit is None or request.expected_wait_s is None:
            return
        if request.expected_wait_s < _LEAST_PART * (limit - request.arrived_at):
            return
        is_above = now - request.arrived_at > self.factor * request.expected_wait_s
        if is_above or has_begun:
            self.factor = min(max(self.factor + _STEP * (is_above - _ABOVE), LEAST_MARGIN), _MOST)
