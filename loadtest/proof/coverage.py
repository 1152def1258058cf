"""This module measures how often the intervals of `loadtest.judge.stats` hold the truth, on queues with closed forms. Pure.

``python -m loadtest.proof.selftest coverage`` prints the table. An interval without an upper bound counts as covering if its lower bound is
right, and a refused interval always does, so the table also has the share of two-sided intervals: near the knee one run can show little.
"""

import heapq
import math
from collections.abc import Iterator

import msgspec
import numpy as np
from scipy import optimize
from scipy import stats as law

from loadtest.judge import stats
from loadtest.judge.stats import Floats
from loadtest.wording import percentile

QUANTILES = (0.5, 0.9, 0.99)


class Queue(msgspec.Struct, frozen=True):
    """An M/M/c queue with service times of mean 1; ``servers`` 0: independent lognormal latencies without a queue."""

    servers: int
    load: float

    def __str__(self) -> str:
        return f"M/M/{self.servers} rho {self.load:g}" if self.servers else "lognormal i.i.d."

    def latencies(self, n: int, rng: np.random.Generator) -> Floats:
        """Return the time in the system of ``n`` customers in the order of arrival, in the steady state."""
        if not self.servers:
            return rng.lognormal(0.0, 1.0, n)
        # Fifteen relaxation times from an empty queue; each is 1 / (1 - sqrt(rho))^2 service times of one server.
        warmup = math.ceil(15 * self.load / (1 - math.sqrt(self.load)) ** 2) + 20 * self.servers
        gaps = rng.exponential(1 / (self.load * self.servers), n + warmup)
        return fifo(np.cumsum(gaps), rng.exponential(1.0, n + warmup), self.servers)[warmup:]

    def wait_probability(self) -> float:
        """Return Erlang's C. A positive wait is exponential with rate servers x (1 - load)."""
        terms = law.poisson.pmf(np.arange(self.servers + 1), self.load * self.servers)
        last = float(terms[-1]) / (1 - self.load)
        return last / (float(terms[:-1].sum()) + last)

    def quantile(self, q: float) -> float:
        """Return the quantile in the steady state."""
        if not self.servers:
            return float(law.lognorm.ppf(q, 1.0))
        waits, drain = self.wait_probability(), self.servers * (1 - self.load)

        def over(t: float) -> float:
            # The sum of wait and service; for two exponentials of the same rate take the limit of the formula.
            rate = drain if abs(drain - 1) > 1e-6 else 1 + 1e-6
            both = (rate * math.exp(-t) - math.exp(-rate * t)) / (rate - 1)
            return (1 - waits) * math.exp(-t) + waits * both - (1 - q)

        return float(optimize.brentq(over, 0.0, 1e6))


