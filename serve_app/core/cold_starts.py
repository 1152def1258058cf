"""`ColdStarts` keeps how long replicas took to start, for the autoscaler's estimates and for Retry-After. Pure."""

import math
from collections.abc import Iterable

_MAX_KEPT = 32
_MAX_RETRY_AFTER_S = 600.0  # a client that would have to wait longer does not come back


def p90(values: Iterable[float]) -> float | None:
    """Return the 90th percentile, by nearest rank; None without values."""
    ordered = sorted(values)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else None


class ColdStarts:
    """The latest starts, one per replica. Seconds from being scheduled to ready."""

    def __init__(self) -> None:
        self._start_s: dict[str, float] = {}

    def add(self, replica_id: str, start_s: float) -> None:
        """Add a start and forget the oldest one. A second start of the same replica is ignored."""
        self._start_s.setdefault(replica_id, start_s)
        if len(self._start_s) > _MAX_KEPT:
            del self._start_s[next(iter(self._start_s))]

    def p90_s(self) -> float | None:
        """Return the 90th percentile of the starts, by nearest rank; None before the first."""
        return p90(self._start_s.values())

    def retry_after_s(self) -> float | None:
        """Return in how many seconds a replica that starts now should serve, 1 <= s <= 600; None before the first measured start."""
        p90_s = self.p90_s()
        return None if p90_s is None else min(max(p90_s, 1.0), _MAX_RETRY_AFTER_S)
