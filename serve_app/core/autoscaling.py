"""How many replicas a model should have. Pure; ``serve_app/policy.py`` is its only caller."""

import math


def desired_replicas(outstanding_tokens: float, *, target_outstanding_tokens: float, minimum: int, maximum: int) -> int:
    """Return the replicas that bring the outstanding tokens per replica to the target, minimum <= n <= maximum.

    Args:
        outstanding_tokens: Tokens that unfinished requests of the model may still cost, over all ingresses; >= 0.
        target_outstanding_tokens: What one replica should have in front of it; > 0.
    """
    wanted = math.ceil(outstanding_tokens / target_outstanding_tokens)
    return max(minimum, min(maximum, wanted))
