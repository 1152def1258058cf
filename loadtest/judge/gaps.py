"""This module counts all gaps between the tokens of a run, in passes over its rows that keep none of them in memory. Pure.

The first pass gives the percentiles (`Sorted`), a second their intervals (`Gaps`), and a third what the ratio of two runs needs
(`Gaps.left_out`).

ITL has a value per token: 128 million in a million answers of 129. Chunks are recorded to the microsecond, so counting the gaps by
whole microseconds loses nothing: percentiles are exact. The second pass computes, by batches of the whole, the figures that need the
order of the gaps: the number of independent samples that they are worth, and whether the run was long enough.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.judge import stats
from loadtest.judge.columns import Bools, Chunked, Ints
from loadtest.quantiles import Floats, rank

INFINITE_US = np.iinfo(np.int64).max
"""Length of a gap that never ended, of a failed request."""
_DENSE_US = 1 << 21
"""Gaps below 2.1 s are counted in one array of this size; longer ones, which are rare, in a dictionary."""

Pieces = Callable[[], Iterator[Ints]]
"""A function that yields the gaps in microseconds, in the order of due times, piece by piece; each call begins a new pass."""


class Weights(NamedTuple):
    """For each row, whether its gaps count, and the number of infinite gaps that it adds because its request failed.

    An array has one value per row, in the order of the rows.
    """

    counted: Bools
    """Whether the row's recorded gaps count."""
    owed: Ints
    """Number of infinite gaps after the recorded gaps."""
    before: Ints
    """Number of infinite gaps before the row, for requests that have no row; the additional last value is for the end."""


def weighed(batches: Iterator[Chunked], weights: Weights) -> Iterator[Ints]:
    """Yield the gaps of the counted rows, and in their places the infinite gaps of failed requests."""
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
    """The gaps in rising order, as a sequence of numbers of seconds."""

    def __init__(self, values_us: Ints, counts: Ints, num_infinite: int) -> None:
        """Keep the sorted ``values_us``, each of which occurs ``counts`` times."""
        self._values_us, self._ends = values_us, np.cumsum(counts)
        self.num_finite = int(counts.sum())
        self.num_infinite = num_infinite
        self.size = self.num_finite + num_infinite

    @classmethod
    def of(cls, pieces: Iterable[Ints]) -> "Sorted":
        """Count the gaps of the pieces by their length."""
        dense, rare, num_infinite = np.zeros(_DENSE_US, dtype=np.int64), dict[int, int](), 0
        for piece in pieces:
            finite = piece[piece < INFINITE_US]
            num_infinite += piece.size - finite.size
            short = np.bincount(finite[finite < _DENSE_US])
            dense[: short.size] += short
            for value, count in zip(*np.unique(finite[finite >= _DENSE_US], return_counts=True), strict=True):
                rare[int(value)] = rare.get(int(value), 0) + int(count)
        seen = np.flatnonzero(dense)
        long = np.array(sorted(rare), dtype=np.int64)
        counts = np.concatenate([dense[seen], np.array([rare[int(value)] for value in long], dtype=np.int64)])
        return cls(np.concatenate([seen, long]), counts, num_infinite)

    @classmethod
    def merged(cls, parts: Sequence["Sorted"]) -> "Sorted":
        """Return the gaps of all parts together."""
        values_us, which = np.unique(np.concatenate([part._values_us for part in parts]), return_inverse=True)
        counts = np.zeros(values_us.size, dtype=np.int64)
        np.add.at(counts, which, np.concatenate([part._counts for part in parts]))
        return cls(values_us, counts, sum(part.num_infinite for part in parts))

    @property
    def _counts(self) -> Ints:
        return np.diff(self._ends, prepend=0)

    @property
    def mean_s(self) -> float | None:
        """Return the mean of the finite gaps, if there are any."""
        return int((self._values_us * self._counts).sum()) / 1e6 / self.num_finite if self.num_finite else None

    def __getitem__(self, k: int) -> float:
        if k >= self.num_finite:
            return math.inf
        return float(self._values_us[np.searchsorted(self._ends, k, side="right")]) / 1e6

    def num_within(self, limit_s: float) -> int:
        """Return the number of gaps of at most ``limit_s``."""
        number = int(np.searchsorted(self._values_us / 1e6, limit_s, side="right"))
        return int(self._ends[number - 1]) if number else 0

    def mid_ranks(self) -> tuple[Ints, Floats, float]:
        """Return the values in microseconds, the mean rank of each, and the mean rank of the infinite gaps."""
        return self._values_us, self._ends - (self._counts - 1) / 2, (self.num_finite + self.size + 1) / 2


