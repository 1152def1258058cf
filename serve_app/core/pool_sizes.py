"""`PoolSizes` are the bounds of a model's two pools, and say how many of its replicas compute prompts. Pure.

Ingresses and the autoscaler use the same bounds. A pool is no list of replicas: roles go to whichever replicas there are.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Least and most replicas that compute prompts (prefill) and that make answers (decode), all >= 1."""

    prefill_min: int
    prefill_max: int
    decode_min: int
    decode_max: int

    def num_prefill(self, num_replicas: int, share: float | None = None) -> int:
        """Return how many of the replicas compute prompts; at least one of each kind if there are two replicas, 0 of fewer.

        Args:
            share: The share that the autoscaler asks for; None if it asks for none, which means ``prefill_min`` replicas.
        """
        if num_replicas < 2:
            return 0
        if num_replicas < self.prefill_min + self.decode_min:  # replicas are missing: each pool misses its part
            wanted = round(num_replicas * self.prefill_min / (self.prefill_min + self.decode_min))
        else:
            wanted = self.prefill_min if share is None else round(num_replicas * share)
            wanted = min(max(wanted, self.prefill_min, num_replicas - self.decode_max), self.prefill_max)
            wanted = min(wanted, num_replicas - self.decode_min)
        return min(max(wanted, 1), num_replicas - 1)
