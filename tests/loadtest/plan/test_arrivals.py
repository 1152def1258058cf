"""These tests (T6) check that each law is as named, after the times passed through the law's own cumulated rate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import stats

from loadtest.errors import UsageError
from loadtest.plan.arrivals import due_times
from loadtest.plan.laws import Arrival

DURATION_S = 900.0
MILLISECONDS = np.arange(0.0, DURATION_S, 1e-3) + 0.5e-3

Array = NDArray[np.floating[Any]]
ARRIVAL: TypeAdapter[Arrival] = TypeAdapter(Arrival)


def law(name: str, **values: Any) -> Any:
    return ARRIVAL.validate_python({"law": name, **values})


def flash(t: Array) -> Array:
    return np.interp(t, [0, 200, 220, 400, 500, 900], [5, 5, 40, 40, 5, 5])


VARYING: dict[str, tuple[Arrival, Callable[[Array], Array]]] = {
    "poisson": (law("poisson", rate=20), lambda t: np.full_like(t, 20.0)),
    "on-off": (law("on-off", rate=30, off_rate=3, on_s=20, off_s=10), lambda t: np.where(t % 30 < 20, 30.0, 3.0)),
    "ramp": (law("ramp", rate=1, to_rate=39), lambda t: 1 + 38 * t / DURATION_S),
    "ramp down": (law("ramp", rate=39, to_rate=1), lambda t: 39 - 38 * t / DURATION_S),
    "step": (law("step", rate=10, to_rate=30, at_s=300), lambda t: np.where(t < 300, 10.0, 30.0)),
    "flash-crowd": (law("flash-crowd", rate=5, peak_rate=40, at_s=200, rise_s=20, hold_s=180, fall_s=100), flash),
    "diurnal": (law("diurnal", rate=20, amplitude=1, period_s=400), lambda t: 20 * (1 - np.cos(2 * np.pi * t / 400))),
}


def unit_times(times: Array, rate: Callable[[Array], Array]) -> Array:
    """Time rescaling, by a sum over steps of a millisecond: if the law holds, these are a Poisson process of rate 1."""
    cumulated = np.cumsum(np.append(0.0, rate(MILLISECONDS) * 1e-3))
    rescaled: Array = np.interp(times, np.append(0.0, MILLISECONDS + 0.5e-3), cumulated)
    return rescaled


def dispersion(times: Array, window: float) -> tuple[float, int]:
    counts = np.histogram(times, np.arange(0, times[-1] + 1e-9, window))[0]
    return float(counts.var(ddof=1) / counts.mean()), counts.size


def lag_1(gaps: Array) -> float:
    return float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])


def against_poisson(times: Array, *, rate: float = 1.0) -> list[str]:
    """Name the tests, each of 0.2 % error, that say that this is no Poisson process."""
    found = []
    gaps = np.diff(times, prepend=0.0) * rate
    if stats.kstest(gaps, "expon").pvalue < 0.002:
        found.append("gaps")
    if abs(lag_1(gaps)) > 3.1 / gaps.size**0.5:
        found.append("lag 1")
    for expected in (20, 200):  # counts per window; seconds 1 and 10 at 20/s
        index, num = dispersion(times, expected / rate)
        if not stats.chi2.ppf(0.001, num - 1) < index * (num - 1) < stats.chi2.ppf(0.999, num - 1):
            found.append(f"dispersion {expected}")
    return found


@pytest.mark.parametrize("name", VARYING)
def test_the_rescaled_times_are_a_poisson_process(name: str) -> None:
    arrival, rate = VARYING[name]
    for seed in range(5):
        times = due_times(arrival, duration_s=DURATION_S, seed=seed)
        assert against_poisson(unit_times(times, rate)) == [], seed


@pytest.mark.parametrize("name", VARYING)
def test_counts_over_many_seeds_have_mean_and_variance_of_the_law(name: str) -> None:
    arrival, rate = VARYING[name]
    expected = float(rate(MILLISECONDS).sum() * 1e-3)
    counts = np.array([due_times(arrival, duration_s=DURATION_S, seed=seed).size for seed in range(300)])
    assert abs(counts.mean() - expected) < 4 * (expected / 300) ** 0.5
    assert 0.75 < counts.var() / expected < 1.3  # a sum normalised to the duration would give 0


def test_gaps_repeated_by_equally_seeded_processes_are_found_out() -> None:
    """GuideLLM 0.8.1: each of 4 workers draws the same gaps from its own equally seeded generator, onto a shared offset."""
    gaps = np.random.default_rng(1).exponential(1 / 20, size=4500)
    assert against_poisson(np.cumsum(gaps), rate=20) == []
    assert {"lag 1", "dispersion 20", "dispersion 200"} <= set(against_poisson(np.cumsum(np.repeat(gaps, 4)), rate=20))


@pytest.mark.parametrize("cv", [0.5, 2.0, 4.0])
def test_gamma_gaps_have_their_law_no_memory_and_bunch_as_much_as_it_says(cv: float) -> None:
    times = due_times(law("gamma", rate=20, cv=cv), duration_s=8000, seed=3)
    gaps = np.diff(times)
    planned = stats.gamma(cv**-2, scale=cv**2 / 20)
    below = planned.cdf(1e-6)  # a microsecond: times are in whole nanoseconds, and of cv 4 a quarter of the gaps is less than one
    assert stats.kstest(gaps[gaps > 1e-6], lambda gap: (planned.cdf(gap) - below) / (1 - below)).pvalue > 0.01
    assert stats.binomtest(int((gaps <= 1e-6).sum()), gaps.size, below).pvalue > 0.01
    assert abs(lag_1(gaps)) < 3.1 / gaps.size**0.5
    assert dispersion(times, 10)[0] == pytest.approx(cv**2, rel=0.15)  # of long windows: the squared cv


def test_gamma_arrivals_do_not_bunch_at_the_start() -> None:
    arrival = law("gamma", rate=10, cv=5)
    counts = [due_times(arrival, duration_s=60, seed=seed).size for seed in range(2000)]
    assert np.mean(counts) == pytest.approx(600, abs=8)  # a first gap like the others: 612


def test_constant_gaps_are_equal_and_do_not_drift() -> None:
    times = due_times(law("constant", rate=3), duration_s=10_000, seed=1)
    assert times.size == 30_000
    assert times[:4].tolist() == [0, 1 / 3, 2 / 3, 1]
    assert times[-1] == 29_999 / 3


@pytest.mark.parametrize("arrival", [law("burst", max_requests=3), law("closed", concurrency=2, max_requests=3)])
def test_all_requests_of_a_burst_and_of_a_closed_loop_are_there_from_the_start(arrival: Arrival) -> None:
    assert due_times(arrival, duration_s=60, seed=1).tolist() == [0, 0, 0]


def test_nothing_is_due_while_the_rate_is_0() -> None:
    times = due_times(law("on-off", rate=50, on_s=2, off_s=3), duration_s=500, seed=1)
    assert times.size > 9000
    assert (times % 5 < 2).all()


@pytest.mark.parametrize(
    "arrival", [law("gamma", rate=10, cv=3), law("on-off", rate=10, on_s=7, off_s=2), law("poisson", rate=10)]
)
def test_a_longer_run_begins_like_a_shorter_one(arrival: Arrival) -> None:
    short, long = (due_times(arrival, duration_s=s, seed=1) for s in (100, 500))
    assert long[long < 100].tolist() == short.tolist()


def test_a_fall_that_the_run_does_not_reach_changes_nothing() -> None:
    crowd, endless = (law("flash-crowd", rate=5, peak_rate=40, at_s=10, rise_s=1, hold_s=s, fall_s=1) for s in (100, 7 * 86400))
    assert due_times(crowd, duration_s=100, seed=1).tolist() == due_times(endless, duration_s=100, seed=1).tolist()


@pytest.mark.parametrize(
    ("arrival", "duration_s", "words"),
    [
        (law("poisson", rate=100_000), 7 * 86400, "6.048e+10 requests are expected"),
        (law("gamma", rate=100_000, cv=1), 7 * 86400, "6.048e+10 requests are expected"),
        (law("constant", rate=100_000), 7 * 86400, "at most 10,000,000"),
        (law("poisson", rate=0.001), 1, "no request is due within duration_s 1"),
        (law("on-off", rate=10, on_s=0, off_s=0), 60, "add up to 0 s"),
        (law("on-off", rate=10, on_s=0, off_s=5), 60, "0 requests are expected"),
    ],
)
def test_a_law_without_arrivals_or_with_too_many_is_refused(arrival: Arrival, duration_s: float, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        due_times(arrival, duration_s=duration_s, seed=1)
    assert words in str(caught.value)
