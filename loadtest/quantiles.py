"""The quantile of a sample is, everywhere here, one of its values. Pure, and quick to import for the generator's processes."""

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ordered(Protocol):
    """Values in rising order."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, k: int, /) -> float: ...


def rank(n: int, q: float) -> int:
    """Return the rank of the ``q`` quantile of ``n`` values: the smallest r, 1 <= r <= n, with r / n >= q."""
    return min(n, max(1, math.ceil(q * n - 1e-9)))


def quantile(values: Floats, q: float) -> float:
    """Return the value at `rank`, or NaN without values. It is never interpolated, so that infinite values do not spread."""
    if values.size == 0:
        return math.nan
    k = rank(values.size, q) - 1
    return float(np.partition(values, k)[k])
