"""All gaps between the tokens of a run, in two passes over its rows and without keeping one of them. Pure.

ITL has a value per token: 128 million in a million answers of 129. Chunks are recorded to the microsecond, so that counting the gaps
by their whole microseconds loses nothing: percentiles are exact. What needs the order of the gaps (how many independent samples they
are worth, and whether the run was long enough) is counted in the second pass, by batches of the whole.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.judge import stats
from loadtest.judge.columns import Bools, Chunked, Ints
from loadtest.quantiles import Floats, rank

INFINITE_US = np.iinfo(np.int64).max
"""A gap that never ended: of a request that failed."""
_DENSE_US = 1 << 21
"""Gaps below 2.1 s are counted in one array of this size; longer ones, which are rare, in a dictionary."""

Pieces = Callable[[], Iterator[Ints]]
"""The gaps in microseconds, in the order of due times, piece by piece; can be asked for again."""


class Weights(NamedTuple):
    """For each row: are its gaps counted, and how many infinite gaps does it add because its request failed?

    An array has one value per row, in the order of the rows.
    """

    counted: Bools
    """The gaps that were seen count."""
    owed: Ints
    """Infinite gaps after those that were seen."""
    before: Ints
    """Infinite gaps before the row, of requests that have no row; one value more than rows, for those after the last."""


def weighed(batches: Iterator[Chunked], weights: Weights) -> Iterator[Ints]:
    """Yield the gaps of the counted rows, with the infinite ones of those that failed in their places."""
    first = 0
    for chunks in batches:
        gaps, num_gaps = chunks.gaps_us()
        rows = slice(first, first + num_gaps.size)
        counted = weights.counted[rows]
        gaps, num_gaps = gaps[np.repeat(counted, num_gaps)], np.where(counted, num_gaps, 0)
        before, owed = weights.before[rows], weights.owed[rows]
        ends = np.cumsum(before + num_gaps + owed)
        if ends.size and ends[-1]:
            piece = np.full(int(ends[-1]), INFINITE_US)
            begins = ends - owed - num_gaps
            piece[np.arange(gaps.size) + np.repeat(begins - (np.cumsum(num_gaps) - num_gaps), num_gaps)] = gaps
            yield piece
        first += num_gaps.size
    if weights.before[first:].sum():
        yield np.full(int(weights.before[first:].sum()), INFINITE_US)


class Sorted:
    """The gaps in rising order, as a sequence of seconds."""

    def __init__(self, values_us: Ints, counts: Ints, num_infinite: int) -> None:
        self._values_us, self._ends = values_us, np.cumsum(counts)
        self.num_finite = int(counts.sum())
        self.size = self.num_finite + num_infinite

    def __getitem__(self, k: int) -> float:
        if k >= self.num_finite:
            return math.inf
        return float(self._values_us[np.searchsorted(self._ends, k, side="right")]) / 1e6

    def num_within(self, limit_s: float) -> int:
        """Return how many gaps are at most so long."""
        number = int(np.searchsorted(self._values_us / 1e6, limit_s, side="right"))
        return int(self._ends[number - 1]) if number else 0

    def mid_ranks(self) -> tuple[Ints, Floats, float]:
        """Return the values in microseconds, the mean rank of each, and that of the infinite ones."""
        counts = np.diff(self._ends, prepend=0)
        return self._values_us, self._ends - (counts - 1) / 2, (self.num_finite + self.size + 1) / 2


class Gaps:
    """Implements `loadtest.judge.series.Series` over pieces."""

    def __init__(self, pieces: Pieces, quantiles: Sequence[float], limits_s: Sequence[float] = ()) -> None:
        self._pieces = pieces
        self.low = self.high = self._count()
        self.size = self.low.size
        self._thresholds_s = {q: self.low[rank(self.size, q) - 1] for q in (*stats.LEVELS, *quantiles)} if self.size else {}
        self._batches(sorted({*self._thresholds_s.values(), *limits_s}))

    def _count(self) -> Sorted:
        """First pass: count the gaps by their length."""
        dense, rare, num_infinite, total_us = np.zeros(_DENSE_US, dtype=np.int64), dict[int, int](), 0, 0
        for piece in self._pieces():
            finite = piece[piece < INFINITE_US]
            num_infinite += piece.size - finite.size
            total_us += int(finite.sum())
            short = finite[finite < _DENSE_US]
            dense += np.bincount(short, minlength=_DENSE_US)
            for value, count in zip(*np.unique(finite[finite >= _DENSE_US], return_counts=True), strict=True):
                rare[int(value)] = rare.get(int(value), 0) + int(count)
        seen = np.flatnonzero(dense)
        long = np.array(sorted(rare), dtype=np.int64)
        counts = np.concatenate([dense[seen], np.array([rare[int(value)] for value in long], dtype=np.int64)])
        self.num_failed = num_infinite
        self.mean_answered_s = total_us / 1e6 / int(counts.sum()) if counts.size else None
        return Sorted(np.concatenate([seen, long]), counts, num_infinite)

    def _batches(self, thresholds_s: list[float]) -> None:
        """Second pass: per batch of the whole, the share of gaps over each threshold; per part, the mean rank."""
        over = {limit_s: np.zeros(stats.NUM_BATCHES) for limit_s in thresholds_s}
        ranks = np.zeros(stats.NUM_PARTS)
        batch, part = self.size // stats.NUM_BATCHES, self.size // stats.NUM_PARTS
        table = _RankTable(self.low) if part else None
        at = 0
        for piece in self._pieces() if batch else ():
            seconds = np.where(piece == INFINITE_US, np.inf, piece / 1e6)
            for limit_s, counts in over.items():
                _add(counts, (seconds > limit_s).astype(np.float64), at, self.size, batch)
            if table:
                _add(ranks, table.ranks(piece), at, self.size, part)
            at += piece.size
        self._over = {limit_s: counts / max(batch, 1) for limit_s, counts in over.items()}
        self.resolved = self.size < 2 * stats.NUM_PARTS or stats.lag1(ranks / part) < stats.MAX_PART_CORRELATION

    def worth(self, q: float, limit_s: float | None = None) -> float:
        """As `loadtest.judge.stats.effective_size`; q and the limit must be of those that were given at first."""
        if not self.size:
            return 0.0
        last = self._thresholds_s[q] if limit_s is None else limit_s
        limits = [*(self._thresholds_s[level] for level in stats.LEVELS), last]
        return self.size * min(self._share(limit_s) for limit_s in limits)

    def _share(self, limit_s: float) -> float:
        over = 1 - self.low.num_within(limit_s) / self.size
        return stats.effective_share_of(over, self._over[limit_s], self.size)

    def attained(self, limit_s: float) -> float:
        return self.low.num_within(limit_s) / self.size


class _RankTable:
    """The mean rank of a gap, by its microseconds."""

    def __init__(self, ordered: Sorted) -> None:
        self._values_us, self._ranks, self._infinite = ordered.mid_ranks()
        self._dense = np.zeros(_DENSE_US)
        short = self._values_us < _DENSE_US
        self._dense[self._values_us[short]] = self._ranks[short]

    def ranks(self, piece: Ints) -> Floats:
        found: Floats = self._dense[np.minimum(piece, _DENSE_US - 1)]
        long = piece >= _DENSE_US
        if long.any():
            at = np.minimum(np.searchsorted(self._values_us, piece[long]), self._ranks.size - 1)
            found[long] = np.where(piece[long] == INFINITE_US, self._infinite, self._ranks[at] if self._ranks.size else 0.0)
        return found


def _add(sums: Floats, values: npt.NDArray[np.float64], at: int, size: int, batch: int) -> None:
    """Add the values, the first of which is number ``at`` of ``size``, to the sums of their batches; what does not fill one comes first."""
    first = size - batch * sums.size
    begin = max(at, first)
    if begin >= at + values.size:
        return
    edges = np.arange((begin - first) // batch, (at + values.size - 1 - first) // batch + 1)
    cuts = [begin - at, *(first + edges[1:] * batch - at).tolist(), values.size]
    for number, (low, high) in zip(edges.tolist(), pairwise(cuts), strict=True):
        sums[number] += values[low:high].sum()
