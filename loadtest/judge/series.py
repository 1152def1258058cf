"""A series of latencies as the estimators see it: in memory (`InMemory`), or too long for that (`loadtest.judge.gaps.Gaps`)."""

from functools import cached_property
from typing import Protocol

import numpy as np

from loadtest.judge import stats
from loadtest.quantiles import Floats, Ordered


class Series(Protocol):
    """Latencies in seconds, in the order of due times; each is known between two bounds, and a failed one is infinite."""

    @property
    def size(self) -> int: ...
    @property
    def num_failed(self) -> int:
        """How many are not known exactly: failed, refused, timed out."""

    @property
    def mean_answered_s(self) -> float | None:
        """Mean of the others."""

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
        """Return the share that is at most ``limit_s``."""


class InMemory:
    """Implements `Series` over arrays."""

    def __init__(self, low: Floats, high: Floats) -> None:
        self._high = high
        self.size = low.size
        known = low[(low == high) & np.isfinite(high)]
        self.num_failed = low.size - known.size
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
