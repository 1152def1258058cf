"""These tests check the allowance of batches beside chats: the limits of a step, and what a step's time teaches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.step_budget import FIRST, HOLD_S, LEAST, MEASURED_EACH, RECENT, Chats, Plan, StepBudget

ONE_ANSWER = Chats(is_any=True, answers=1)
NONE = Chats(is_any=False)


def measured(*, share: float = 0.1, step_s: float = 0.010, max_tokens: int = 2048) -> StepBudget:
    """Return a budget that has seen undisturbed steps of ``step_s``."""
    budget = StepBudget(share, max_tokens)
    for _ in range(RECENT):
        budget.learn(ONE_ANSWER, 0, step_s)
    return budget


def test_without_a_chat_a_batch_has_whole_steps_and_only_some_seconds_after_the_last_one() -> None:
    budget = measured()
    assert budget.plan(NONE, now=0.0) is None
    assert budget.plan(ONE_ANSWER, now=10.0) is not None
    assert budget.plan(NONE, now=10.0 + HOLD_S) == Plan(int(FIRST), None)
    assert budget.plan(NONE, now=10.1 + HOLD_S) is None


def test_a_step_has_room_for_chats_and_the_allowance() -> None:
    assert measured().plan(Chats(is_any=True, answers=3), now=0.0) == Plan(3 + int(FIRST), None)


def test_a_chats_prompt_takes_from_the_allowance() -> None:
    budget = measured()
    assert budget.plan(Chats(is_any=True, answers=2, prompts=100), now=0.0) == Plan(2 + int(FIRST), None)
    assert budget.plan(Chats(is_any=True, answers=2, prompts=1000), now=0.0) == Plan(1002, None)


def test_where_a_chat_waits_no_prompt_of_a_batch_continues_and_answers_do_in_what_the_chat_leaves() -> None:
    assert measured().plan(Chats(is_any=True, answers=2, queued_prompts=100), now=0.0) == Plan(2 + int(FIRST), int(FIRST) - 100)
    assert measured().plan(Chats(is_any=True, answers=2, queued_prompts=500), now=0.0) == Plan(502, 0)


def test_a_step_is_never_longer_than_the_engines_own_limit() -> None:
    assert measured(max_tokens=64).plan(Chats(is_any=True, answers=3, prompts=500), now=0.0) == Plan(64, None)


def test_the_first_step_beside_a_chat_is_the_measure_and_one_of_many_after_it() -> None:
    budget = StepBudget(0.1, 2048)
    assert budget.plan(ONE_ANSWER, now=0.0) == Plan(1, None)
    budget.learn(ONE_ANSWER, 0, 0.010)
    for _ in range(MEASURED_EACH):
        assert budget.plan(ONE_ANSWER, now=0.0) == Plan(1 + int(FIRST), None)
        budget.learn(ONE_ANSWER, 1, 0.010)
    assert budget.plan(ONE_ANSWER, now=0.0) == Plan(1, None)
    assert budget.plan(Chats(is_any=True, answers=1, prompts=9), now=0.0) == Plan(1 + int(FIRST), None), (
        "a step with a prompt is no reference"
    )


@pytest.mark.parametrize(
    ("tokens", "step_s", "moves"),
    [
        (int(FIRST), 0.0109, 1),
        (int(FIRST), 0.0111, -1),
        (int(FIRST) // 2, 0.0109, 0),  # a half full step says nothing about a full one
        (int(FIRST) // 2, 0.0111, -1),
        (int(FIRST) // 2 - 1, 0.0111, 0),  # late for another reason
    ],
)
def test_full_steps_move_the_allowance(tokens: int, step_s: float, moves: int) -> None:
    budget = measured(share=0.1, step_s=0.010)
    budget.learn(ONE_ANSWER, tokens, step_s)
    assert (budget.allowance > FIRST) - (budget.allowance < FIRST) == moves


@pytest.mark.parametrize(
    "chats", [NONE, Chats(is_any=True, answers=1, prompts=5), Chats(is_any=True, answers=1, queued_prompts=5)]
)
def test_steps_without_a_chats_answer_or_with_a_chats_prompt_teach_nothing(chats: Chats) -> None:
    budget = measured()
    budget.learn(chats, int(FIRST), 1.0)
    assert budget.allowance == FIRST


def test_the_allowance_keeps_within_its_limits() -> None:
    budget = measured(max_tokens=300)
    for step_s, limit in ((0.001, 300.0), (1.0, LEAST)):
        for _ in range(200):
            budget.learn(ONE_ANSWER, int(budget.allowance), step_s)
        assert budget.allowance == limit


@given(
    free=st.integers(0, 400),
    token_s=st.floats(1e-6, 1e-3),
    base_s=st.floats(0.002, 0.1),
    share=st.floats(0.02, 1.0),
)
def test_the_allowance_settles_where_a_full_step_takes_the_share_longer(
    free: int, token_s: float, base_s: float, share: float
) -> None:
    """A device that computes ``free`` tokens beside its memory's work, and then takes ``token_s`` for each more."""
    right = free + share * base_s / token_s
    budget = measured(share=share, step_s=base_s)
    for _ in range(200):
        tokens = int(budget.allowance)
        budget.learn(ONE_ANSWER, tokens, base_s + token_s * max(0, tokens - free))
    expected = min(2048.0, max(LEAST, right))
    # Two moves to either side, and one token, as a step has whole tokens only.
    assert expected / 1.11 - 1 <= budget.allowance <= expected * 1.11 + 1
