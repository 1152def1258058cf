"""These tests compare the means of the last minutes' arrivals with known laws."""

import random
from statistics import fmean

import pytest

from serve_app.autoscaling.history import HISTORY_S, History
from serve_app.autoscaling.signals import ModelLoad


def history_of(rates: list[float], *, cv: float, seed: int) -> History:
    """Return arrivals with gamma gaps of this coefficient of variation, at a rate for each second."""
    rng, history = random.Random(seed), History()
    at = work = 0.0  # in units of the mean gap
    gap = rng.gammavariate(cv**-2, cv**2)
    for second, rate in enumerate(rates):
        arrived, work = 0, work + rate
        while at + gap <= work:
            at += gap
            gap = rng.gammavariate(cv**-2, cv**2)
            arrived += 1
        history.add(float(second), ModelLoad(interval_s=1.0, requests=float(arrived)))
    return history


def mean_dispersion(rates: list[float], *, cv: float = 1.0) -> float:
    return fmean(history_of(rates, cv=cv, seed=seed).dispersion() for seed in range(40))


@pytest.mark.parametrize("seconds", [60, int(HISTORY_S)])
@pytest.mark.parametrize("cv", [1.0, 2.0, 3.0])
def test_the_dispersion_of_steady_arrivals_is_that_of_their_law(cv: float, seconds: int) -> None:
    """For many arrivals with independent gaps the dispersion is cv squared."""
    assert mean_dispersion([20.0] * seconds, cv=cv) == pytest.approx(cv**2, rel=0.35)


def test_a_trend_a_step_and_a_spike_are_no_bursts() -> None:
    trend = [10.0 + second / 3 for second in range(300)]
    step = [100.0] * 100 + [400.0] * 50
    spike = [100.0] * 100 + [200.0] * 21 + [100.0] * 60
    for rates in (trend, step, spike):
        assert mean_dispersion(rates) < 2.0


def test_of_nothing_arrivals_are_taken_for_independent() -> None:
    assert History().dispersion() == 1.0
    assert mean_dispersion([0.0] * 100) == 1.0


def prompts_of(means: list[float], *, shape: float, per_s: int = 8) -> float:
    """Return the mean spread over 40 seeds, for gamma lengths of this shape with a mean for each second."""
    found = []
    for seed in range(40):
        rng, history = random.Random(seed), History()
        for second, mean in enumerate(means):
            tokens = sum(rng.gammavariate(shape, mean / shape) for _ in range(per_s))
            history.add(float(second), ModelLoad(interval_s=1.0, requests=float(per_s), prompt_tokens=tokens))
        found.append(history.prompts_spread())
    return fmean(found)


@pytest.mark.parametrize("shape", [1.0, 5.0, 100.0])
def test_the_spread_of_prompts_is_that_of_their_law(shape: float) -> None:
    """For gamma lengths the spread is 1 / shape: 1 for exponential ones, and 0.2 for lengths spread evenly over 64 to 512 tokens."""
    assert prompts_of([300.0] * 120, shape=shape) == pytest.approx(1 / shape, rel=0.35)


def test_a_step_in_the_lengths_of_prompts_is_no_spread() -> None:
    assert prompts_of([300.0] * 150 + [1200.0] * 30, shape=5.0) < 0.35


def test_each_known_prompt_moves_the_spread_from_that_of_exponential_lengths() -> None:
    """Twenty seconds have four groups and three differences, of the six with which the spread is known."""
    assert History().prompts_spread() == 1.0
    assert prompts_of([300.0] * 20, shape=100.0) == pytest.approx(1 - 3 / 6, abs=0.02)
    assert prompts_of([300.0] * 35, shape=100.0) == pytest.approx(0.01, abs=0.01)


def test_the_time_before_the_first_request_makes_arrivals_no_burstier() -> None:
    assert history_of([0.0] * 65 + [1.5] * 40, cv=1.0, seed=3).dispersion() == history_of([1.5] * 40, cv=1.0, seed=3).dispersion()
