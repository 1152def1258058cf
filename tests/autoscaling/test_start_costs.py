"""The fit begins with what replicas measured of themselves before they listened."""

import random
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.capacity import Mix, StepCosts, StepTimes
from serve_app.core.step_costs import MeasuredCosts
from tests.autoscaling.plant import ANSWER, PROMPT, TIMES
from tests.autoscaling.queue_plant import QueuePlant, rate_of
from tests.autoscaling.test_capacity import fitted, typical_s

DEAR = StepTimes(step_s=0.03, output_token_s=0.002, prompt_token_s=0.0006)
"""A token costs 1/15 of a step and a prompt's token 1/50, several times the guess without a measurement."""


def measured_of(times: StepTimes, factor: float = 1.0) -> MeasuredCosts:
    """Return the measurement of a replica that finds its tokens too expensive by a factor, and its steps right."""
    return MeasuredCosts(
        step_s=times.step_s,
        output_token_s=factor * times.output_token_s,
        prompt_token_s=factor * times.prompt_token_s,
        step_error_s=0.03 * times.step_s,
        output_token_error_s=0.1 * factor * times.output_token_s,
        prompt_token_error_s=0.1 * factor * times.prompt_token_s,
    )


def trickled(costs: StepCosts, times: StepTimes, windows: int) -> None:
    """Add windows in which one request at a time ran."""
    for window in range(windows):
        tokens, prompts = 120 + window % 7, 300 + window % 11 * 20
        busy_s = tokens * (times.step_s + times.output_token_s) + prompts * times.prompt_token_s
        costs.add(5.0, steps=tokens + window % 3 - 1, busy_s=busy_s, output_tokens=tokens, prefilled_tokens=prompts, prompts=1)


def work_of(times: StepTimes | None) -> float:
    assert times is not None
    return ANSWER * times.output_token_s + PROMPT * times.prompt_token_s


def started(measured: MeasuredCosts) -> StepCosts:
    costs = StepCosts()
    costs.start_from(measured)
    return costs


def test_it_is_known_before_any_load_and_stays_when_the_replicas_are_gone() -> None:
    costs = started(measured_of(DEAR))
    assert costs.times() == DEAR
    costs.start_from(None)
    assert costs.times() == DEAR


def test_a_trickle_leaves_what_was_measured() -> None:
    """Without the measurement a request seems to cost less than two thirds of its true cost."""
    measured, guessed = started(measured_of(DEAR)), StepCosts()
    trickled(measured, DEAR, 500)
    trickled(guessed, DEAR, 500)
    assert work_of(measured.times()) == pytest.approx(work_of(DEAR), rel=0.1)
    assert work_of(guessed.times()) < 0.67 * work_of(DEAR)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 3.0), st.integers(0, 1000))
def test_a_wrong_measurement_is_outweighed_by_batches_that_differ(factor: float, seed: int) -> None:
    costs = started(measured_of(DEAR, factor))
    found = fitted(DEAR, seconds=300, noise=0.05, seed=seed, costs=costs)
    assert found is not None
    assert typical_s(found) == pytest.approx(typical_s(DEAR), rel=0.05)
    assert work_of(found) == pytest.approx(work_of(DEAR), rel=0.2)


def test_how_much_the_load_has_taught_is_reported_per_cost() -> None:
    assert StepCosts().taught() is None
    costs = started(measured_of(DEAR))
    assert costs.taught() == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    trickled(costs, DEAR, 500)
    even = costs.taught()
    fitted(DEAR, seconds=600, costs=costs)
    mixed = costs.taught()
    assert even is not None
    assert mixed is not None
    assert even[0] > 0.9, "a trickle shows the cost of a step"
    assert even[1] < 0.3, "a trickle does not show the cost of a token"
    assert min(mixed) > 0.9


@settings(max_examples=10, deadline=None)
@given(st.floats(0.6, 1.5), st.integers(5, 60), st.integers(0, 1000))
def test_a_constant_load_of_many_at_once_teaches_nothing_wrong(factor: float, batch: int, seed: int) -> None:
    """Every window has the same steps, tokens and prompts, and so shows their cost together, but not that of each."""
    costs, rng = started(measured_of(DEAR, factor)), random.Random(seed)
    at_first = abs(work_of(costs.times()) - work_of(DEAR))
    steps, tokens, prompts = 50, 50 * batch, 50 * batch * PROMPT / ANSWER
    truth_s = steps * DEAR.step_s + tokens * DEAR.output_token_s + prompts * DEAR.prompt_token_s
    for _ in range(720):
        busy_s = truth_s * (1 + 0.05 * rng.uniform(-1, 1))
        costs.add(5.0, steps=steps, busy_s=busy_s, output_tokens=tokens, prefilled_tokens=prompts, prompts=tokens / ANSWER)
    assert abs(work_of(costs.times()) - work_of(DEAR)) <= at_first + 0.02 * work_of(DEAR)


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes minutes
@given(st.floats(0.6, 1.3), st.floats(0.02, 0.1), st.integers(0, 1000), st.sampled_from([3, 8]))
def test_after_a_trickle_as_many_are_ordered_as_after_any_step(factor: float, trickle: float, seed: int, needed: int) -> None:
    """The bound also holds if tokens were measured too cheap or too expensive. It is that of steps from an even load in test_plans.py."""
    plant = QueuePlant(running=1, cold_start_s=60.0, seed=seed, measured=measured_of(TIMES, factor))
    plant.run(trickle, 300)
    wanted = plant.run(rate_of(needed), 200)
    assert max(wanted) <= 1.35 * needed + 1.5 * needed**0.5 + 1
    assert wanted[-1] >= 0.8 * needed


def test_replicas_that_report_nothing_are_scaled_as_before() -> None:
    plant = QueuePlant(running=2, cold_start_s=40.0)
    plant.run(rate_of(2), 60)
    decision = plant.decisions[-1]
    assert "demand" in decision.alternatives
    assert not any(name.startswith("taught") for name in decision.inputs)
    measuring = replace(plant, measured=measured_of(TIMES))
    measuring.run(rate_of(2), 60)
    assert measuring.decisions[-1].inputs["taught_step"] > 0.5


def test_a_request_is_taken_to_cost_more_until_the_load_has_confirmed_what_was_measured() -> None:
    mix = Mix(prompt_tokens=PROMPT, output_tokens=ANSWER)
    assert StepCosts().work_error_s(mix) == 0.0, "without a measurement the guess has no error"
    costs = started(measured_of(DEAR))
    at_first = costs.work_error_s(mix)
    assert 0.1 * work_of(DEAR) < at_first < 0.3 * work_of(DEAR)
    trickled(costs, DEAR, 500)
    assert costs.work_error_s(mix) > 0.5 * at_first, "a trickle confirms little"
    fitted(DEAR, seconds=600, costs=costs)
    assert costs.work_error_s(mix) < 0.25 * at_first
