"""`PromptSteps` lets a scheduler of ours put only so many prompt tokens into a step that running answers keep their ITL target.

`core/prompt_room.py` says how many. The prompts have them in the order of their priorities, the earliest deadline first: a begun long
prompt pauses for queued short ones that go before it. vLLM would give begun prompts all they want first.

This needs vLLM's ``running`` and ``waiting``, ``max_num_scheduled_tokens``, ``long_prefill_token_threshold``, `get_computed_blocks` of its
``kv_cache_manager``, and a request's ``kv_transfer_params``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.core.fair_tags import BACKGROUND_PRIORITY, later
from serve_app.core.prompt_room import Part, PromptRoom

_LEAST_TOKENS = 16
"""Prompt tokens that a limit leaves at least, more if the blocks of the KV cache are larger: some models compute whole blocks only."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Limits of the next step: its most tokens, those for one prompt (None: no limit), and begun prompts that pause."""

    max_tokens: int
    chunk: int | None
    paused: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that was scheduled: tokens of answers and prompts, and the limit of the latter."""

    answers: int
    prompts: Sequence[Part]
    limit: int | None
    at: float


class PromptSteps:
    """The prompts of one scheduler's steps. ``itl_s``: the target."""

    def __init__(self, scheduler: Any, itl_s: float) -> None:
        self._scheduler = scheduler
        self.room = PromptRoom(itl_s, max(_LEAST_TOKENS, scheduler.block_size))
        self._next = set[str]()
        """Ids of the queued requests for which the last step had room."""
        self._short_of_kv = set[str]()
        """Ids of queued requests that did not begin though a step had room; cleared when a running request ends."""
        self._num_running = 0
        """Running requests after the last step was scheduled."""
        self._limit: int | None = None
        self._under_way: dict[int, _Planned] = {}
        """id of a step's output -> the step."""

    def due(self, request: Any) -> int:
        """Return the priority of a request that comes, with its deadline."""
        cached = self._cached(request)
        return later(request.priority, self.room.delay_s(cached, request.num_tokens - cached))

    def plan(self, rank: Callable[[Any], Any], may_start: Callable[[Any], bool], free: int) -> PromptPlan | None:
        """Return the limits of the next step; None if it has none.

        Args:
            rank: The scheduler's order.
            may_start: Whether a queued request needs only a place and KV to begin.
            free: Places for queued requests.
        """
        scheduler, self._limit = self._scheduler, None
        self._next.clear()
        if len(scheduler.running) < self._num_running:
            self._short_of_kv.clear()
        clients = [r for r in scheduler.running if not is_background(r)]
        begun = [r for r in clients if is_begun(r)]
        answers = sum(tokens_wanted(r) for r in clients if not is_begun(r))
        if answers == 0 or not (begun or scheduler.waiting):
            return None
        queued = self._queued(may_start, free)
        order = sorted((*begun, *queued), key=rank)
        parts = {r.request_id: self._part(r) for r in order}
        self._limit = self.room.tokens(answers, list(parts.values()))
        if self._limit is None:
            return None
        chunk, paused = self._divide(order, parts, {r.request_id for r in queued}, self._limit)
        return PromptPlan(answers + self._limit, chunk, paused)

    def note(self, output: Any, now: float, *, is_full: bool) -> None:
        """Note a step that was scheduled, after vLLM has counted its tokens as computed. ``is_full``: it has as many as it may."""
        self._num_running = len(self._scheduler.running)
        if not is_full:
            self._short_of_kv |= self._next - output.num_scheduled_tokens.keys()
        answers, prompts = 0, list[Part]()
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            computed = request.num_computed_tokens - count
            if computed < request.num_prompt_tokens:
                prompts.append((computed, count))
            else:
                answers += count
        self._under_way[id(output)] = _Planned(answers, prompts, self._limit, now)

    def learn(self, output: Any, now: float, before: float) -> None:
        """Learn from a noted step that has ended now; the step before it ended at ``before``."""
        planned = self._under_way.pop(id(output), None)
        if planned is not None:
            self.room.learn(planned.answers, planned.prompts, now - max(before, planned.at), limit=planned.limit)

    def _queued(self, may_start: Callable[[Any], bool], free: int) -> list[Any]:
        """Return the queued requests that may begin in the next step, the first ones in order that could fill it."""
        found, left = list[Any](), self._scheduler.max_num_scheduled_tokens
        for request in self._scheduler.waiting if free > 0 else ():
            if is_background(request):
                break
            if request.request_id not in self._short_of_kv and may_start(request):
                found.append(request)
                left -= self._part(request)[1]
            if left <= 0 or len(found) >= free:
                break
        return found

    def _part(self, request: Any) -> Part:
        """Return the computed tokens of a prompt, and those that the next step may hold."""
        longest = self._scheduler.scheduler_config.long_prefill_token_threshold
        wanted, computed = tokens_wanted(request), request.num_computed_tokens
        if computed == 0:
            computed = self._cached(request)
            wanted -= computed
        return computed, min(wanted, longest or wanted)

    def _cached(self, request: Any) -> int:
        """Return the tokens that a queued request need not compute. It computes one at least."""
        if request.kv_transfer_params:  # it reads the KV of another engine
            return int(request.num_tokens - 1)
        return int(self._scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def _divide(
        self, order: Sequence[Any], parts: Mapping[str, Part], queued: Collection[str], left: int
    ) -> tuple[int | None, list[Any]]:
        """Give ``left`` tokens to prompts in order. Return the most tokens for one prompt, and the begun ones that pause.

        vLLM has one limit for all prompts. It must cut no queued prompt that goes first, so it is at least as long as these.
        """
        chunk, paused, longest_before = None, list[Any](), 0
        for request in order:
            part = min(left, parts[request.request_id][1])
            left -= part
            if request.request_id in queued:
                if part:
                    self._next.add(request.request_id)
                longest_before = max(longest_before, part)
            elif longest_before and part == 0:
                paused.append(request)
            elif longest_before and left == 0:
                chunk = max(part, longest_before)
        return chunk, paused


def is_background(request: Any) -> bool:
    return bool(request.priority >= BACKGROUND_PRIORITY)


def is_begun(request: Any) -> bool:
    """Return whether a running request still has a part of its prompt to compute."""
    return bool(request.num_computed_tokens < request.num_prompt_tokens)


def tokens_wanted(request: Any) -> int:
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)
