"""The arrivals are the due times of the requests: one absolute schedule per seed, for any number of workers.

Pure: no clock, no IO. Varying rates are Poisson processes of unit rate sent through the inverse of the cumulated rate, which is
exact and, unlike thinning, moves no other arrival when the rate is changed in one place. The sum is never normalised to the
duration: that would make the counts less random than Poisson's. Numbers come from Philox, keyed by seed and name of the stream.
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import UsageError
from loadtest.plan.laws import Arrival, Burst, Closed, Constant, Diurnal, FlashCrowd, Gamma, OnOff, Poisson, Ramp, Step, Trace

Times: TypeAlias = NDArray[np.float64]

MAX_REQUESTS = 10_000_000
"""Most requests of a schedule, which is held in memory: about 150 bytes per request."""
_DIURNAL_PIECES = 720  # straight pieces of a sine: its rate is within 1e-5 of the amplitude


def generator(seed: int, stream: str) -> np.random.Generator:
    """Return the generator of one stream, such as ``arrivals``. Streams are independent: draws from one change no other."""
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.Philox(key=np.array([seed, name], dtype=np.uint64)))


def due_times(arrival: Arrival, *, duration_s: float, seed: int) -> Times:
    """Return sorted times, 0 <= t < duration_s. A longer duration keeps the times of a shorter one (for a ramp: the unit times).

    In a closed loop all times are 0: a free client may send any of the requests from the start.

    Raises:
        UsageError: No request, or more than `MAX_REQUESTS`.
        ValueError: The law is ``trace``: its times are in a file.
    """
    rng = generator(seed, "arrivals")
    match arrival:
        case Burst() | Closed():
            return np.zeros(arrival.max_requests)
        case Constant():
            _check(arrival.rate * duration_s)
            times = np.arange(math.ceil(arrival.rate * duration_s)) / arrival.rate
        case Gamma():
            times = _gamma(arrival, duration_s, rng)
        case Trace():
            raise ValueError(f"law {arrival.law} has no times of its own")
        case _:
            rate = _rate_of(arrival, duration_s)
            unit_times = _sums(rng.standard_exponential, until=_check(rate.cumulated(duration_s)))
            times = rate.inverse(unit_times)
    times = times[times < duration_s]
    if not times.size:
        raise UsageError("arrival", f"no request is due within duration_s {duration_s:g}; raise it, or the rate")
    return np.sort(times)


def _check(expected: float) -> float:
    if not 0 < expected <= MAX_REQUESTS:
        raise UsageError(
            "arrival", f"{expected:.4g} requests are expected; rate x duration_s must be above 0 and at most {MAX_REQUESTS:,}"
        )
    return expected


def _sums(draw: Callable[[int], Times], *, until: float, num: float | None = None) -> Times:
    """Return the running sums, below ``until``, of drawn gaps. About ``num`` sums are expected (default: as of unit gaps)."""
    gaps = draw(int((until if num is None else num) * 1.1) + 64)
    while (sums := np.cumsum(gaps))[-1] < until:
        gaps = np.concatenate([gaps, draw(gaps.size)])
    return sums[sums < until]


def _gamma(law: Gamma, duration_s: float, rng: np.random.Generator) -> Times:
    """The stationary renewal process: as if it had begun long ago, so that the mean count is rate x duration_s from the start.

    If the first gap had the law of the others, (cv^2 - 1) / 2 arrivals would be added at 0. The gap that covers a given time is drawn
    in proportion to its length (a gamma of shape + 1), and that time is uniform in the gap.
    """
    num = _check(law.rate * duration_s)
    shape = law.cv**-2
    scale_s = 1 / (law.rate * shape)
    first_s = rng.standard_gamma(shape + 1) * rng.random() * scale_s

    def draw(size: int) -> Times:
        # Whole nanoseconds: the last digit of libm's pow() differs between machines, and the schedule's hash must not.
        return np.round(rng.standard_gamma(shape, size) * scale_s, 9)

    first_s = float(np.round(first_s, 9))
    return np.concatenate([[first_s], first_s + _sums(draw, until=duration_s, num=num)])


@dataclass(frozen=True)
class _Rate:
    """A rate in requests per second: linear pieces over one cycle, which repeats. Columns: seconds, rate at the start, at the end."""

    pieces: Times

    def cumulated(self, until_s: float) -> float:
        """Return the expected arrivals in [0, until_s)."""
        lengths_s, low, high = self.pieces.T
        cycles, rest_s = divmod(until_s, float(lengths_s.sum()))
        ends_s = np.cumsum(lengths_s)
        inside_s = np.clip(rest_s - (ends_s - lengths_s), 0, lengths_s)
        slope = np.divide(high - low, lengths_s, out=np.zeros_like(low), where=lengths_s > 0)
        return float(cycles * self._areas().sum() + (low * inside_s + slope * inside_s**2 / 2).sum())

    def inverse(self, cumulated: Times) -> Times:
        """Return the times at which the cumulated rate reaches the given values."""
        lengths_s, low, high = self.pieces.T
        ends = np.cumsum(self._areas())
        cycles, rest = np.divmod(cumulated, ends[-1])
        piece = np.searchsorted(ends, rest, side="right")  # a piece without arrivals is never found
        rest -= (ends - self._areas())[piece]
        a, b, length_s = low[piece], high[piece], lengths_s[piece]
        root = np.sqrt(np.maximum(a**2 + 2 * (b - a) / length_s * rest, 0))
        inside_s = np.divide(2 * rest, a + root, out=np.zeros_like(rest), where=a + root > 0)
        ends_s = np.cumsum(lengths_s)
        times: Times = cycles * ends_s[-1] + (ends_s - lengths_s)[piece] + np.clip(inside_s, 0, length_s)
        return times

    def _areas(self) -> Times:
        lengths_s, low, high = self.pieces.T
        areas: Times = lengths_s * (low + high) / 2
        return areas


def _rate_of(law: Poisson | OnOff | Ramp | Step | FlashCrowd | Diurnal, duration_s: float) -> _Rate:
    match law:
        case Poisson():
            pieces = [(duration_s, law.rate, law.rate)]
        case OnOff():
            pieces = [(law.on_s, law.rate, law.rate), (law.off_s, law.off_rate, law.off_rate)]
        case Ramp():
            pieces = [(duration_s, law.rate, law.to_rate)]
        case Step():
            pieces = [(law.at_s, law.rate, law.rate), (duration_s, law.to_rate, law.to_rate)]
        case FlashCrowd():
            up, down = (law.rise_s, law.rate, law.peak_rate), (law.fall_s, law.peak_rate, law.rate)
            hold = (law.hold_s, law.peak_rate, law.peak_rate)
            pieces = [(law.at_s, law.rate, law.rate), up, hold, down, (duration_s, law.rate, law.rate)]
        case Diurnal():
            angles = np.linspace(0, 2 * np.pi, _DIURNAL_PIECES + 1)
            # Rounded like the gaps of gamma: libm's cos() differs between machines too.
            rates = law.rate * np.round(1 - law.amplitude * np.cos(angles), 9)
            length_s = law.period_s / _DIURNAL_PIECES
            pieces = [(length_s, float(a), float(b)) for a, b in itertools.pairwise(rates)]
    if sum(piece[0] for piece in pieces) <= 0:
        raise UsageError("arrival", f"the times of law {law.law} add up to 0 s; give at least one of them a length")
    return _Rate(np.array(pieces, dtype=np.float64))
