"""This module pairs the requests of two runs of one schedule, by id, where both were due in their run's window. Pure."""

from dataclasses import dataclass

import numpy as np

from loadtest.judge.columns import Ints
from loadtest.judge.series import InMemory, Series
from loadtest.judge.window import Bounds, Window, last_positions


@dataclass(frozen=True)
class Pairs:
    """The common requests of two runs.

    A later turn of a conversation is due after the end of the answer before it. So the two runs may have later turns in different
    orders, and some only in the window of one run.
    """

    windows: tuple[Window, Window]
    """The common requests of each run, in the order of that run's due times."""
    positions: tuple[Ints, Ints]
    """Element k of both arrays is the same request's position in each of ``windows``; sorted by the sum of its two due times.

    The sum is used, not the due time in one run, so that it does not matter which run is called a.
    """
    num_only: tuple[int, int]
    """Number of requests that were due only in the window of a, and only in that of b."""

    @classmethod
    def of(cls, a: Window, b: Window) -> "Pairs":
        """Pair the requests of two windows."""
        windows = a.where(np.isin(a.ids, b.ids)), b.where(np.isin(b.ids, a.ids))
        there = last_positions(windows[1].ids, windows[0].ids)
        order = np.lexsort((windows[0].ids, windows[0].due_s + windows[1].due_s[there]))
        return cls(windows, (order, there[order]), (len(a) - len(windows[0]), len(b) - len(windows[1])))

    @property
    def num_common(self) -> int:
        return len(self.windows[0])

    def series(self, metric: str) -> tuple[Series, Series]:
        """Return the bounds of the requests that have the metric in both runs; not for ``itl``."""
        bounds = [window.bounds(metric) for window in self.windows]
        both = bounds[0].has[self.positions[0]] & bounds[1].has[self.positions[1]]
        a, b = (_series(each, at[both]) for each, at in zip(bounds, self.positions, strict=True))
        return a, b


def _series(bounds: Bounds, at: Ints) -> Series:
    """Return the bounds at these positions as a series in the order of due times, with blocks in the order of the pairs."""
    number = np.cumsum(bounds.has) - 1  # by position in the window: the position among the requests that have the metric
    own = number[np.sort(at)]
    low, high = bounds.low[own], bounds.high[own]
    return InMemory(high if (low == high).all() else low, high, left=bounds.left[own], blocks_of=bounds.high[number[at]])
