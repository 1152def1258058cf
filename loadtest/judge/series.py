"""A series gives the estimators the latencies of a run: in memory (`InMemory`), or counted (`loadtest.judge.gaps.Gaps`)."""

import math
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from scipy import stats as law

from loadtest.judge import stats
from loadtest.judge.columns import Bools
from loadtest.quantiles import Floats, Ordered

LEAST_S = 1e-9
"""Smallest quantile that has a ratio."""


class Series(Protocol):
    """Latencies in seconds, in the order of due times; each is known between two bounds, and infinite for a failed request."""

    @property
    def size(self) -> int: ...
    @property
    def num_failed(self) -> int:
        """Return the number of requests that failed, were refused or timed out."""

    @property
    def num_left(self) -> int:
        """Return the number of values unknown because the generator cancelled their requests (`loadtest.judge.window.Bounds.left`)."""

    @property
    def mean_answered_s(self) -> float | None:
        """Return the mean of the exactly known latencies."""

    @property
    def low(self) -> Ordered: ...
    @property
    def high(self) -> Ordered: ...
    @property
    def resolved(self) -> bool:
        """As `loadtest.judge.stats.resolved`."""

    def worth(self, q: float, limit_s: float | None = None) -> float:
        """As `loadtest.judge.stats.effective_size`."""

    def attained(self, limit_s: float) -> float:
        """Return the share of latencies that are known to be at most ``limit_s``."""

    def unknown(self, limit_s: float) -> float:
        """Return the share that the load generator cancelled before ``limit_s``: it is unknown if these would have kept the limit."""

    def left_out(self, q: float) -> Floats:
        """Return the quantile without each of `stats.NUM_BATCHES` blocks, as `numpy.array_split` makes them.

        The blocks are consecutive in the order of due times, or for pairs of requests in an order that both runs share.
        """


class InMemory:
    """A `Series` over arrays."""

    def __init__(self, low: Floats, high: Floats, *, left: Bools | None = None, blocks_of: Floats | None = None) -> None:
        """Make a series of the bounds, in the order of due times; if both are the same array, it is sorted only once.

        Args:
            left: As `loadtest.judge.window.Bounds.left`; None: no request was cancelled.
            blocks_of: The values of ``high`` in the order in which `left_out` makes its blocks; None: in the order of ``high``.
        """
        self._high = high
        self._blocks_of = high if blocks_of is None else blocks_of
        self.size = low.size
        known = low[(low == high) & np.isfinite(high)]
        self._left_after = np.empty(0) if left is None else low[left]
        self.num_left = self._left_after.size
        self.num_failed = low.size - known.size - self.num_left
        self.mean_answered_s = float(known.mean()) if known.size else None
        self.high = np.sort(high)
        self.low = self.high if low is high else np.sort(low)

    @cached_property
    def resolved(self) -> bool:
        return stats.resolved(self._high)

    def worth(self, q: float, limit_s: float | None = None) -> float:
        return stats.effective_size(self._high, q, limit_s, ordered=self.high)

    def attained(self, limit_s: float) -> float:
        return float((self._high <= limit_s).mean())

    def unknown(self, limit_s: float) -> float:
        return int((self._left_after <= limit_s).sum()) / self.size

    def left_out(self, q: float) -> Floats:
        blocks = np.array_split(self._blocks_of, stats.NUM_BATCHES)
        rests = (np.concatenate([*blocks[:k], *blocks[k + 1 :]]) for k in range(stats.NUM_BATCHES))
        return np.array([stats.quantile(rest, q) for rest in rests])


class LogRatio(NamedTuple):
    """The logarithm of the ratio of two quantiles."""

    middle: float
    error: float
    """Standard error, with `stats.NUM_BATCHES` - 1 degrees of freedom."""

    def interval(self, confidence: float = stats.CONFIDENCE) -> tuple[float, float, float]:
        """Return the ratio and its interval."""
        half = float(law.t.ppf((1 + confidence) / 2, stats.NUM_BATCHES - 1)) * self.error
        return math.exp(self.middle), math.exp(self.middle - half), math.exp(self.middle + half)


def failed_ratio(a: Series, b: Series, q: float, confidence: float = stats.CONFIDENCE) -> tuple[float, float, float] | None:
    """Return the quantile of ``a`` over that of ``b``, and its interval, if one run's quantile surely lies among failed requests.

    The ratio is infinite (``a`` failed there) or 0 (``b`` did). A request that timed out took at least its timeout, so the end of the
    interval on the side of 1 is finite. None: neither or both of the runs failed there, the other run cannot bound its quantile, or the
    load generator cancelled requests of a run.

    The intervals of the two quantiles, each at ``confidence``, must not overlap.
    """
    if not (a.resolved and b.resolved) or a.num_left or b.num_left:
        return None  # it is unknown how long the cancelled requests would have taken
    intervals = [stats.order_interval(each.low, each.high, q, each.worth(q), confidence) for each in (a, b)]
    failed = [stats.order_interval(each.high, each.high, q, each.worth(q), confidence)[0] == math.inf for each in (a, b)]
    (lower_a, upper_a), (lower_b, upper_b) = intervals
    if failed[0] and upper_b < lower_a:
        return math.inf, lower_a / max(upper_b, LEAST_S), math.inf
    if failed[1] and upper_a < lower_b:
        return 0.0, 0.0, upper_a / lower_b
    return None


def log_ratio(a: Series, b: Series, q: float, *, paired: bool) -> LogRatio | None:
    """Return the quantile of ``a`` over that of ``b``, or None if a run cannot bound its quantile or has 0 there.

    If all tokens of an answer came in one read, the times between them are 0, and 0 has no ratio.

    The interval is a jackknife over blocks of the log ratio, t with 9 degrees. A block bootstrap of the same blocks covered less
    (p99 at rho 0.8: 66 instead of 78 % of 300 runs).

    Args:
        paired: Block k of both holds the same requests of one schedule, so that effects of the schedule cancel.
    """
    if paired and a.size != b.size:
        raise ValueError(f"paired runs must have the same requests, got {a.size} and {b.size}")
    for each in (a, b):
        bounds = stats.order_interval(each.high, each.high, q, each.worth(q))
        if not (all(map(math.isfinite, bounds)) and each.resolved):
            return None
    # The quantile of the whole, then the quantiles without each block.
    found = [np.array([each.high[stats.rank(each.size, q) - 1], *each.left_out(q)]) for each in (a, b)]
    if not all(np.isfinite(values).all() and (values >= LEAST_S).all() for values in found):
        return None
    logs = [np.log(values) for values in found]
    left = [each[1:] for each in logs]
    parts = [left[0] - left[1]] if paired else left
    variance = sum(float(part.var()) for part in parts) * (stats.NUM_BATCHES - 1)
    return LogRatio(float(logs[0][0] - logs[1][0]), math.sqrt(variance))
