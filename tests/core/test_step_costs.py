"""These tests time batches with made-up costs, which the computation must give back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.step_costs import (
    CONTEXT_TOKENS,
    UNTIMED_TOKEN,
    MeasuredCosts,
    TimedBatch,
    combined,
    long_context,
    measured_costs,
)

BATCHES = ((1, 0), (32, 0), (8, 0), (1, 512))


def timed(step_s: float, output_s: float, prompt_s: float, factors: tuple[float, ...] = (1.0,) * 4) -> list[TimedBatch]:
    return [
        TimedBatch(output_tokens=o, prefilled_tokens=p, seconds=factor * (step_s + o * output_s + p * prompt_s))
        for (o, p), factor in zip(BATCHES, factors, strict=True)
    ]


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.floats(0.0, 0.01))
def test_what_the_batches_were_made_from_is_found_within_the_errors(step_s: float, output_s: float, prompt_s: float) -> None:
    found = measured_costs(timed(step_s, output_s, prompt_s))
    assert found is not None
    assert abs(found.step_s - step_s) <= 0.2 * found.step_error_s
    assert abs(found.output_token_s - output_s) <= 0.2 * found.output_token_error_s
    assert abs(found.prompt_token_s - prompt_s) <= 0.2 * found.prompt_token_error_s


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.floats(0.0, 0.01), st.tuples(*[st.floats(0.8, 1.2)] * 4))
def test_no_cost_is_negative_and_each_error_is_above_zero(
    step_s: float, output_s: float, prompt_s: float, factors: tuple[float, ...]
) -> None:
    found = measured_costs(timed(step_s, output_s, prompt_s, factors))
    assert found is not None
    assert min(found.step_s, found.output_token_s, found.prompt_token_s) >= 0
    assert min(found.step_error_s, found.output_token_error_s, found.prompt_token_error_s) > 0


def test_batches_that_are_on_no_plane_make_larger_errors() -> None:
    straight, bent = measured_costs(timed(0.03, 0.001, 0.0004)), measured_costs(timed(0.03, 0.001, 0.0004, (1.0, 1.0, 2.0, 1.0)))
    assert straight is not None
    assert bent is not None
    assert bent.output_token_error_s > 3 * straight.output_token_error_s


@pytest.mark.parametrize("kept", [[], [0], [0, 0], [3], [3, 3]], ids=str)
def test_one_kind_of_batch_gives_no_costs(kept: list[int]) -> None:
    batches = timed(0.03, 0.001, 0.0004)
    assert measured_costs([batches[i] for i in kept]) is None


def test_without_a_prompt_its_cost_is_a_guess_and_the_others_are_measured() -> None:
    batches = timed(0.03, 0.001, 0.0004)
    found = measured_costs(batches[:3])
    assert found is not None
    assert (found.step_s, found.output_token_s) == pytest.approx((0.03, 0.001))
    assert (found.prompt_token_s, found.prompt_token_error_s) == pytest.approx((UNTIMED_TOKEN * 0.031,) * 2)


def test_without_a_second_size_of_batch_a_step_of_one_token_costs_what_it_took() -> None:
    """Engines with `max_num_seqs` 1 have no second size, and need none: each of their steps has one token."""
    batches = timed(0.03, 0.001, 0.0004)
    found = measured_costs([batches[0], batches[3]])
    assert found is not None
    assert found.step_s + found.output_token_s == pytest.approx(0.031)
    assert found.prompt_token_s == pytest.approx(0.0004)
    assert (found.output_token_s, found.output_token_error_s) == pytest.approx((UNTIMED_TOKEN * 0.031,) * 2)


def test_one_replica_on_a_busy_node_does_not_count_and_widens_the_errors() -> None:
    one, slow = measured_costs(timed(0.03, 0.001, 0.0004)), measured_costs(timed(0.3, 0.01, 0.004))
    assert one is not None
    assert slow is not None
    found = combined([one, slow, one])
    assert found is not None
    assert (found.step_s, found.output_token_s, found.prompt_token_s) == (one.step_s, one.output_token_s, one.prompt_token_s)
    assert found.step_error_s > 0.1
    assert combined([]) is None


def test_a_report_gives_back_what_it_was_made_from_and_an_old_replica_has_none() -> None:
    found = measured_costs(timed(0.03, 0.001, 0.0004))
    assert found is not None
    assert MeasuredCosts.from_report({"steps": 5.0, **found.report()}) == found
    assert MeasuredCosts.from_report({"steps": 5.0, "cold_start_s": 30.0}) is None
    assert MeasuredCosts.from_report(dict(list(found.report().items())[1:])) is None, "a number that was not finite is left out"
    without_context = {name: value for name, value in found.report().items() if "context" not in name}
    assert MeasuredCosts.from_report(without_context) == found, "an older release did not time a long context"


@given(st.floats(1e-3, 1.0), st.floats(1e-6, 0.1), st.floats(0.0, 0.01), st.floats(0.0, 1e-5))
def test_a_batch_with_a_long_context_shows_what_a_token_before_an_answers_token_costs(
    step_s: float, output_s: float, prompt_s: float, context_s: float
) -> None:
    long = TimedBatch(output_tokens=1, prefilled_tokens=0, context_tokens=8000, seconds=step_s + output_s + 8000 * context_s)
    found = measured_costs([*timed(step_s, output_s, prompt_s), long])
    assert found is not None
    assert abs(found.context_token_s - context_s) <= 0.2 * found.context_token_error_s
    assert abs(found.output_token_s - output_s) <= 0.2 * found.output_token_error_s
    assert combined([found]) == found


@pytest.mark.parametrize("prompt_tokens", [1, 200, 240, 241, 242, 30_000])
@pytest.mark.parametrize("output_tokens", [0, 1, 40, 41, 42, 1000])
def test_a_long_context_counts_beyond_that_of_the_timed_batches(prompt_tokens: int, output_tokens: int) -> None:
    before = (prompt_tokens + made for made in range(output_tokens))
    assert long_context(prompt_tokens, output_tokens) == sum(max(0, tokens - CONTEXT_TOKENS) for tokens in before)
