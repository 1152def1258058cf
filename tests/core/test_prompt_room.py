"""These tests check how many prompt tokens a step may hold beside answers, what steps teach, and how long a prompt waits at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.prompt_room import KEPT, PATIENCE, PROMPT_SHARE, PromptRoom
from serve_app.core.step_costs import MeasuredCosts

COSTS = MeasuredCosts(
    step_s=0.004,
    output_token_s=1e-5,
    prompt_token_s=2e-5,
    step_error_s=1e-5,
    output_token_error_s=1e-7,
    prompt_token_error_s=1e-7,
)
LONG = [(0, 8000)]


def made(itl_s: float = 0.05, costs: MeasuredCosts | None = COSTS, least: int = 16) -> PromptRoom:
    room = PromptRoom(itl_s, least)
    room.start_from(costs)
    return room


def test_the_prompts_get_what_the_answers_leave_of_the_target() -> None:
    assert made().tokens(100, LONG) == 2250  # (50 - 4 - 100 x 0.01) ms / 0.02 ms
    assert made().tokens(100, [(0, 250), (0, 8000)]) == 2250
    assert made().tokens(100, [(0, 250), (0, 2000)]) is None, "all fit"


def test_without_an_answer_or_without_known_costs_there_is_no_limit() -> None:
    assert made().tokens(0, LONG) is None
    assert made(costs=None).tokens(100, LONG) is None


def test_an_engine_that_did_not_measure_itself_learns_from_its_first_steps() -> None:
    room = made(costs=None)
    for tokens in (1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000):
        room.learn(100, [(0, tokens)], law(100, [(0, tokens)], 1e-9), limit=None)
    (limit,) = [room.tokens(100, LONG)]
    assert limit is not None
    assert law(100, [(0, limit)], 1e-9) == pytest.approx(0.05, rel=0.05)


def test_where_answers_alone_take_the_target_prompts_get_their_share_of_the_time() -> None:
    room = made(itl_s=0.005)
    limit = room.tokens(100, LONG)
    assert limit == 62  # a quarter of the answers' 5 ms, at 0.02 ms
    assert made(itl_s=0.005, least=528).tokens(100, LONG) == 528, "whole blocks"


def test_a_late_step_lowers_the_aim_and_only_many_timely_ones_raise_it_again() -> None:
    room = made()
    limit = room.tokens(100, LONG)
    assert limit is not None
    room.learn(100, [(0, limit)], 0.051, limit=limit)
    lowered = room.aim
    assert lowered < 1.0
    for _ in range(round(KEPT / (1 - KEPT)) - 1):
        room.learn(100, [(0, limit)], 0.049, limit=limit)
    assert lowered < room.aim < 1.0
    for _ in range(2):
        room.learn(100, [(0, limit)], 0.049, limit=limit)
    assert room.aim == 1.0


@pytest.mark.parametrize(
    ("answers", "prompts", "limit"),
    [
        (0, [(0, 2000)], None),
        (100, [], None),
        (100, [(0, 2000)], None),  # unlimited: late for what it held
        (100, [(0, 500)], 2000),  # not full: late for another reason
        (100, [(0, 16)], 16),  # the least: no limit could have kept the target
    ],
)
def test_other_late_steps_leave_the_aim(answers: int, prompts: list[tuple[int, int]], limit: int | None) -> None:
    room = made()
    room.learn(answers, prompts, 0.2, limit=limit)
    assert room.aim == 1.0


def test_a_prompt_lets_work_in_proportion_to_its_own_go_first() -> None:
    assert made().delay_s(0, 8000) == pytest.approx(PATIENCE * 0.16)
    assert made().delay_s(7800, 200) == pytest.approx(PATIENCE * 0.004), "what is cached is no work"
    assert made(costs=None).delay_s(0, 8000) == 0.0


def law(answers: int, prompts: list[tuple[int, int]], pair_s: float) -> float:
    """Return the seconds of a step on a device whose costs differ from those that it measured of itself."""
    return 0.003 + 1.5e-5 * answers + sum(3e-5 * n + pair_s * (c * n + n * n / 2) for c, n in prompts)


@given(
    steps=st.lists(st.tuples(st.integers(1, 256), st.integers(0, 60_000)), min_size=150, max_size=200),
    pair_s=st.floats(0.0, 4e-9),
)
def test_limited_steps_come_to_the_target_on_a_device_with_other_costs(steps: list[tuple[int, int]], pair_s: float) -> None:
    room = made()
    late = 0
    for answers, computed in steps:
        limit = room.tokens(answers, [(computed, 16_000)])
        assert limit is not None
        held = [(computed, limit)]
        seconds = law(answers, held, pair_s)
        room.learn(answers, held, seconds, limit=limit)
        late += seconds > 1.05 * 0.05
    assert late < 0.2 * len(steps)
    answers, computed = steps[-1]
    limit = room.tokens(answers, [(computed, 16_000)])
    assert limit is not None
    assert 0.5 * 0.05 < law(answers, [(computed, limit)], pair_s) < 1.05 * 0.05


@given(
    answers=st.integers(1, 2000),
    prompts=st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 100_000)), min_size=1, max_size=8),
    itl_s=st.floats(1e-4, 1.0),
)
def test_prompts_always_get_their_share_of_a_step(answers: int, prompts: list[tuple[int, int]], itl_s: float) -> None:
    """So a prompt of w seconds of work that is first in order is computed after w / PROMPT_SHARE seconds of steps."""
    limit = made(itl_s).tokens(answers, prompts)
    wanted = sum(tokens for _, tokens in prompts)
    if limit is None or limit >= wanted:
        return
    base_s = 0.004 + 1e-5 * answers
    of_prompts_s = 2e-5 * (limit + 1)  # whole tokens
    assert of_prompts_s >= PROMPT_SHARE * (base_s + of_prompts_s) * (1 - 1e-9)
