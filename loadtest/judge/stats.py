"""This module computes intervals that hold for latencies of a queue, tests of steadiness and arrival laws, and a sequential pass rule.

Pure: arrays in, numbers out; random numbers come from a generator made from a seed (Philox). Latencies are in the order of their due
times; a failed request is ``inf``. Latencies of one run depend on each other, so the textbook interval of a percentile covers the truth
in only 5-50 % of the runs near the knee. `loadtest.proof.coverage` measures how often the intervals of this module cover it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special
from scipy import stats as law

from loadtest.quantiles import Floats as Floats  # re-exported, so that users of this module need one import
from loadtest.quantiles import Ordered as Ordered
from loadtest.quantiles import quantile as quantile
from loadtest.quantiles import rank as rank

CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
"""Percentiles of every distribution."""
NUM_BATCHES = 10
"""Number of batches: few and long ones, since a batch must hold many relaxation times of the queue. The intervals of 20 and 30 batches
cover up to 15 points less near the knee."""
MIN_COUNTED = 20
"""Fewest requests that a rate must count to have an interval. Counts of fewer requests are skewed, and Student's interval over the
parts is too narrow."""
LEVELS = (0.5, 0.9)
"""Quantiles at which dependence is measured, in addition to the wanted percentile: values above a p99 are too rare to show it."""
NUM_PARTS = 40
MAX_PART_CORRELATION = 0.4
"""Largest correlation of neighbouring fortieths of a run; independent samples exceed it in under 1 % of the runs. The check is not
perfect: for M/M/32 at rho 0.95 and 2000 requests, about one relaxation time, 7 % of the runs pass it (with twentieths 21 %), and the
median of those runs is wrong. No rule inside one run can detect them; replicates can."""
_WIDEN = float(law.norm.ppf(0.975) / law.t.ppf(0.975, NUM_BATCHES - 1)) ** 2


def order_ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Return the ranks that bound the quantile of ``n`` independent samples; None: no sample bounds it on that side."""
    if n < 1:
        return None, None
    tail = (1 - confidence) / 2
    low, high = int(law.binom.ppf(tail, n, q)), int(law.binom.ppf(1 - tail, n, q)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def order_interval(low: Ordered, high: Ordered, q: float, n_eff: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the quantile as if ``n_eff`` of the samples were independent.

    Args:
        low, high: Sorted bounds of each latency; they differ for a request that was given up (at least so long, perhaps never).
    """
    n = low.size
    n_indep = int(min(n_eff, n))
    at_low, at_high = order_ranks(n_indep, q, confidence)
    lower = -math.inf if at_low is None else float(low[max(0, math.floor(at_low / n_indep * n) - 1)])
    upper = math.inf if at_high is None else float(high[min(n, math.ceil(at_high / n_indep * n)) - 1])
    return lower, upper


def share_bound(num: float, n: float, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided upper bound (Clopper-Pearson) of a share that ``num`` of ``n`` independent samples had.

    Both may be effective sizes (real).
    """
    return 1.0 if num >= n else float(law.beta.ppf(confidence, num + 1, n - num))


def _batch_means(values: Floats, num: int) -> Floats:
    size = values.size // num
    return np.asarray(values[values.size - size * num :].reshape(num, size).mean(axis=1))


def effective_share(inside: npt.NDArray[np.bool_]) -> float:
    """Return the independent samples per sample of an indicator series, in (0, 1], from the variance of its batch means.

    The number is lowered by (z/t)^2, so that an interval with z and this size is as wide as one with t and the batches' own variance.
    """
    batches = _batch_means(inside.astype(np.float64), NUM_BATCHES) if inside.size >= NUM_BATCHES else np.empty(0)
    return effective_share_of(float(inside.mean()) if inside.size else 0.0, batches, inside.size)


def effective_share_of(share: float, batches: Floats, size: int) -> float:
    """Return `effective_share` of a series of ``size`` from its mean and the means of its `NUM_BATCHES` batches."""
    if size < 2 * NUM_BATCHES:
        return _WIDEN
    spread = float(batches.var(ddof=1)) * (size // NUM_BATCHES)
    return _WIDEN * (min(1.0, share * (1 - share) / spread) if spread > 0 else 1.0)


def effective_size(values: Floats, q: float, limit: float | None = None, *, ordered: Floats | None = None) -> float:
    """Return the number of independent samples that the series is worth for its ``q`` quantile, or for its share up to ``limit``.

    It is the smallest of the numbers at ``q`` (or ``limit``) and at `LEVELS`: if nearly all values are inside, the exceedances are too
    few to show dependence.

    Args:
        ordered: The sorted values, if they exist already.
    """
    if values.size == 0:
        return 0.0
    ordered = np.sort(values) if ordered is None else ordered
    limits = [float(ordered[rank(values.size, level) - 1]) for level in (*LEVELS, q)]
    limits = limits if limit is None else [*limits[:-1], limit]
    return values.size * min(effective_share(over(values, limit)) for limit in limits)


def over(values: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Return which values are above the limit; if the limit is infinite (a quantile among failures), which values are infinite."""
    return values > limit if math.isfinite(limit) else np.isinf(values)


def resolved(values: Floats) -> bool:
    """Return whether the run is long compared with the queue's memory: neighbouring fortieths do not resemble each other.

    If they do, no interval from this run alone is valid: its slow swings were not seen often enough to be measured.
    """
    if values.size < 2 * NUM_PARTS:
        return True  # too few to decide; the intervals of so few values have no upper bound in any tail
    means = _batch_means(np.asarray(law.rankdata(values), dtype=np.float64), NUM_PARTS)
    return lag1(means) < MAX_PART_CORRELATION


def lag1(values: Floats) -> float:
    """Return the correlation of neighbours, -1 <= r <= 1; 0 for a constant series."""
    centred = values - values.mean()
    power = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / power if power > 0 else 0.0


def replicate_interval(runs: Sequence[Floats], q: float, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the quantile of all runs together and its interval: jackknife over the runs, t with R - 1 degrees.

    Args:
        runs: At least two independent runs, each with its own seed and warm-up.
    """
    left_out = [quantile(np.concatenate([*runs[:k], *runs[k + 1 :]]), q) for k in range(len(runs))]
    return jackknife_interval(quantile(np.concatenate(runs), q), np.array(left_out), confidence)


def jackknife_interval(pooled: float, left_out: Floats, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the quantile ``pooled`` of all runs together and its interval, from the quantiles without each run."""
    if not (np.isfinite(left_out).all() and math.isfinite(pooled)):
        return pooled, -math.inf, math.inf
    num = left_out.size
    return pooled, *mean_interval(num * pooled - (num - 1) * left_out, confidence)[1:]


def mean_interval(values: Floats, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the mean of at least two independent values and Student's interval of it."""
    mean = float(values.mean())
    half = float(law.t.ppf((1 + confidence) / 2, values.size - 1)) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return mean, mean - half, mean + half


def rate_interval(batches: Floats, length_s: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a rate per second from the counts in equal parts of ``length_s`` seconds: Student's over the parts.

    A part must hold many requests and last much longer than a request; counts of neighbouring parts then hardly depend on each other.
    The rate must count `MIN_COUNTED` requests or more.
    """
    mean, low, high = mean_interval(batches * batches.size / length_s, confidence)
    return max(0.0, min(low, mean)), high


def rate_ratio_interval(
    a: Floats, b: Floats, *, paired: bool, confidence: float = CONFIDENCE
) -> tuple[float, float, float] | None:
    """Return (total of ``a`` over total of ``b``, and its interval), or None if a total without one part is 0.

    The interval is a jackknife over the parts of the log ratio, as in `loadtest.judge.series.log_ratio`.

    Args:
        a, b: Counts in the same number of equal parts of two windows of one length.
        paired: Part k of both had the same arrivals, so that effects of the schedule cancel.
    """
    left = [total.sum() - total for total in (a, b)]
    if not all((each > 0).all() for each in left):
        return None
    logs = [np.log(each) for each in left]
    parts = [logs[0] - logs[1]] if paired else logs
    variance = sum(float(part.var()) for part in parts) * (a.size - 1)
    middle = math.log(a.sum()) - math.log(b.sum())
    half = float(law.t.ppf((1 + confidence) / 2, a.size - 1)) * math.sqrt(variance)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def dkw_half_width(n_eff: float, confidence: float = CONFIDENCE) -> float:
    """Return the half width of the band that contains the whole CDF (Dvoretzky-Kiefer-Wolfowitz), 0 < w <= 1."""
    return 1.0 if n_eff < 1 else min(1.0, math.sqrt(math.log(2 / (1 - confidence)) / (2 * n_eff)))


def wilson(share: float, n_eff: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's interval of a share seen in ``n_eff`` samples (any real > 0); (0, 1) without samples."""
    if n_eff <= 0:
        return 0.0, 1.0
    z = float(law.norm.ppf((1 + confidence) / 2))
    centre = (share + z * z / (2 * n_eff)) / (1 + z * z / n_eff)
    half = z / (1 + z * z / n_eff) * math.sqrt(share * (1 - share) / n_eff + z * z / (4 * n_eff * n_eff))
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(share: float, n_eff: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's interval of a share, whose upper end is not below the bound of Clopper and Pearson; (0, 1) without samples.

    Wilson's upper end is too low for a share near 1 and few samples: for one sample, over its limit, it is 0.79.
    """
    low, high = wilson(share, n_eff, confidence)
    return low, max(high, share_bound(share * n_eff, n_eff, (1 + confidence) / 2))


def sequential_verdict(n: float, violations: float, q: float, confidence: float = 0.99) -> str:
    """Return ``pass``, ``fail`` or ``undecided`` for "a share >= q of all requests is inside", after ``violations`` of ``n``.

    ``n`` and ``violations`` may be effective sizes (real). With 0.99 and at most four looks at a growing sample, a share that lies
    exactly at q passes in under 5 % of the searches (measured in the tests); 0.95 with four looks: 11 %.
    """
    if n <= 0:
        return "undecided"
    if violations < n and special.betainc(n - violations, violations + 1, q) <= 1 - confidence:
        return "pass"
    if violations > 0 and special.betainc(violations, n - violations + 1, 1 - q) <= 1 - confidence:
        return "fail"
    return "undecided"


def samples_to_pass(violations: int, q: float, confidence: float = 0.99) -> int:
    """Return the smallest n at which ``violations`` still pass: I(q; n - t, t + 1) <= 1 - c."""
    low, high = violations, violations + 1
    while sequential_verdict(high, violations, q, confidence) != "pass":
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sequential_verdict(middle, violations, q, confidence) == "pass" else (middle, high)
    return high


def mser5(values: Floats) -> int:
    """Return the number of leading values to drop so that the mean of the rest has the smallest error (MSER-5); at most half.

    Source: White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69 (1997).
    """
    num = values.size // 5
    if num < 4:
        return 0
    means = values[: num * 5].reshape(num, 5).mean(axis=1)
    left = np.arange(num, 0, -1)
    sums, squares = means[::-1].cumsum()[::-1], (means**2)[::-1].cumsum()[::-1]
    error = (squares - sums**2 / left) / left**2
    return 5 * int(np.argmin(error[: num // 2 + 1]))


def transient_length(values: Floats) -> int:
    """Return `mser5` of the ranks if the part before it truly differs from the rest, otherwise 0.

    MSER alone drops 5-40 % of a stationary queue's samples. Ranks are used so that one outlier or failed request (inf) does not decide.
    The difference must be 4 standard errors, by the variance of batch means, because the cut point was chosen to make it large.
    """
    ranks = np.asarray(law.rankdata(values), dtype=np.float64) if values.size else values
    cut = mser5(ranks)
    rest = ranks[cut:]
    if cut < 2 * NUM_BATCHES or rest.size < 2 * NUM_BATCHES:
        return 0  # a few outliers at the start prove nothing
    variance = max(float(_batch_means(rest, NUM_BATCHES).var(ddof=1)) * (rest.size // NUM_BATCHES), float(rest.var()))
    error = math.sqrt(variance * (1 / cut + 1 / rest.size))
    return cut if abs(float(ranks[:cut].mean() - rest.mean())) > 4 * error else 0


def drift_interval(at: Floats, values: Floats, confidence: float = 0.99) -> tuple[float, float]:
    """Return the change of ``values`` from the first to the last ``at``, as an interval, by a straight line through batch means.

    The scatter of the batches around the line gives its error, widened by the remaining correlation between neighbours.
    """
    x, y = _batch_means(at, NUM_BATCHES), _batch_means(values, NUM_BATCHES)
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    left = y - slope * x
    error = math.sqrt(float(left @ left) / (NUM_BATCHES - 2) / float(x @ x))
    r = min(0.9, max(0.0, lag1(left)))
    half = float(law.t.ppf((1 + confidence) / 2, NUM_BATCHES - 2)) * error * math.sqrt((1 + r) / (1 - r))
    span = float(at[-1] - at[0])
    return (slope - half) * span, (slope + half) * span


def little_gap(begin: Floats, end: Floats, window: tuple[float, float]) -> float:
    """Return (N - rate x time) / N over the window, from the begins and ends of requests; above 0 for a shrinking backlog."""
    low, high = window
    overlap = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0.0, None).sum()
    inside = (begin >= low) & (begin < high)
    return float((overlap - (end - begin)[inside].sum()) / overlap) if overlap > 0 else 0.0


def decreasing_fit(shares: Floats, weights: Floats) -> Floats:
    """Return the weighted least-squares fit that never rises; the shares are in the order of rising rates."""
    return np.asarray(optimize.isotonic_regression(shares, weights=weights, increasing=False).x, dtype=np.float64)


def breakpoint_of(x: Floats, y: Floats, confidence: float = 0.99) -> float | None:
    """Return the x at which two connected straight lines fit best (segmented regression), None unless y rises faster beyond it.

    The two lines must fit better than one by an F test, and have two values of x on either side. Any order; at least six points.
    Source: Muggeo, "Estimating regression models with unknown break-points", Statistics in Medicine 22 (2003). Differs: a grid.
    """
    levels, free = np.unique(x), x.size - 4  # four parameters: two connected lines
    if levels.size < 4 or free < 2:
        return None
    line = np.column_stack([np.ones_like(x), x])

    def fit(design: Floats) -> tuple[float, float]:
        found = np.linalg.lstsq(design, y, rcond=None)[0]
        return float(((y - design @ found) ** 2).sum()), float(found[-1])

    breaks = np.linspace(levels[1], levels[-2], 201)
    fits = [(*fit(np.column_stack([line, np.maximum(0.0, x - at)])), float(at)) for at in breaks]
    error, bend, best = min(fits)
    gained, noise = fit(line)[0] - error, max(error, 1e-12 * float(y @ y))
    return best if bend > 0 and law.f.sf(gained / 2 / (noise / free), 2, free) < 1 - confidence else None


@dataclass(frozen=True)
class ArrivalTests:
    """Tests with small p-values if the process is not Poisson with the expected rate."""

    gaps_p: float
    """Kolmogorov-Smirnov of the gaps against the exponential law."""
    dispersion: float
    """Variance over mean of counts in bins with an expected ``per_bin`` each; 1 for a Poisson process."""
    dispersion_p: float
    lag1: float
    lag1_p: float
    """p-value of the correlation between the ranks of neighbouring gaps."""


def arrival_tests(passed: Floats, *, per_bin: float = 20.0) -> ArrivalTests:
    """Test arrivals given as expected counts: ``passed`` is the integral of the law's rate up to each arrival, ascending.

    So every inhomogeneous Poisson law becomes the unit law (time rescaling). Use at least 50 arrivals and five bins.
    """
    gaps = np.diff(passed, prepend=0.0)
    num_bins = max(2, int(passed[-1] / per_bin))
    counts = np.histogram(passed, bins=num_bins, range=(0.0, num_bins * per_bin))[0]
    dispersion = float(counts.var(ddof=1) / counts.mean())
    tail = float(law.chi2.cdf(dispersion * (num_bins - 1), num_bins - 1))
    r = lag1(np.asarray(law.rankdata(gaps), dtype=np.float64))
    return ArrivalTests(
        gaps_p=float(law.kstest(gaps, "expon").pvalue),
        dispersion=dispersion,
        dispersion_p=2 * min(tail, 1 - tail),
        lag1=r,
        lag1_p=float(2 * law.norm.sf(abs(r) * math.sqrt(gaps.size))),
    )