class Gaps:
    """A `loadtest.judge.series.Series` over pieces."""

    def __init__(self, pieces: Pieces, quantiles: Sequence[float], limits_s: Sequence[float] = ()) -> None:
        self._pieces = pieces
        self.low = self.high = Sorted.of(pieces())
        self.size, self.num_failed, self.mean_answered_s = self.low.size, self.low.num_infinite, self.low.mean_s
        self.num_left = 0  # the recorded gaps of a cancelled request count
        self._quantiles = quantiles
        self._thresholds_s = {q: self.low[rank(self.size, q) - 1] for q in (*stats.LEVELS, *quantiles)} if self.size else {}
        self._batches(sorted({*self._thresholds_s.values(), *limits_s}))

    def _batches(self, thresholds_s: list[float]) -> None:
        """Make the second pass: per batch of the whole, the share of gaps over each threshold; per part, the mean rank."""
        over = {limit_s: np.zeros(stats.NUM_BATCHES) for limit_s in thresholds_s}
        ranks = np.zeros(stats.NUM_PARTS)
        batch, part = self.size // stats.NUM_BATCHES, self.size // stats.NUM_PARTS
        table = _RankTable(self.low) if part else None
        at = 0
        for piece in self._pieces() if batch else ():
            seconds = np.where(piece == INFINITE_US, np.inf, piece / 1e6)
            for limit_s, counts in over.items():
                _add(counts, stats.over(seconds, limit_s).astype(np.float64), at, self.size, batch)
            if table:
                _add(ranks, table.ranks(piece), at, self.size, part)
            at += piece.size
        self._over = {limit_s: counts / max(batch, 1) for limit_s, counts in over.items()}
        self.resolved = self.size < 2 * stats.NUM_PARTS or stats.lag1(ranks / part) < stats.MAX_PART_CORRELATION

    def worth(self, q: float, limit_s: float | None = None) -> float:
        """As `loadtest.judge.stats.effective_size`; q and the limit must be among those given to the constructor."""
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

    def unknown(self, limit_s: float) -> float:
        return 0.0

    def left_out(self, q: float) -> Floats:
        """As `loadtest.judge.series.Series.left_out`, of at least `stats.NUM_BATCHES` gaps; q must be one given to the constructor."""
        return self._left_out[q]

    @cached_property
    def _left_out(self) -> dict[float, Floats]:
        """Return the quantiles without each block of the whole; the first call makes the third pass."""
        num = stats.NUM_BATCHES
        ends = np.cumsum([self.size // num + (k < self.size % num) for k in range(num)])
        blocks = [Sorted.of(part for _, part in parts) for _, parts in groupby(_cut(self._pieces(), ends), lambda pair: pair[0])]
        found = {q: np.empty(num) for q in self._quantiles}
        for k in range(num):
            rest = Sorted.merged([*blocks[:k], *blocks[k + 1 :]])
            for q, values in found.items():
                values[k] = rest[rank(rest.size, q) - 1]
        return found


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
    """Add the values, of which the first has number ``at`` of ``size``, to the sums of their batches. A rest that fills no batch is at
    the start."""
    first = size - batch * sums.size
    begin = max(at, first)
    if begin >= at + values.size:
        return
    edges = np.arange((begin - first) // batch, (at + values.size - 1 - first) // batch + 1)
    cuts = [begin - at, *(first + edges[1:] * batch - at).tolist(), values.size]
    for number, (low, high) in zip(edges.tolist(), pairwise(cuts), strict=True):
        sums[number] += values[low:high].sum()


def _cut(pieces: Iterator[Ints], ends: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield the pieces, cut at the ends of blocks, each part with its block's number; ``ends`` counts from the begin of the first piece."""
    at = 0
    for piece in pieces:
        parts = np.split(piece, np.clip(ends - at, 0, piece.size))
        yield from ((number, part) for number, part in enumerate(parts) if part.size)
        at += piece.size
