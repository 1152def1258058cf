"""These tests give the fit made-up step times that it must find again, and sum up the birth-death process term by term."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.autoscaling.capacity import MAX_UTILIZATION, TAIL, Capacity, Mix, Slo, StepCosts, StepTimes

TIMES = StepTimes(step_s=0.03, output_token_s=0.0004, prompt_token_s=0.0001)
MIX = Mix(prompt_tokens=400, output_tokens=100)


def fitted(
    times: StepTimes, *, seconds: int = 300, noise: float = 0.0, seed: int = 1, costs: StepCosts | None = None
) -> StepTimes | None:
    """Return the fit after ``seconds`` more of steps with changing batches."""
    rng, costs = random.Random(seed), costs or StepCosts()
    for _ in range(seconds):
        steps, batch, prompts = rng.randint(5, 20), rng.randint(1, 60), rng.randint(0, 4000)
        busy_s = times.step_s * steps + times.output_token_s * steps * batch + times.prompt_token_s * prompts
        busy_s *= 1 + noise * rng.uniform(-1, 1)
        costs.add(1.0, steps=steps, busy_s=busy_s, output_tokens=steps * batch, prefilled_tokens=prompts, prompts=prompts / 10)
    return costs.times()


def typical_s(times: StepTimes) -> float:
    """Return the time that the fit gives to the mean second of steps of `fitted`."""
    return 12 * times.step_s + 12 * 30 * times.output_token_s + 2000 * times.prompt_token_s


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_finds_the_step_times_again(noise: float) -> None:
    found = fitted(TIMES, noise=noise)
    assert found is not None
    assert found.step_s == pytest.approx(TIMES.step_s, rel=0.02 + noise)
    assert found.output_token_s == pytest.approx(TIMES.output_token_s, rel=0.05 + 2 * noise)
    assert found.prompt_token_s == pytest.approx(TIMES.prompt_token_s, rel=0.05 + 2 * noise)


@pytest.mark.parametrize(("factor", "seconds"), [(10.0, 90), (2.0, 90), (0.5, 90), (0.1, 600)])
def test_an_engine_that_has_changed_is_soon_known_again(factor: float, seconds: int) -> None:
    """A faster engine works less in a second, so that a second says less; learning is also less urgent."""
    costs = StepCosts()
    fitted(TIMES, seconds=3600, costs=costs)
    changed = StepTimes(factor * TIMES.step_s, factor * TIMES.output_token_s, factor * TIMES.prompt_token_s)
    found = fitted(changed, seconds=seconds, seed=2, costs=costs)
    assert found is not None
    assert typical_s(found) == pytest.approx(typical_s(changed), rel=0.25)


def test_nothing_is_known_before_there_was_load() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.add(1.0, steps=0, busy_s=0.0, output_tokens=0, prefilled_tokens=0, prompts=0)
    assert costs.times() is None
    assert fitted(TIMES, seconds=14) is None
    assert fitted(TIMES, seconds=15) is not None


@given(
    st.builds(StepTimes, st.floats(1e-4, 1), st.floats(0, 0.1), st.floats(0, 0.01)),
    st.integers(0, 1000),
)
@example(StepTimes(0.125, 0.0625, 0.0), 173)
@example(StepTimes(0.0028, 0.0824, 0.00002), 970)
@example(StepTimes(0.0001, 0.00001, 0.0), 832)
def test_no_cost_is_negative_and_together_they_explain_the_load(times: StepTimes, seed: int) -> None:
    found = fitted(times, seconds=30, noise=0.2, seed=seed)
    assert found is not None
    assert min(found.step_s, found.output_token_s, found.prompt_token_s) >= 0
    # Half a minute has six windows, each off by up to 20 %, and the worst of many draws counts.
    assert typical_s(found) == pytest.approx(typical_s(times), rel=0.3)


def capacity(
    times: StepTimes = TIMES, mix: Mix = MIX, *, itl_s: float = 0.1, ttft_s: float = 5.0, max_batch: float = 1e6
) -> Capacity:
    return Capacity(times=times, mix=mix, max_batch=max_batch, slo=Slo(ttft_s=ttft_s, itl_s=itl_s))


def test_work_and_limits_by_hand() -> None:
    c = capacity(max_batch=50)
    assert c.work_s == pytest.approx(100 * 0.0004 + 400 * 0.0001)  # 0.08 s, 0.8 ms per output token
    assert c.batch_limit() == (50, "batch")
    itl, ttft = capacity().batch_limit(), capacity(ttft_s=0.1).batch_limit()
    assert (itl[1], ttft[1]) == ("itl", "ttft")
    assert itl[0] == pytest.approx((0.1 - 0.03) / 0.0008)
    assert ttft[0] == pytest.approx((0.1 - 0.03 - 0.04) / 0.0008)


def test_a_limit_that_a_request_alone_breaks_is_left_out() -> None:
    assert capacity(itl_s=0.02, max_batch=64).batch_limit() == (64, "batch")


@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize("itl_s", [0.05, 0.1, 0.3])
def test_at_the_utilization_the_stationary_batch_has_the_limit_in_its_tail(itl_s: float, num_replicas: int) -> None:
    c = capacity(itl_s=itl_s)
    limit, _ = c.batch_limit()
    u = c.utilization(num_replicas)
    # Arrivals at rate u / work; with k requests each leaves with rate 1 / (O x (step + b k)).
    b, o = c.work_s / MIX.output_tokens, MIX.output_tokens
    weights, weight = [1.0], 1.0
    for k in range(1, 5000):
        weight *= (u / c.work_s) * o * (TIMES.step_s + b * k) / k
        weights.append(weight)
    total = sum(weights)
    mean = sum(k * w for k, w in enumerate(weights)) / total
    deviation = math.sqrt(sum((k - mean) ** 2 * w for k, w in enumerate(weights)) / total)
    assert mean + TAIL / math.sqrt(num_replicas) * deviation == pytest.approx(limit, rel=0.02)


@given(st.floats(0.001, 500), st.floats(0.001, 500), st.floats(0.1, 1.0))
@example(285.0, 286.0, 0.2891874514351197)
def test_more_demand_never_needs_fewer_replicas_and_they_suffice(one: float, other: float, factor: float) -> None:
    c = capacity()
    less, more = sorted((one, other))
    count = c.replicas_for(more, factor)
    assert 1 <= c.replicas_for(less, factor) <= count + count // 200, "from 200 on, one in two hundred more costs nothing"
    assert count * c.utilization(count) * factor >= more
    if 1 < count < 200:
        assert (count - 1) * c.utilization(count - 1) * factor < more


def test_many_replicas_are_used_better_than_one() -> None:
    c = capacity()
    assert c.utilization(1) < c.utilization(10) < c.utilization(1000) <= MAX_UTILIZATION
    assert capacity(max_batch=8).saturation() < capacity(max_batch=80).saturation() <= MAX_UTILIZATION


def test_with_room_batches_are_full_when_the_demand_has_risen_by_it() -> None:
    """r is 0.03 / 0.0008 + 1 = 38.5 requests, so that a batch of 100 is full at 100 / 138.5 = 0.722 of a replica."""
    c = capacity(max_batch=100)
    most = 100 / 138.5
    assert c.replicas_with_room(0.999 * 5 * most / 1.5, 0.5) == 5
    assert c.replicas_with_room(1.001 * 5 * most / 1.5, 0.5) == 6
    assert c.replicas_with_room(5 * most, 0.0) == 0
    assert {c.replicas_with_room(n * most / 1.5, 0.5) for n in (1000.5, 1003.0, 1009.5)} == {1010}


def test_answers_of_one_token_are_not_held_to_the_time_between_tokens() -> None:
    capacity = Capacity(times=TIMES, mix=Mix(prompt_tokens=400, output_tokens=1), max_batch=256, slo=Slo(ttft_s=2.0, itl_s=0.1))
    assert capacity.batch_limit()[1] == "ttft"
    some_longer = replace(capacity, mix=Mix(prompt_tokens=400, output_tokens=1.2))
    assert some_longer.batch_limit()[1] == "itl"
    assert capacity.replicas_for(10.0) < some_longer.replicas_for(10.0)
