"""How many replicas a model should have. Pure; ``serve_app/policy.py`` is its only caller."""

import math
from collections import deque

SCALE_DOWN_AFTER_S = 30.0


def desired_replicas(outstanding_tokens: float, *, target_outstanding_tokens: float, minimum: int, maximum: int) -> int:
    """Return the replicas that bring the outstanding tokens per replica to the target, minimum <= n <= maximum.

    Args:
        outstanding_tokens: Tokens that unfinished requests of the model may still cost, over all ingresses; >= 0.
        target_outstanding_tokens: What one replica should have in front of it; > 0.
    """
    wanted = math.ceil(outstanding_tokens / target_outstanding_tokens)
    return max(minimum, min(maximum, wanted))


class RecentMaximum:
    """The largest count wanted in the last `SCALE_DOWN_AFTER_S` seconds: up at once, down only when demand stays low.

    It starts with the count that there is, so that a restarted controller takes nothing down in its first moments.
    """

    def __init__(self, now: float, count: int) -> None:
        self._wanted: deque[tuple[float, int]] = deque([(now, count)])

    def add(self, now: float, count: int) -> int:
        """Return the maximum, ``count`` included. ``now`` in seconds, never less than before."""
        while self._wanted and (self._wanted[-1][1] <= count):
            self._wanted.pop()
        self._wanted.append((now, count))
        while self._wanted[0][0] < now - SCALE_DOWN_AFTER_S:
            self._wanted.popleft()
        return self._wanted[0][1]
