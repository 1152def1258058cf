"""`PromptRoom` says how many prompt tokens the next step of an engine may hold, so that running answers get their tokens in time. Pure.

Each running answer gets one token a step, so a step that takes longer than the ITL target makes all of them late. The time of a step that
holds answers and parts of prompts is predicted:

    step = step_s + output_token_s x answers + prompt_token_s x tokens + pair_s x pairs

A part of n prompt tokens behind c computed ones has n c + n n / 2 *pairs* of tokens that attend to each other. The costs are fitted to the
engine's own steps, of which the latest count most, and start from what the engine measured of itself. Only steps near the target are
fitted: in a short step an accelerator reads weights while it could compute, so its time is on another line.

The prediction aims at a share of the target, which moves until `KEPT` of the limited steps are in time. Prompts always get `PROMPT_SHARE`
of a step's time. So the first prompt in order, of w seconds of work, has its first token after w / `PROMPT_SHARE` seconds and the step that
runs at its arrival, however many answers run and however short the target is.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from serve_app.core.step_costs import MeasuredCosts, non_negative_least_squares

KEPT = 0.998
"""Share of the limited steps that are to be in time. A late step delays all running answers, and 99 % of each one's gaps are to be kept."""
PROMPT_SHARE = 0.2
"""Least share of a step's time for prompts, if some wait. Where answers alone take the whole target, no prompt would begin without it."""
PATIENCE = 4.0
"""A prompt lets this many times its own work go first, of requests that come later and are shorter (`delay_s`)."""
_MOVE, _LEAST_AIM = 1.02, 0.5
"""One late step lowers the aim by this factor, and `KEPT` / (1 - `KEPT`) timely steps raise it as much."""
_MEMORY = 0.995
"""Weight of a fitted step relative to the next: half after 138 steps."""
_NEAR = 0.5
"""A step that is not full is fitted if it takes at least this share of the target."""
_MIN_STEPS = 8
"""Fitted steps before the first limit, where the engine did not measure itself."""
_ERROR, _PRIOR_ERROR = 0.05, 0.2
"""Deviation of a step's time from the prediction, as a share of the target, and relative deviation of the measured costs."""
_DOUBLING = 4000.0
"""Assumed deviation of the cost of pairs: a token behind so many others costs twice as much as the first one."""

Part = tuple[int, int]
"""Tokens of a prompt that are computed before the step, and tokens that the step is to hold or held."""


class PromptRoom:
    """The prompt tokens of one engine's steps.

    Args:
        itl_s: The target, > 0.
        least_tokens: Tokens that a limit always leaves for prompts, >= 1: some models compute whole blocks only.
    """

    def __init__(self, itl_s: float, least_tokens: int) -> None:
        self.aim = 1.0
        """Share of the target at which the prediction aims."""
        self._itl_s, self._least_tokens = itl_s, least_tokens
        self._costs = np.zeros(4)
        self._gram, self._moment = np.zeros((4, 4)), np.zeros(4)
        self._prior_gram, self._prior_moment = np.zeros((4, 4)), np.zeros(4)
        self._num_fitted = 0

    def start_from(self, measured: MeasuredCosts | None) -> None:
        """Start from the engine's measurement of itself. None: the first steps are not limited."""
        if measured is None:
            return
        costs = np.array([measured.step_s, measured.output_token_s, measured.prompt_token_s, 0.0])
        errors = np.array([measured.step_error_s, measured.output_token_error_s, measured.prompt_token_error_s, 0.0])
        errors = np.maximum(errors, _PRIOR_ERROR * costs)
        errors[3] = max(1e-12, measured.prompt_token_s / _DOUBLING)
        self._prior_gram = np.diag(errors**-2.0)
        self._prior_moment = costs / errors**2
        self._costs, self._num_fitted = costs, _MIN_STEPS

    def delay_s(self, computed: int, left: int) -> float:
        """Return by how many seconds of work a prompt may be later in the order than its arrival says.

        So the earliest deadline goes first, where the time until it is in proportion to the prompt's work: short prompts do not wait for
        long ones that came shortly before.
        """
        return PATIENCE * self._seconds(0, [(computed, left)])

    def tokens(self, answers: int, prompts: Sequence[Part]) -> int | None:
        """Return the most prompt tokens of the next step; None if all fit, no answer runs, or the costs are not known.

        Args:
            answers: Tokens of running answers, one for each without speculative decoding.
            prompts: For each prompt, in order, its computed tokens and those that are left.
        """
        if answers == 0 or self._num_fitted < _MIN_STEPS:
            return None
        base_s = float(self._costs[0] + self._costs[1] * answers)
        left_s = max(self.aim * self._itl_s - base_s, base_s * PROMPT_SHARE / (1.0 - PROMPT_SHARE))
        room = 0
        for computed, wanted in prompts:
            part = min(wanted, self._part(left_s, computed))
            room += part
            left_s -= self._seconds(0, [(computed, part)])
            if part < wanted:
                return max(room, self._least_tokens)
        return None

    def learn(self, answers: int, prompts: Sequence[Part], step_s: float, *, limit: int | None) -> None:
        """Learn from a step of ``step_s`` seconds that held so many tokens. ``limit`` is what `tokens` gave for it."""
        held = sum(tokens for _, tokens in prompts)
        is_full = limit is not None and held >= limit
        if not (answers and prompts and (is_full or step_s >= _NEAR * self._itl_s)):
            return
        base_s = float(self._costs[0] + self._costs[1] * answers)
        is_reachable = base_s < (1.0 - PROMPT_SHARE) * self.aim * self._itl_s
        if is_full and held > self._least_tokens and is_reachable:
            late = step_s > self._itl_s
            self.aim = max(_LEAST_AIM, self.aim / _MOVE) if late else min(1.0, self.aim * _MOVE ** (1.0 / KEPT - 1.0))
        error_s = _ERROR * self._itl_s
        row = np.array([1.0, answers, held, _pairs(prompts)]) / error_s
        self._gram = _MEMORY * self._gram + np.outer(row, row)
        self._moment = _MEMORY * self._moment + row * (step_s / error_s)
        self._num_fitted += 1
        if self._num_fitted >= _MIN_STEPS:
            found = non_negative_least_squares(self._gram + self._prior_gram, self._moment + self._prior_moment)
            self._costs = np.array(found)

    def _seconds(self, answers: int, prompts: Iterable[Part]) -> float:
        """Return what tokens add to a step."""
        prompts = list(prompts)
        _, output_token_s, prompt_token_s, pair_s = self._costs
        return float(output_token_s * answers + prompt_token_s * sum(n for _, n in prompts) + pair_s * _pairs(prompts))

    def _part(self, seconds: float, computed: int) -> int:
        """Return how many tokens behind ``computed`` ones take at most so many seconds: the root of n (prompt + pair (c + n / 2))."""
        _, _, prompt_token_s, pair_s = self._costs
        first_s = prompt_token_s + pair_s * computed
        if seconds <= 0.0:
            return 0
        denominator = first_s + math.sqrt(first_s * first_s + 2.0 * pair_s * seconds)
        return int(min(2.0 * seconds / denominator, 1e9)) if denominator > 0.0 else 1_000_000_000


def _pairs(prompts: Iterable[Part]) -> float:
    return sum(n * (computed + 0.5 * n) for computed, n in prompts)
