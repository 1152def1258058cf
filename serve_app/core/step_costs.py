"""This module computes what a step of an engine costs, from a few batches that were timed one by one. Pure.

A replica times such batches before it listens (`serve_app/replica/self_measurement.py`), a simulated replica in its own time
(`serve_app/autoscaling/simulation/simulated_replica.py`), and the autoscaler starts from their results
(`serve_app/autoscaling/capacity.py`).
"""

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONTEXT_TOKENS = 241
"""The most tokens before the decoded ones in each sequence of a timed batch: whole blocks of the prefix cache, the same for all sequences
and so computed once, and one more. Fewer than 256: from there on vLLM may read a common beginning once for all sequences, which real
batches do not have."""
SEQUENCES = (1, 32, 8)
"""Sequences that decode together in the timed batches. The first two separate the cost of a step from that of a token; the third shows
whether the law is linear."""
CHUNK_TOKENS = 512
"""Tokens of the timed prompt: a usual prompt, and enough to keep an accelerator busy."""
TIMING_ERROR = 0.05
"""The least relative error that is assumed of a timed batch."""
UNTIMED_TOKEN = 0.04
"""Assumed cost of a token that no batch separates, as a share of the shortest step; its error is as large. Measured: 0.002 (output token,
8B model on a simulated A10G) to 0.09 (embedded model on two CPU cores)."""
REPORT_PREFIX = "measured_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Seconds that a step costs, however small its batch, and that each of its tokens adds; with the standard deviation of each, > 0
    if it was timed.

    ``context_token_s`` is what a token of an answer costs more for each token before it beyond `CONTEXT_TOKENS`; 0 if that was not timed.
    """

    step_s: float
    output_token_s: float
    prompt_token_s: float
    step_error_s: float
    output_token_error_s: float
    prompt_token_error_s: float
    context_token_s: float = 0.0
    context_token_error_s: float = 0.0

    def seconds(
        self, *, computed_tokens: float = 0, output_tokens: float = 0, context_tokens: float = 0, step_part: float = 0.0
    ) -> float:
        """Return the seconds of a request: of its prompt tokens that no cache had, of its answer, and of its part of the steps.

        ``context_tokens`` are those of `long_context`.
        """
        of_tokens_s = computed_tokens * self.prompt_token_s + output_tokens * self.output_token_s
        return of_tokens_s + context_tokens * self.context_token_s + step_part * self.step_s

    def report(self) -> dict[str, float]:
        """Return the numbers under their names among a replica's statistics for the autoscaler."""
        return {f"{REPORT_PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def from_report(cls, values: Mapping[str, float]) -> "MeasuredCosts | None":
        """Return the costs in a report; None if the replica measured nothing or its code is older than this report."""
        found = {f.name: values.get(f"{REPORT_PREFIX}{f.name}", None if f.default is MISSING else f.default) for f in fields(cls)}
        return cls(**found) if None not in found.values() else None  # type: ignore[arg-type]  # none of them is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatch:
    """The timing of one kind of step: tokens of one step, its ``seconds``, and their relative standard deviation ``error``.

    ``context_tokens``: tokens before those of answers, beyond `CONTEXT_TOKENS` of each.
    """

    output_tokens: float
    prefilled_tokens: float
    seconds: float
    error: float = 0.0
    context_tokens: float = 0.0


def long_context(prompt_tokens: int, output_tokens: int) -> int:
    """Return how many tokens the tokens of an answer have before them, beyond `CONTEXT_TOKENS` of each; in all."""
    num_short = max(0, CONTEXT_TOKENS - prompt_tokens)  # tokens of the answer without so many before them
    num_long = max(0, output_tokens - num_short)
    return num_long * (prompt_tokens + num_short - CONTEXT_TOKENS) + num_long * (num_long - 1) // 2


def measured_costs(batches: Sequence[TimedBatch]) -> MeasuredCosts | None:
    """Return the costs that explain the timed batches best; None for fewer than two kinds of batches, or if none of them only decodes.

    Weighted least squares with no cost below zero. A token's cost that the batches do not separate is `UNTIMED_TOKEN`, and that of context
    is 0. If the batches are off the fitted plane by more than their errors, the plane is the wrong law, and the errors of the costs grow by
    the same factor.
    """
    width = 4 if any(b.context_tokens for b in batches) else 3
    rows = np.array([(1.0, b.output_tokens, b.prefilled_tokens, b.context_tokens)[:width] for b in batches]).reshape(-1, width)
    seconds = np.array([b.seconds for b in batches])
    if len(batches) < 2 or np.linalg.matrix_rank(rows) < 2 or (seconds <= 0).any() or all(b.prefilled_tokens for b in batches):
        return None
    sigma = seconds * np.hypot(TIMING_ERROR, [b.error for b in batches])
    guess_s = UNTIMED_TOKEN * seconds.min()
    for token in ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
        if np.linalg.matrix_rank(more := np.vstack([rows, (*token, 0.0)[:width]])) > np.linalg.matrix_rank(rows):
            rows, seconds, sigma = more, np.append(seconds, guess_s), np.append(sigma, guess_s)
    rows, target = rows / sigma[:, None], seconds / sigma
    gram = rows.T @ rows
    costs = non_negative_least_squares(gram, rows.T @ target)
    misfit = float(((rows @ costs - target) ** 2).sum()) / max(1, len(rows) - width)
    errors = np.sqrt(max(1.0, misfit) * np.diag(np.linalg.inv(gram)))
    step_s, output_token_s, prompt_token_s = costs[:3]
    context = {"context_token_s": costs[3], "context_token_error_s": float(errors[3])} if width == 4 else {}
    return MeasuredCosts(
        **context,
        step_s=step_s,
        output_token_s=output_token_s,
        prompt_token_s=prompt_token_s,
        step_error_s=float(errors[0]),
        output_token_error_s=float(errors[1]),
        prompt_token_error_s=float(errors[2]),
    )


def combined(found: Sequence[MeasuredCosts]) -> MeasuredCosts | None:
    """Combine the measurements of one model's replicas: the median of each cost, whose error includes the spread between replicas.

    The median and not the mean: a replica may have measured while its node was busy with something else.
    """
    if not found:
        return None
    costs, errors = {}, {}
    for name in ("step", "output_token", "prompt_token", "context_token"):
        timed = [m for m in found if getattr(m, f"{name}_error_s")] or found  # not all have timed a long context
        values = [getattr(m, f"{name}_s") for m in timed]
        costs[f"{name}_s"] = statistics.median(values)
        own = statistics.median(getattr(m, f"{name}_error_s") for m in timed)
        errors[f"{name}_error_s"] = float(np.hypot(own, statistics.pstdev(values)))
    return MeasuredCosts(**costs, **errors)


def non_negative_least_squares(gram: Array, moment: Array) -> tuple[float, ...]:
    """Return the x >= 0 that minimizes |A x - y|, for gram = A'A and moment = A'y.

    With three or four unknowns, the answer is the best of all 7 or 15 supports, computed in the scale of each column. If all unknowns
    together are >= 0, they are the best.
    """
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-30))
    scaled = gram / np.outer(scale, scale) + ROUNDING * np.eye(len(gram))
    target = moment / scale
    best, best_value = np.zeros(len(gram)), 0.0
    for support in _supports(len(gram)):
        x = np.zeros(len(gram))
        x[support] = np.linalg.solve(scaled[np.ix_(support, support)], target[support])
        if not (x >= 0).all():
            continue
        if len(support) == len(gram):
            best = x
            break
        value = float(x @ scaled @ x - 2 * target @ x)
        if value < best_value:
            best, best_value = x, value
    return tuple(map(float, best / scale))


ROUNDING = 1e-9


@functools.cache
def _supports(unknowns: int) -> list[list[int]]:
    """Return all sets of unknowns, the largest first."""
    sizes = range(unknowns, 0, -1)
    return [list(support) for size in sizes for support in itertools.combinations(range(unknowns), size)]
