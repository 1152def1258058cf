"""The search finds the highest rate that keeps an SLO: a state machine that asks for probes and is given their counts. Pure.

A probe is a run at one rate with its own seed. Each rate is judged by the sequential rule of `stats.sequential_verdict` after at
most four looks: pass, fail, or undecided, which demands more requests. The rate doubles until it fails. Bisection of its logarithm
then separates pass from undecided, and undecided from fail. The winner is confirmed with fresh seeds, as is a rate 5 % above it. The
rate at which the share of good requests crosses its quantile gets an interval from all probes: isotonic fit and bootstrap over probes.
"""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from loadtest.judge.stats import Floats, decreasing_fit, samples_to_pass, sequential_verdict

Verdict = Literal["pass", "fail", "undecided"]
Purpose = Literal["search", "confirm"]

NUM_LOOKS = 4
NUM_DRAWS = 1000


class Ask(msgspec.Struct, frozen=True):
    """The probe to run next."""

    rate: float
    num_requests: int
    """Requests in the measured window; those of the warm-up come in addition."""
    seed: int
    purpose: Purpose


class Probe(msgspec.Struct, frozen=True):
    """The result of an `Ask`. ``counts`` has, per limit, the independent samples and those over it (`LimitResult.counts`)."""

    ask: Ask
    counts: tuple[tuple[float, float], ...]
    steady: bool = True
    """False for a growing backlog, which cannot pass however few requests are over the limit so far."""
    valid: bool = True
    """False if the generator was sick, or the probe was stopped; the counts are then meaningless."""
    reason: str = ""
    """Why the probe is not valid."""


class RateResult(msgspec.Struct, frozen=True):
    """All probes of one rate together."""

    rate: float
    verdict: Verdict
    shares: list[float]
    """Shares of good requests, per limit."""


class Capacity(msgspec.Struct, frozen=True):
    """The highest rate that keeps the SLO, in requests/s: best estimate and 95 % interval. None: outside the tried rates."""

    rate: float | None
    low: float | None
    high: float | None
    winner: float | None
    """Highest rate that passed."""
    confirmed: bool
    """The winner passed with fresh seeds, and the rate 5 % above it did not."""
    generator_limited: bool
    """The generator was sick at a rate that the target might have kept: the capacity may be higher."""
    rates: list[RateResult]
    probes: list[Probe]
    ended: str = ""
    """Why the search ended before it was done."""


@dataclass(frozen=True)
class SearchSettings:
    """The effort of a search. ``quantiles`` has the quantile of each limit of the SLO."""

    start_rate: float
    quantiles: tuple[float, ...]
    step: float = 0.03
    """Bisect until neighbouring rates differ by this share."""
    max_requests: int = 20_000
    """Most requests per rate, over all looks."""
    max_rate: float = 100_000.0
    num_confirm: int = 5
    max_probes: int = 80
    seed: int = 1

    def looks(self) -> list[int]:
        """Return the wanted independent samples at each look, ascending: from 2 to 20 allowed violations at the highest quantile."""
        first, last = (samples_to_pass(t, max(self.quantiles)) for t in (2, 20))
        return [math.ceil(first * (last / first) ** (k / (NUM_LOOKS - 1))) for k in range(NUM_LOOKS)]


