"""This module computes intervals that hold for latencies of a queue, tests of steadiness and arrival laws, and a sequential pass rule.

Pure: arrays in, numbers out; a generator of random numbers is made here from a seed where one is needed (Philox). Latencies come in
the order of their due times; a failed request is ``inf``. Latencies of one run depend on each other, so that the textbook interval
of a percentile covers the truth in 5-50 % of the runs near the knee. What is done instead, and how often that covers the truth, is
measured by `loadtest.proof.coverage`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special
from scipy import stats as law

from loadtest.quantiles import Floats as Floats  # one import for those who need statistics, too
from loadtest.quantiles import Ordered as Ordered
from loadtest.quantiles import quantile as quantile
from loadtest.quantiles import rank as rank

CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
"""Of every distribution."""
NUM_BATCHES = 10
"""Few and long: a batch must hold many relaxation times of the queue. 20 and 30 batches cover up to 15 points less near the knee."""
MIN_COUNTED = 20
"""Requests that a rate must count to have an interval. So few are skewed, and Student's interval over their parts is too narrow."""
LEVELS = (0.5, 0.9)
"""Where dependence is measured beside the asked percentile: exceedances of a p99 alone are too rare to show it."""
NUM_PARTS = 40
MAX_PART_CORRELATION = 0.4
"""Of neighbouring fortieths of a run; independent samples exceed it in under 1 % of the runs. A guard, no cure: of M/M/32 at rho
0.95 and 2000 requests, about one relaxation time, 7 % of the runs pass it (with twentieths 21 %), and those are the lucky ones
whose median is wrong. No rule inside one run can tell them; replicates can."""
_WIDEN = float(law.norm.ppf(0.975) / law.t.ppf(0.975, NUM_BATCHES - 1)) ** 2


def order_ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Return the ranks between which the quantile of ``n`` independent samples lies; None: no sample bounds it on that side."""
    if n < 1:
        return None, None
    tail = (1 - confidence) / 2
    low, high = int(law.binom.ppf(tail, n, q)), int(law.binom.ppf(1 - tail, n, q)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def order_interval(low: Ordered, high: Ordered, q: float, n_eff: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the quantile as if ``n_eff`` of the samples were independent.

    Args:
        low, high: Sorted bounds of each latency; they differ where a request was given up (at least so long, perhaps never).
    """
    n = low.size
    n_indep = int(min(n_eff, n))
    at_low, at_high = order_ranks(n_indep, q, confidence)
    lower = -math.inf if at_low is None else float(low[max(0, math.floor(at_low / n_indep * n) - 1)])
    upper = math.inf if at_high is None else float(high[min(n, math.ceil(at_high / n_indep * n)) - 1])
    return lower, upper


