"""This module computes expected values to draw over the measured bars: the law of lengths, a batch's waste, block arithmetic. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.judge.stats import Floats


@dataclass(frozen=True)
class LengthLaw:
    """A law of lengths: exponential with this mean, rounded, drawn again above ``cap`` and below ``least``."""

    mean: float
    cap: int
    least: int = 1
    """Smallest length. The study allowed 0, but a request for no token is impossible."""

    def cumulative(self) -> Floats:
        """Return P(L <= k) for k = 0 .. cap."""
        edges = np.arange(self.cap + 1) + 0.5
        below = -np.expm1(-edges / self.mean)
        start = -np.expm1(-max(0.0, self.least - 0.5) / self.mean)
        shares: Floats = np.clip((below - start) / (below[-1] - start), 0.0, 1.0)
        return shares

    def expected_max(self, num: int) -> float:
        """Return E[max of ``num`` lengths], the sum over k of P(max > k)."""
        return float((1.0 - self.cumulative()[:-1] ** num).sum())

    def waste(self, batch_size: int, num_requests: int | None = None) -> float:
        """Return the steps run per needed step of a batch that runs to its own maximum; with ``num_requests``, to the maximum of all."""
        return self.expected_max(num_requests or batch_size) / self.expected_max(1)


def plain_multiple(law: LengthLaw, batch: float, paper_batch: int, num_requests: int, *, own_max: bool) -> float:
    """Return the output throughput over ``paper static`` if each step took the same time for any batch, and prefill took none.

    Args:
        batch: Requests that run at once: a static batch, or the mean number of running requests with continuous batching.
        own_max: A static batch runs to its own maximum; else every place is always in use, the aim of continuous batching.
    """
    steps = law.expected_max(round(batch)) if own_max else law.expected_max(1)
    return (batch / steps) / (paper_batch / law.expected_max(num_requests))


@dataclass(frozen=True)
class Life:
    """One request of a continuous batch as its client saw it; the prefill is before ``first_s``."""

    prompt_tokens: int
    first_s: float
    end_s: float
    token_times_s: Sequence[float]


def block_use(lives: Sequence[Life], *, block_size: int, num_samples: int = 400) -> tuple[Floats, Floats, Floats]:
    """Return times, and the allocated and used KV tokens of all decoding requests; allocation is in whole blocks.

    The client does not see requests in their prefill, which are left out of both.
    """
    start, end = min(life.first_s for life in lives), max(life.end_s for life in lives)
    times = np.linspace(start, end, num_samples, endpoint=False)
    allocated, used = np.zeros(num_samples), np.zeros(num_samples)
    for life in lives:
        running = (times >= life.first_s) & (times < life.end_s)
        tokens = life.prompt_tokens + np.searchsorted(np.asarray(life.token_times_s), times, side="right")
        used += np.where(running, tokens, 0)
        allocated += np.where(running, -(-tokens // block_size) * block_size, 0)
    return times, allocated, used


def rows_of(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a row for each (start, end), in the order of starts: the lowest free row, as for slots of a batch."""
    free_at: list[float] = []
    rows = []
    for start, end in spans:
        row = next((i for i, at in enumerate(free_at) if at <= start), len(free_at))
        free_at[row : row + 1] = [end]
        rows.append(row)
    return rows
