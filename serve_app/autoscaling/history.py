"""The history keeps the load of the last minutes, and means and maxima over it, for the autoscaler. Pure."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import dropwhile, pairwise

from serve_app.autoscaling.signals import ModelLoad

HISTORY_S = 300.0
DISPERSION_S = 5
"""Arrivals of this many observations are counted together to measure how bursty arrivals are."""
QUARTILE_OF_SQUARE = 1.323
"""Upper quartile of the square of a standard normal variable."""
SPREAD_KNOWN = 6
"""The spread is fully measured from this many differences of groups' means on: half a minute or so of arrivals."""
GUARD_S = 3.0
"""A condition counts once it has held this long: one burst of arrivals fills a queue for a moment."""
MEAN_REQUESTS, MEAN_S = 300.0, 30.0
"""Memory of a mean over requests, the longer of the two: in a large fleet 300 answers end within seconds and would give a noisy mean."""


@dataclass(slots=True)
class Recent:
    """The largest of the values of the last ``keep_s`` seconds, in O(1) per value."""

    entries: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, at: float, value: int, keep_s: float, *, first: int) -> int:
        """Return the maximum, ``value`` included. ``first`` counts as the value before the first: a restart scales nothing down."""
        if not self.entries:
            self.entries.append((at, first))
        while self.entries and self.entries[-1][1] <= value:
            self.entries.pop()
        self.entries.append((at, value))
        while self.entries[0][0] < at - keep_s:
            self.entries.popleft()
        return self.entries[0][1]


@dataclass(frozen=True, slots=True)
class Sums:
    """Increments over a span of time."""

    interval_s: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    rejected: float = 0.0
    first_tokens: float = 0.0
    late_first_tokens: float = 0.0
    queued: float = 0.0
    """Waiting requests, summed over the observations: 0 if no request waited at any of them."""

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def rate(self) -> float:
        return self.requests / self.interval_s if self.interval_s else 0.0


@dataclass(slots=True)
class History:
    """Running totals of the last `HISTORY_S` seconds: the sums of a span are a difference."""

    _at: list[float] = field(default_factory=list)
    _totals: list[tuple[float, ...]] = field(default_factory=list)
    _queue: deque[tuple[float, float]] = field(default_factory=deque)
    _counts: deque[float] = field(default_factory=deque)
    """Arrivals in `DISPERSION_S` observations each."""
    _prompt_tokens: deque[float] = field(default_factory=deque)
    """Prompt tokens of the same groups of arrivals."""
    _count: float = 0.0
    _tokens: float = 0.0
    _num_counted: int = 0

    def add(self, at: float, load: ModelLoad) -> None:
        queued = load.waiting + load.queued
        new = (
            load.interval_s,
            load.requests,
            load.prompt_tokens,
            load.rejected,
            load.first_tokens,
            load.late_first_tokens,
            queued,
        )
        before = self._totals[-1] if self._totals else (0.0,) * len(new)
        self._at.append(at)
        self._totals.append(tuple(a + b for a, b in zip(before, new, strict=True)))
        self._queue.append((at, queued))
        while self._queue[0][0] <= at - GUARD_S:
            self._queue.popleft()
        self._count += load.requests
        self._tokens += load.prompt_tokens
        self._num_counted += 1
        if self._num_counted == DISPERSION_S:
            self._counts.append(self._count)
            self._prompt_tokens.append(self._tokens)
            self._count, self._tokens, self._num_counted = 0.0, 0.0, 0
            if len(self._counts) > HISTORY_S / DISPERSION_S:
                self._counts.popleft()
                self._prompt_tokens.popleft()
        if self._at[0] < at - 2 * HISTORY_S:
            keep = bisect_right(self._at, at - HISTORY_S)
            del self._at[:keep], self._totals[:keep]

    def sums(self, until: float, span_s: float) -> Sums:
        """Return the increments of the ``span_s`` seconds before ``until``."""
        end, start = bisect_right(self._at, until), bisect_right(self._at, until - span_s)
        if end == 0:
            return Sums()
        before = self._totals[start - 1] if start else (0.0,) * len(self._totals[0])
        return Sums(*(b - a for a, b in zip(before, self._totals[end - 1], strict=True)))

    def observations(self, until: float, span_s: float) -> Iterator[Sums]:
        """Yield the increments of each observation that `sums` adds up."""
        end, start = bisect_right(self._at, until), bisect_right(self._at, until - span_s)
        for i in range(start, end):
            before = self._totals[i - 1] if i else (0.0,) * len(self._totals[0])
            yield Sums(*(b - a for a, b in zip(before, self._totals[i], strict=True)))

    def dispersion(self) -> float:
        """Return the variance of counts of arrivals over their mean; at least 1, the value for Poisson arrivals.

        The variance comes from the upper quartile of squared differences of successive counts. A trend, a step or a spike in the rate
        makes only few large differences and so does not look like bursts. Nor do bursts that are rarer than every half minute. The time
        before the first request says nothing about arrivals, and would lower their mean.
        """
        counts = list(dropwhile(lambda count: not count, self._counts))
        squares = [(b - a) ** 2 for a, b in pairwise(counts)]
        if not squares:
            return 1.0
        return max(1.0, _variance(squares) / 2 / (sum(counts) / len(counts)))

    def prompts_spread(self) -> float:
        """Return the variance of the prompts' lengths over their mean squared, from differences of successive means as in `dispersion`.

        Without differences the result is 1, the value for exponential lengths; each of the first `SPREAD_KNOWN` differences moves it by as
        much towards the measured value.
        """
        groups = [(n, tokens / n) for n, tokens in zip(self._counts, self._prompt_tokens, strict=True) if n]
        squares = [(b - a) ** 2 / (1 / m + 1 / n) for (m, a), (n, b) in pairwise(groups)]
        mean = sum(self._prompt_tokens) / max(1.0, sum(self._counts))
        measured = _variance(squares) / mean**2 if squares and mean else 1.0
        known = min(1.0, len(squares) / SPREAD_KNOWN)
        return known * measured + 1.0 - known

    def least_queue(self) -> float:
        """Return the fewest requests that waited during the last `GUARD_S`: a queue of a moment does not count."""
        return min((queued for _, queued in self._queue), default=0.0)


def _variance(squares: list[float]) -> float:
    """Return the variance of normal values from the upper quartile of their squares, which a few outliers change little."""
    return sorted(squares)[math.ceil(0.75 * len(squares)) - 1] / QUARTILE_OF_SQUARE


@dataclass(slots=True)
class Mean:
    """A mean that forgets: over the last 300 requests, or over the last 30 s if more than 300 came in them."""

    _total: float = 0.0
    _weight: float = 0.0

    @property
    def value(self) -> float | None:
        return self._total / self._weight if self._weight else None

    def weigh(self, weight: float) -> None:
        """Let all items so far count ``weight`` times as much, 0..1."""
        self._total, self._weight = weight * self._total, weight * self._weight

    @property
    def error(self) -> float:
        """Return the relative standard deviation of the mean, for values whose deviation equals their mean (exponential ones)."""
        return 1 / math.sqrt(2 * max(0.5, self._weight))  # exponential forgetting: the effective number is twice the weight

    def add(self, total: float, weight: float, interval_s: float) -> None:
        """Add ``weight`` items of an interval, whose values sum to ``total``."""
        keep = math.exp(-min(weight / MEAN_REQUESTS, interval_s / MEAN_S))
        self._total = keep * self._total + total
        self._weight = keep * self._weight + weight
