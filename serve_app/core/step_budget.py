"""`StepBudget` limits how many tokens of batches a step of an engine may hold beside chats. Pure: no clock, no vLLM.

A step takes as long as all that is in it, and every request in it waits for its end. So while chats run, batches get an *allowance*: tokens
a step, of prompts and answers together. The allowance is measured, not computed from a model of the device. An *undisturbed* step, which
holds no token of a batch, is the reference, and a step that is full of batches' tokens may take ``share`` longer. Each full step moves the
allowance by `MOVE`: up if it kept this limit, down if it did not. So half of the full steps keep the limit, and a step that was late by
chance moves the allowance no further than any other.

`replica/scheduler.py` applies the limits to vLLM's scheduler and knows which requests are *limited*: those of batches, and prompts of
tenants that are ahead of their shares. Where this module says batches, it means limited requests; "chats" are all others.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

MOVE = 1.05
"""Factor by which one step moves the allowance: from the first guess to four times as much in 29 steps."""
FIRST, LEAST = 128.0, 16.0
"""Tokens of the first allowance and of the smallest one. With the smallest, batches make progress where chats never end."""
RECENT = 9
"""Undisturbed steps whose median is the reference."""
MEASURED_EACH = 64
"""After this many steps beside chats, a batch leaves one step out if none was undisturbed. It costs a batch 1.6 % of its steps."""
HOLD_S = 5.0
"""Seconds for which the allowance holds after the last chat has ended: the next chat must not meet a step full of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """The tokens that the engine's chats need of the next step. ``is_any``: whether the engine has a chat at all."""

    is_any: bool
    answers: int = 0
    """Tokens of answers: one for each chat whose answer has begun, more with speculative decoding."""
    prompts: int = 0
    """Tokens of prompts that the engine has begun to compute."""
    queued_prompts: int = 0
    """Tokens of prompts that the engine has not begun and can begin."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits of the next step. ``max_tokens`` counts all requests together, >= 1.

    ``max_answers``, if not None: prompts of batches that the engine has begun pause, and at most this many answers of batches continue.
    """

    max_tokens: int
    max_answers: int | None


class StepBudget:
    """The budget of one engine. ``share`` > 0: how much longer a step may take; ``max_tokens``: the engine's limit of a step."""

    def __init__(self, share: float, max_tokens: int) -> None:
        self.allowance = min(FIRST, float(max_tokens))
        self._share, self._max_tokens = share, max_tokens
        self._undisturbed_s: deque[float] = deque(maxlen=RECENT)
        self._num_since = MEASURED_EACH
        self._chat_at: float | None = None

    def plan(self, chats: Chats, *, now: float) -> Plan | None:
        """Return the limits of the next step; None if batches may have all of it, because no chat was there for `HOLD_S`.

        Chats' prompts make a step long already, so their tokens count against the allowance.
        """
        if chats.is_any:
            self._chat_at = now
        elif self._chat_at is None or now - self._chat_at > HOLD_S:
            return None
        prompts = chats.prompts + chats.queued_prompts
        is_measure = chats.answers > 0 and prompts == 0 and self._num_since >= MEASURED_EACH
        if is_measure:
            self._num_since = 0  # also if vLLM makes another step of it: batches must make progress
        room = 0 if is_measure else max(0, int(self.allowance) - prompts)
        max_tokens = min(self._max_tokens, max(1, chats.answers + prompts + room))
        # vLLM looks at its queue once all begun requests have tokens: a batch's prompt would take those of a chat that waits there.
        return Plan(max_tokens, room if chats.queued_prompts else None)

    def learn(self, chats: Chats, limited_tokens: int, step_s: float) -> None:
        """Learn from a step of ``step_s`` that was planned for ``chats`` and held ``limited_tokens`` tokens of batches."""
        if not chats.answers or chats.prompts or chats.queued_prompts:
            return
        if not limited_tokens:
            self._undisturbed_s.append(step_s)
            self._num_since = 0
            return
        self._num_since += 1
        if not self._undisturbed_s:
            return
        is_late = step_s > (1.0 + self._share) * median(self._undisturbed_s)
        if is_late and limited_tokens >= 0.5 * self.allowance:
            self.allowance = max(LEAST, self.allowance / MOVE)
        elif not is_late and limited_tokens >= 0.9 * int(self.allowance):
            self.allowance = min(float(self._max_tokens), self.allowance * MOVE)
