"""These tests measure arrivals of a known rate: chance is no step and no growth, and a step is known within seconds."""

from statistics import fmean, pstdev

import numpy as np
import pytest

from serve_app.autoscaling.demand import REQUESTS, Weights, arrivals, growth
from serve_app.autoscaling.history import History
from serve_app.autoscaling.signals import ModelLoad


def arrived(rates: list[float], seed: int) -> list[tuple[float, float]]:
    """Return (measured requests per second, growth) for each second of Poisson arrivals at these rates."""
    rng, history, found = np.random.default_rng(seed), History(), []
    for second, rate in enumerate(rates):
        history.add(float(second), ModelLoad(interval_s=1.0, requests=float(rng.poisson(rate))))
        found.append((arrivals(history, float(second), REQUESTS).requests_per_s, growth(history, float(second), 40.0)))
    return found


@pytest.mark.parametrize(("rate", "least"), [(4.3, 0.045), (33.0, 0.025)])
def test_the_known_rate_of_a_constant_load_varies_as_the_mean_of_a_thousand_requests(rate: float, least: float) -> None:
    """That is 4.5 % for 1,000 Poisson requests with exponential work, 3.2 % for their number alone; a minute of 33/s has 2,000."""
    known = [requests for seed in (1, 2) for requests, _ in arrived([rate] * 2100, seed)[300:]]
    assert fmean(known) == pytest.approx(rate, rel=0.02)
    assert pstdev(known) <= 1.3 * least * rate


def test_in_four_hours_of_a_constant_load_nothing_grows() -> None:
    assert max(rise for seed in range(4) for _, rise in arrived([8.6] * 3600, seed)) == 0.0


@pytest.mark.parametrize(("rate", "within_s"), [(33.0, 12), (266.0, 5)])
def test_most_of_a_step_by_half_is_known_within_seconds(rate: float, within_s: int) -> None:
    known = [arrived([rate] * 300 + [1.5 * rate] * within_s, seed)[-1][0] for seed in range(10)]
    assert fmean(known) >= 1.33 * rate
    assert max(known) <= 1.65 * rate


@pytest.mark.parametrize(
    "peak",
    [
        ModelLoad(interval_s=1.0, requests=8.0, prompt_tokens=62_400.0),
        ModelLoad(interval_s=1.0, requests=300.0, prompt_tokens=9e4),
    ],
)
def test_one_huge_prompt_and_one_second_of_many_requests_are_no_new_rate(peak: ModelLoad) -> None:
    weights, usual = Weights(request=0.05, prompt_token=4e-4), ModelLoad(interval_s=1.0, requests=8.0, prompt_tokens=2400.0)
    history = History()
    for second in range(300):
        history.add(float(second), usual)
    before = arrivals(history, 299.0, weights).requests_per_s
    after = []
    for second in range(300, 330):
        history.add(float(second), peak if second == 300 else usual)
        after.append(arrivals(history, float(second), weights).requests_per_s)
    assert max(after) <= 1.5 * before


@pytest.mark.parametrize(("shape", "least"), [(1.0, 0.6), (5.0, 0.72)])
def test_a_small_load_that_grows_fourfold_is_known_sooner_where_prompts_vary_less(shape: float, least: float) -> None:
    """12 s later. All of the work is prompts of gamma lengths: of shape 1 they are exponential, of shape 5 they vary as 64 to 512 do."""
    known = []
    for seed in range(20):
        rng, history = np.random.default_rng(seed), History()
        for second in range(132):
            num = rng.poisson(2.0 if second < 120 else 8.0)
            tokens = float(rng.gamma(shape, 300.0 / shape, num).sum())
            history.add(float(second), ModelLoad(interval_s=1.0, requests=float(num), prompt_tokens=tokens))
        known.append(arrivals(history, 131.0, Weights(request=0.0, prompt_token=4e-4)).requests_per_s)
    assert least * 8.0 <= fmean(known) <= 8.0


@pytest.mark.parametrize(("after_s", "least", "mean"), [(8, 0.35, 0.7), (15, 0.5, 0.8)])
def test_a_step_of_a_load_that_has_just_begun_is_known_within_a_quarter_of_a_minute(
    after_s: int, least: float, mean: float
) -> None:
    """One request and a half a second for 40 s, then six: the windows of 15 and 30 s hold the old load and the new one."""
    known = []
    for seed in range(20):
        rng, history = np.random.default_rng(seed), History()
        for second in range(105 + after_s):
            num = rng.poisson(0.0 if second < 65 else 1.5 if second < 105 else 6.0)
            tokens = float(rng.integers(64, 513, num).sum())
            history.add(float(second), ModelLoad(interval_s=1.0, requests=float(num), prompt_tokens=tokens))
        known.append(arrivals(history, 104.0 + after_s, Weights(request=0.012, prompt_token=4e-4)).requests_per_s)
    assert min(known) >= least * 6.0
    assert fmean(known) >= mean * 6.0
    assert max(known) <= 1.4 * 6.0


def test_at_a_constant_load_of_a_request_a_second_few_of_them_are_no_fall() -> None:
    even = []
    for seed in range(4):
        rng, history = np.random.default_rng(seed), History()
        for second in range(1500):
            history.add(float(second), ModelLoad(interval_s=1.0, requests=float(rng.poisson(0.8))))
            even.append(arrivals(history, float(second), REQUESTS).is_even)
    assert fmean(even) >= 0.98
