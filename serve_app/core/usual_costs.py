"""`UsualCosts` learns what requests of a tenant usually cost; `FairOrder` expects the same of the tenant's next request. Pure."""

import math
from dataclasses import dataclass

from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts, long_context

LATEST, RUNNING = 1 / 8, 1 / 16
"""Weights in the moving means: of a request that ended, and of a running answer that costs more than usual, each time that its length has
doubled. With 1/4 for the latter, a tenant with one long answer in 100 would wait too long for its short ones."""
_LEAST_COMPUTED = 0.25
"""At least this part of a prompt is expected to be in no cache: a tenant must not make its next prompts seem to cost nothing."""
_FIRST_ANSWER_TOKENS = 64
"""Expected length of an answer while none has ended. Such an answer is expected to have all its steps alone: how many others will share
them is not known, and 64 steps of its own cost as much as 1,024 that 16 answers share."""
GUESS = MeasuredCosts(
    step_s=0.0,
    output_token_s=1e-3,
    prompt_token_s=1e-4,
    step_error_s=1e-3,
    output_token_error_s=1e-3,
    prompt_token_error_s=1e-4,
)
"""Costs until a replica has measured its own. Only their ratio matters."""


@dataclass(slots=True, eq=False)
class UsualCosts:
    """Moving means over requests."""

    answer_s: float | None = None
    """GPU-seconds of an answer without its prompt; None before the first one."""
    computed: float = 1.0
    """Part of a prompt that was in no prefix cache, from 0 to 1."""

    def learn_answer(self, answer_s: float, weight: float = LATEST) -> None:
        self.answer_s = answer_s if self.answer_s is None else self.answer_s + weight * (answer_s - self.answer_s)

    def learn_prompt(self, computed: float) -> None:
        self.computed += LATEST * (computed - self.computed)

    def expected(self, request: RequestState, others: "UsualCosts", costs: MeasuredCosts) -> tuple[float, float]:
        """Return the GPU-seconds that the prompt and the answer will probably cost. ``others`` count until an answer is known here."""
        most = request.max_tokens
        answer_s = others.answer_s if self.answer_s is None else self.answer_s
        if answer_s is None:
            most, answer_s = min(most, _FIRST_ANSWER_TOKENS), math.inf
        computed = max(_LEAST_COMPUTED, self.computed)
        longest_s = _answer_s(request, most, most, costs)
        return costs.seconds(computed_tokens=request.prompt_tokens * computed), min(answer_s, longest_s)


def answer_cost_s(request: RequestState, costs: MeasuredCosts) -> float:
    """Return the GPU-seconds of the answer so far."""
    return _answer_s(request, len(request.emitted_ids), request.step_part, costs)


def _answer_s(request: RequestState, num_tokens: int, step_part: float, costs: MeasuredCosts) -> float:
    context_tokens = long_context(request.prompt_tokens, num_tokens)
    return costs.seconds(output_tokens=num_tokens, context_tokens=context_tokens, step_part=step_part)