class Search:
    """A search: call `next_rate`, run the probe, `add` its result, until `next_rate` returns None. The state is the list of probes."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._looks = settings.looks()
        self.probes: list[Probe] = []

    def add(self, probe: Probe) -> None:
        if len(probe.counts) != len(self._settings.quantiles):
            raise ValueError(f"{len(probe.counts)} counts for {len(self._settings.quantiles)} limits")
        self.probes.append(probe)

    def next_rate(self) -> Ask | None:
        """Return the next probe, or None if further probes would not improve `result`."""
        if not self.probes:
            return self._ask(self._settings.start_rate, "search")
        if len(self.probes) >= self._settings.max_probes:
            return None
        last = self.probes[-1].ask
        if last.purpose == "search" and self._wants_more(last.rate):
            return self._ask(last.rate, "search")
        top = max(self._rates())
        if not any(self.verdict(rate) == "fail" or self._is_sick(rate) for rate in self._rates()):
            return self._ask(top * 2, "search") if top * 2 <= self._settings.max_rate else None
        low, high = self._bracket()
        assert high is not None  # one failed
        if low is None:
            return self._ask(high / 2, "search") if high > self._settings.start_rate / 1000 else None
        for below, above in ((low, high), self._last_undecided()):
            if above / below > 1 + self._settings.step:
                return self._ask(math.sqrt(below * above), "search")
        for rate in (low, low * 1.05):
            if len(self._valid(rate, "confirm")) < self._settings.num_confirm and not self._is_sick(rate):
                return self._ask(rate, "confirm")
        return None

    def verdict(self, rate: float) -> Verdict:
        """Judge the rate by the probes of the search; a failed confirmation overrides them."""
        if self._confirmation(rate) == "fail":
            return "fail"
        return self._judge(self._valid(rate, "search"))

    def result(self) -> Capacity:
        """Return the capacity as known so far."""
        low, high = self._bracket()
        rate, interval = self._crossing()
        return Capacity(
            rate=rate,
            low=interval[0],
            high=interval[1],
            winner=low,
            confirmed=low is not None
            and self._confirmation(low) == "pass"
            and self._confirmation(low * 1.05) in ("fail", "undecided"),
            generator_limited=high is not None and self._is_sick(high),
            rates=[RateResult(rate, self.verdict(rate), self._shares(rate)) for rate in self._rates()],
            probes=list(self.probes),
        )

    def _rates(self) -> list[float]:
        return sorted({probe.ask.rate for probe in self.probes})

    def _valid(self, rate: float, purpose: Purpose | None = None) -> list[Probe]:
        return [p for p in self.probes if p.valid and p.ask.rate == rate and purpose in (None, p.ask.purpose)]

    def _is_sick(self, rate: float) -> bool:
        """Return whether the generator failed to make this rate twice."""
        return sum(not p.valid for p in self.probes if p.ask.rate == rate) >= 2

    def _totals(self, probes: list[Probe]) -> list[tuple[float, float]]:
        return [
            (sum(p.counts[k][0] for p in probes), sum(p.counts[k][1] for p in probes))
            for k in range(len(self._settings.quantiles))
        ]

    def _judge(self, probes: list[Probe]) -> Verdict:
        verdicts = {
            sequential_verdict(n, over, q) for (n, over), q in zip(self._totals(probes), self._settings.quantiles, strict=True)
        }
        if "fail" in verdicts:
            return "fail"
        steady = sum(p.steady for p in probes) * 2 > len(probes)
        return "pass" if verdicts == {"pass"} and steady else "undecided"

    def _confirmation(self, rate: float) -> Verdict | None:
        probes = self._valid(rate, "confirm")
        return self._judge(probes) if len(probes) >= self._settings.num_confirm else None

    def _bracket(self) -> tuple[float | None, float | None]:
        """Return the highest rate that passed below the lowest that failed, and the next higher rate, which did not pass."""
        tried = {rate: self.verdict(rate) for rate in self._rates() if self._valid(rate, "search") or self._is_sick(rate)}
        ends = [rate for rate, verdict in tried.items() if verdict == "fail" or self._is_sick(rate)]
        passed = [rate for rate, verdict in tried.items() if verdict == "pass" and rate < min(ends, default=math.inf)]
        low = max(passed, default=None)
        return low, min((rate for rate in tried if low is None or rate > low), default=None)

    def _last_undecided(self) -> tuple[float, float]:
        """Return the lowest rate that failed, and before it the next lower rate: between the two the share of good requests drops."""
        above = min(rate for rate in self._rates() if self.verdict(rate) == "fail" or self._is_sick(rate))
        return max((rate for rate in self._rates() if rate < above), default=above), above

    def _wants_more(self, rate: float) -> bool:
        if self._is_sick(rate):
            return False
        probes = self._valid(rate, "search")
        used = sum(p.ask.num_requests for p in probes)
        return self._judge(probes) == "undecided" and len(probes) < NUM_LOOKS and used < self._settings.max_requests

    def _ask(self, rate: float, purpose: Purpose) -> Ask:
        probes = self._valid(rate, "search")
        used = sum(p.ask.num_requests for p in probes)
        n_eff = min((n for n, _ in self._totals(probes)), default=0.0) if probes else 0.0
        # Requests per independent sample at this rate, at most twenty.
        per_sample = min(20.0, max(1.0, used / n_eff)) if n_eff > 0 else 1.0
        if purpose == "confirm":
            num = self._looks[-1] * per_sample / self._settings.num_confirm
        else:
            num = (self._looks[min(len(probes), NUM_LOOKS - 1)] - n_eff) * per_sample
            num = min(num, self._settings.max_requests - used)
        return Ask(rate, max(math.ceil(num), 100), self._settings.seed + len(self.probes), purpose)

    def _shares(self, rate: float) -> list[float]:
        return [1 - over / n if n > 0 else 0.0 for n, over in self._totals(self._valid(rate))]

    def _crossing(self) -> tuple[float | None, tuple[float | None, float | None]]:
        """Return the rate at which the fitted share crosses its quantile, and the interval of that rate over bootstrap draws.

        A draw weighs each probe at random (Bayesian bootstrap) and draws its share from the posterior of its counts (Jeffreys). Between
        two neighbouring rates nothing is known: the interval extends from the lower rate in the low draws to the upper in the high draws.
        """
        probes = [p for p in self.probes if p.valid and all(n > 0 for n, _ in p.counts)]
        if not probes:
            return None, (None, None)
        rates = np.array([p.ask.rate for p in probes])
        n, over = (np.array([[c[i] for c in p.counts] for p in probes]) for i in (0, 1))
        rng = np.random.Generator(np.random.Philox(self._settings.seed))
        ends = []
        for _ in range(NUM_DRAWS):
            shares = rng.beta(n - over + 0.5, over + 0.5)
            ends.append(self._neighbours(rates, shares, n * rng.exponential(size=(rates.size, 1))))
        best = self._neighbours(rates, 1 - over / n, n)
        low = float(np.quantile([e[0] for e in ends], 0.025, method="inverted_cdf"))
        high = float(np.quantile([e[1] for e in ends], 0.975, method="inverted_cdf"))
        return best[2] or None, (low or None, high if math.isfinite(high) else None)

    def _neighbours(self, rates: Floats, shares: Floats, weights: Floats) -> tuple[float, float, float]:
        """Return the rates around the crossing, and the crossing, of the limit that is crossed first. 0: below all rates."""
        found = []
        levels, index = np.unique(rates, return_inverse=True)
        for k, q in enumerate(self._settings.quantiles):
            total = np.bincount(index, weights[:, k]).astype(np.float64)
            fit = decreasing_fit(np.bincount(index, weights[:, k] * shares[:, k]) / total, total)
            num_good = int((fit >= q).sum())
            below = float(levels[num_good - 1]) if num_good else 0.0
            above = float(levels[num_good]) if num_good < levels.size else math.inf
            inside = below
            if below > 0 and above < math.inf:
                part = (fit[num_good - 1] - q) / (fit[num_good - 1] - fit[num_good])
                inside = below * (above / below) ** float(part)
            found.append((below, above, inside))
        return min(found)
