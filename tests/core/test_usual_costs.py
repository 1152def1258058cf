"""These tests compare what a first answer is expected to cost with what it is charged. Costs are counted by hand."""

import pytest

from serve_app.core.request import RequestState, Resume
from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.usual_costs import UsualCosts, answer_cost_s

COSTS = MeasuredCosts(
    step_s=0.01,
    output_token_s=0.001,
    prompt_token_s=0.0001,
    context_token_s=1e-6,
    step_error_s=1e-6,
    output_token_error_s=1e-6,
    prompt_token_error_s=1e-6,
    context_token_error_s=1e-9,
)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_tokens", "answer_s"),
    [
        (1241, 5000, 64, 0.64 + 0.064 + 0.066016),  # 1,000 to 1,063 tokens beyond 241 before each token of the answer
        (1241, 10, 10, 0.1 + 0.01 + 0.010045),
        (100, 5000, 64, 0.64 + 0.064),
    ],
)
def test_a_first_answer_is_expected_to_cost_what_an_answer_that_is_alone_in_its_steps_is_charged(
    prompt_tokens: int, max_tokens: int, num_tokens: int, answer_s: float
) -> None:
    request = RequestState("r", prompt_tokens, max_tokens, Resume.CONTINUE)
    expected = UsualCosts().expected(request, UsualCosts(), COSTS)
    assert expected == pytest.approx((prompt_tokens * 0.0001, answer_s))
    request.emitted_ids, request.step_part = [1] * num_tokens, num_tokens
    assert answer_cost_s(request, COSTS) == pytest.approx(answer_s)


def test_an_answer_of_the_tenant_or_else_of_another_one_replaces_the_guess() -> None:
    request, mine, others = RequestState("r", 100, 5000, Resume.CONTINUE), UsualCosts(), UsualCosts()
    others.learn_answer(0.3)
    assert mine.expected(request, others, COSTS) == pytest.approx((0.01, 0.3))
    mine.learn_answer(0.1)
    assert mine.expected(request, others, COSTS) == pytest.approx((0.01, 0.1))