def fifo(arrivals: Floats, services: Floats, servers: int) -> Floats:
    """Return each customer's time in the system in a first-come-first-served queue with ``servers`` servers that starts empty."""
    free_at = [0.0] * servers
    took = np.empty(arrivals.size)
    for k, (at, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        end = max(free_at[0], at) + service
        heapq.heapreplace(free_at, end)
        took[k] = end - at
    return took


class Coverage(msgspec.Struct, frozen=True):
    """The coverage of one method at one percentile of one queue."""

    queue: str
    n: int
    q: float
    method: str
    covered: float
    """Share of the runs whose interval contained the truth; 0.95 is promised."""
    two_sided: float
    """Share of the runs that had both bounds."""
    right: float | None
    """Share of those two-sided intervals that contained the truth; None if there was none. Refusals alone cannot raise it."""
    num_runs: int


CASES = tuple(
    (Queue(c, load), n) for c, load in ((0, 0.0), (1, 0.5), (1, 0.8), (32, 0.8), (32, 0.9), (32, 0.95)) for n in (2000, 10_000)
)


def coverage_table(
    num_runs: int, *, cases: tuple[tuple[Queue, int], ...] = CASES, replicates: int = 0, seed: int = 1
) -> list[Coverage]:
    """Measure each method ``num_runs`` times and, unless ``replicates`` is 0, the interval of that many replicates as often."""
    return [row for queue, n in cases for row in _rows(queue, n, num_runs, replicates, seed)]


def _rows(queue: Queue, n: int, num_runs: int, replicates: int, seed: int) -> Iterator[Coverage]:
    seen: dict[tuple[float, str], list[tuple[bool, bool]]] = {}
    truths = {q: queue.quantile(q) for q in QUANTILES}
    for run in range(num_runs):
        rng = np.random.Generator(np.random.Philox([seed, run]))
        runs = [queue.latencies(n, rng) for _ in range(max(1, replicates))]
        resolved = stats.resolved(runs[0])
        for q, truth in truths.items():
            for method, low, high in _intervals(runs, q, resolved):
                seen.setdefault((q, method), []).append((low <= truth <= high, math.isfinite(high - low)))
    for (q, method), hits in seen.items():
        covered, two_sided = np.array(hits).T
        right = float(covered[two_sided].mean()) if two_sided.any() else None
        yield Coverage(str(queue), n, q, method, float(covered.mean()), float(two_sided.mean()), right, num_runs)


def _intervals(runs: list[Floats], q: float, resolved: bool) -> Iterator[tuple[str, float, float]]:
    values = runs[0]
    ordered = np.sort(values)
    yield "i.i.d. order statistics", *stats.order_interval(ordered, ordered, q, values.size)
    low, high = stats.order_interval(ordered, ordered, q, stats.effective_size(values, q))
    yield "at n_eff", low, high
    yield "at n_eff, unresolved refused", *((low, high) if resolved else (-math.inf, math.inf))
    if len(runs) > 1:
        yield f"{len(runs)} replicates", *stats.replicate_interval(runs, q)[1:]


GOOD = 0.9
"""Share of the requests inside the limit of the simulated goodput."""


class RateCoverage(msgspec.Struct, frozen=True):
    """Shares of runs in which the interval of a rate contained the true rate, and that of the ratio of two runs of one load contained 1."""

    rate: str
    """``completed`` or ``goodput``."""
    queue: str
    n: int
    covered: float
    ratio_covered: float
    num_runs: int


def rate_coverage(num_runs: int, *, cases: tuple[tuple[Queue, int], ...], seed: int = 1) -> list[RateCoverage]:
    """Measure the intervals of completed requests and of goodput per second on queues whose rates are known.

    In a mean service time, ``load`` x ``servers`` requests arrive and complete. The limit of the goodput is the closed form of the
    time in the system below which a share `GOOD` of the requests stays.
    """
    return [row for queue, n in cases for row in _rate_rows(queue, n, num_runs, seed)]


def _rate_rows(queue: Queue, n: int, num_runs: int, seed: int) -> Iterator[RateCoverage]:
    rate, limit = queue.load * queue.servers, queue.quantile(GOOD)
    length, truths = n / rate, {"completed": rate, "goodput": GOOD * rate}
    hits: dict[str, list[tuple[bool, bool]]] = {name: [] for name in truths}
    for run in range(num_runs):
        rng = np.random.Generator(np.random.Philox([seed, run]))
        counts, others = (_counts(queue, length, limit, rng) for _ in range(2))
        for name, truth in truths.items():
            low, high = stats.rate_interval(counts[name], length)
            ratio = stats.rate_ratio_interval(counts[name], others[name], paired=False)
            hits[name].append((low <= truth <= high, ratio is not None and ratio[1] <= 1 <= ratio[2]))
    for name, seen in hits.items():
        covered, ratio_covered = np.array(seen).mean(axis=0).tolist()
        yield RateCoverage(name, str(queue), n, covered, ratio_covered, num_runs)


def _counts(queue: Queue, length: float, limit: float, rng: np.random.Generator) -> dict[str, Floats]:
    """Return each rate's counts in the parts of the window of a run that starts empty. The warm-up is as long as the window.

    Completed requests count at their end, good requests at their arrival, as in `loadtest.judge.analysis.rate_counts`.
    """
    rate = queue.load * queue.servers
    arrivals = np.cumsum(rng.exponential(1 / rate, int(2.2 * rate * length) + 100))
    took = fifo(arrivals, rng.exponential(1.0, arrivals.size), queue.servers)
    edges = np.linspace(length, 2 * length, stats.NUM_BATCHES + 1)
    counted = {"completed": arrivals + took, "goodput": arrivals[took <= limit]}
    return {name: np.histogram(at, bins=edges)[0].astype(np.float64) for name, at in counted.items()}


def print_table(rows: list[Coverage]) -> None:
    """Print the rows as a Markdown table."""
    print("| queue | n | percentile | method | covered | two-sided | of those right | runs |\n|---|---|---|---|---|---|---|---|")
    for r in rows:
        right = "-" if r.right is None else f"{r.right:.0%}"
        print(
            f"| {r.queue} | {r.n} | {percentile(r.q)} | {r.method} | {r.covered:.1%} | {r.two_sided:.0%} | {right} | {r.num_runs} |"
        )
