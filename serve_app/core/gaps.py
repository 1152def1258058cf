"""`Gaps` counts how long requests stood still after a loss, as a histogram that `Failover` fills. Pure."""

from bisect import bisect_left

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Upper ends of the buckets, inclusive; one without an end follows."""


class Gaps:
    """Counts and sums of gaps, by the way in which the requests continued (`Resume`)."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        """Way -> number of gaps per bucket."""
        self.sums_s: dict[str, float] = {}

    def add(self, way: str, gap_s: float) -> None:
        counts = self.counts.setdefault(way, [0] * (len(BOUNDS_S) + 1))
        counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.sums_s[way] = self.sums_s.get(way, 0.0) + gap_s
