"""A lazy histogram is a Prometheus histogram that sorts its observations into buckets only when it is read.

The end of a request makes some ten observations, and each token makes one. Prometheus' own histogram searches the bucket at each of them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.samples import Sample

MAX_WAITING = 8192
"""The most values that may wait to be sorted, which takes some 2 ms."""


class LazyHistogram(Histogram):
    """A histogram like Prometheus' own, but for one thread, and without exemplars."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._waiting: list[float] = []

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        self._waiting.append(amount)
        if len(self._waiting) > MAX_WAITING:
            self.sort()

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Observe each of the amounts."""
        self._waiting.extend(amounts)
        if len(self._waiting) > MAX_WAITING:
            self.sort()

    def sort(self) -> None:
        """Put the waiting values into the buckets."""
        counts, total = [0] * len(self._upper_bounds), 0.0
        waiting, self._waiting = self._waiting, []
        for value in waiting:
            total += value
            counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def _child_samples(self) -> Iterable[Sample]:
        self.sort()
        return super()._child_samples()