def share_bound(num: float, n: float, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided upper bound (Clopper-Pearson) of the share of which ``num`` of ``n`` independent samples were seen.

    Both may be effective sizes (real).
    """
    return 1.0 if num >= n else float(law.beta.ppf(confidence, num + 1, n - num))


def _batch_means(values: Floats, num: int) -> Floats:
    size = values.size // num
    return np.asarray(values[values.size - size * num :].reshape(num, size).mean(axis=1))


def effective_share(inside: npt.NDArray[np.bool_]) -> float:
    """Return the independent samples per sample of an indicator series, in (0, 1]: by the variance of its batch means.

    It is lowered by (z/t)^2, so that an interval made with z and this size is as wide as one with t and the batches' own variance.
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
    """Return how many independent samples the series is worth for its ``q`` quantile, or for its share up to ``limit``.

    It is the smallest at ``q`` (or ``limit``) and at `LEVELS`: where nearly all are inside, exceedances are too few to tell.

    Args:
        ordered: The values sorted, where they already are.
    """
    if values.size == 0:
        return 0.0
    ordered = np.sort(values) if ordered is None else ordered
    limits = [float(ordered[rank(values.size, level) - 1]) for level in (*LEVELS, q)]
    limits = limits if limit is None else [*limits[:-1], limit]
    return values.size * min(effective_share(over(values, limit)) for limit in limits)


def over(values: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Return which values are above the limit; of an infinite limit which are infinite, for a quantile that lies among failures."""
    return values > limit if math.isfinite(limit) else np.isinf(values)


def resolved(values: Floats) -> bool:
    """Return whether the run is long beside the queue's memory: neighbouring fortieths do not resemble each other.

    If they do, no interval from this run alone is honest: its slow swings have not been seen often enough to be measured.
    """
    if values.size < 2 * NUM_PARTS:
        return True  # too few to tell; intervals of so few have no upper bound at any tail
    means = _batch_means(np.asarray(law.rankdata(values), dtype=np.float64), NUM_PARTS)
    return lag1(means) < MAX_PART_CORRELATION


def lag1(values: Floats) -> float:
    """Return the correlation of neighbours, -1 <= r <= 1; 0 of a constant series."""
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
    """Return the quantile ``pooled`` of all runs together and its interval, from the quantiles without each of the runs."""
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

    A part must hold many requests and last long beside one; counts of neighbouring parts then hardly depend on each other. It is
    for rates that count `MIN_COUNTED` requests or more.
    """
    mean, low, high = mean_interval(batches * batches.size / length_s, confidence)
    return max(0.0, min(low, mean)), high


def rate_ratio_interval(
    a: Floats, b: Floats, *, paired: bool, confidence: float = CONFIDENCE
) -> tuple[float, float, float] | None:
    """Return (total of ``a`` over total of ``b``, and its interval), or None where a total without one part is 0.

    A jackknife over the parts of the log ratio, as `loadtest.judge.series.log_ratio`.

    Args:
        a, b: Counts in as many equal parts of two windows of one length.
        paired: Part k of both had the same arrivals, so that what the schedule does to both cancels.
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
    """Return the half width of the band that holds the whole CDF (Dvoretzky-Kiefer-Wolfowitz), 0 < w <= 1."""
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

    Wilson's upper end is too low for a share near 1 and few samples: of one sample that is over its limit it is 0.79.
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
    """Return the smallest n at which so many violations still pass: I(q; n - t, t + 1) <= 1 - c."""
    low, high = violations, violations + 1
    while sequential_verdict(high, violations, q, confidence) != "pass":
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sequential_verdict(middle, violations, q, confidence) == "pass" else (middle, high)
    return high


def mser5(values: Floats) -> int:
    """Return how many leading values to drop so that the mean of the rest is known best (MSER-5); at most half of them.

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
    """Return `mser5` of the ranks where the part before it truly differs from the rest, otherwise 0.

    MSER alone drops 5-40 % of a stationary queue's samples. Ranks: one outlier or a failed request (inf) does not decide.
    The difference must be 4 standard errors, with a variance of batch means, for the cut point was chosen to make it large.
    """
    ranks = np.asarray(law.rankdata(values), dtype=np.float64) if values.size else values
    cut = mser5(ranks)
    rest = ranks[cut:]
    if cut < 2 * NUM_BATCHES or rest.size < 2 * NUM_BATCHES:
        return 0  # a few odd ones at the start prove nothing
    variance = max(float(_batch_means(rest, NUM_BATCHES).var(ddof=1)) * (rest.size // NUM_BATCHES), float(rest.var()))
    error = math.sqrt(variance * (1 / cut + 1 / rest.size))
    return cut if abs(float(ranks[:cut].mean() - rest.mean())) > 4 * error else 0


def drift_interval(at: Floats, values: Floats, confidence: float = 0.99) -> tuple[float, float]:
    """Return the change of ``values`` from the first to the last ``at``, as an interval: a straight line through batch means.

    The batches' own scatter around the line gives its error, widened by the correlation that is left between neighbours.
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
    """Return (N - rate x time) / N over the window, from the times at which requests came and went: above 0 a shrinking backlog."""
    low, high = window
    overlap = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0.0, None).sum()
    inside = (begin >= low) & (begin < high)
    return float((overlap - (end - begin)[inside].sum()) / overlap) if overlap > 0 else 0.0


def decreasing_fit(shares: Floats, weights: Floats) -> Floats:
    """Return the weighted least-squares fit that never rises. In the order of rising rates."""
    return np.asarray(optimize.isotonic_regression(shares, weights=weights, increasing=False).x, dtype=np.float64)


def breakpoint_of(x: Floats, y: Floats, confidence: float = 0.99) -> float | None:
    """Return the x at which two straight lines that meet fit best (segmented regression), None unless y rises faster beyond it.

    It must fit better than one line by an F test, and have two values of x on either side. Any order; at least six points.
    Source: Muggeo, "Estimating regression models with unknown break-points", Statistics in Medicine 22 (2003). Differs: a grid.
    """
    levels, free = np.unique(x), x.size - 4  # four parameters: two lines that meet
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
    """p-values that are small where the process is not Poisson of the rate it should have."""

    gaps_p: float
    """Kolmogorov-Smirnov of the gaps against the exponential law."""
    dispersion: float
    """Variance over mean of counts in bins that should hold ``per_bin`` each; 1 of a Poisson process."""
    dispersion_p: float
    lag1: float
    lag1_p: float
    """Of the ranks of neighbouring gaps."""


def arrival_tests(passed: Floats, *, per_bin: float = 20.0) -> ArrivalTests:
    """Test arrivals given as expected counts: ``passed`` is the integral of the law's rate up to each arrival, ascending.

    So every inhomogeneous Poisson law becomes the unit one (time rescaling). At least 50 arrivals and five bins make sense.
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
