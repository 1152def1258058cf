"""Our schedulers are vLLM's, with a bound on how much longer requests of batches, and prompts of tenants that are ahead of their shares,
make a step while others run (`core/step_budget.py`).

vLLM's priorities decide which request is scheduled first, and then fill the step to the last token: a chat waits for all prompts that are
in the step. Here each step gets limits before vLLM schedules it, and chats come first. A begun prompt leaves room for one that goes before
it by its priority, such as another tenant's (`core/fair_order.py`). In a full engine, requests give their places to others
(`core/fair_tags.py`).

This needs vLLM's ``running``, ``waiting`` and `_preempt_request`, its ``max_num_scheduled_tokens``, ``max_num_active_reqs`` and
``long_prefill_token_threshold``, and ``next_decode_eligible_step``, before which a running request gets no token.
"""

import functools
import math
import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from serve_app.core.fair_tags import BACKGROUND_PRIORITY, FIRST_TAG, Overtakers, gives_way, is_ahead, is_in_same_range
from serve_app.core.step_budget import HOLD_S, Chats, StepBudget
from serve_app.core.step_costs import MeasuredCosts
from serve_app.engine_args import BATCH_STEP_SHARE, ITL_TARGET_S
from serve_app.replica.prompt_steps import PromptSteps, is_background, is_begun, tokens_wanted

_BEFORE_ALL = -(1 << 63)
"""Lower than any priority."""
_MAX_PREEMPTED_A_STEP = 4
"""Requests that give way before one step."""
_PROGRESS = 16
"""Tokens that a request makes at least between two times at which it gives way, however many come that go before it."""
_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""States of queued requests that may start now; in other states they wait for a grammar or for KV from elsewhere."""


class YieldingScheduler(Scheduler):
    """vLLM's scheduler with bounded steps, in which running requests give way to others."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_tokens: int = self.max_num_scheduled_tokens
        ours = self.vllm_config.additional_config
        # An item that models read in one step only, such as an image, may be longer than a limit: then it would never begin.
        can_cut = self.scheduler_config.enable_chunked_prefill and not self.scheduler_config.disable_chunked_mm_input
        self._prompts = PromptSteps(self, ours[ITL_TARGET_S]) if can_cut and ITL_TARGET_S in ours else None
        self._can_preempt = (
            self.policy is SchedulingPolicy.PRIORITY and self.cache_config.enable_prefix_caching and not self.has_mamba_layers
        )
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all that earlier requests left here, but for what `PromptSteps` learned. The scheduler has no request."""
        self._budget = StepBudget(self.vllm_config.additional_config[BATCH_STEP_SHARE], self._most_tokens)
        self._background = set[str]()
        """Ids of batches' requests; may hold some that have ended."""
        self._queued = set[str]()
        """Ids of chats that were in the queue before the last step."""
        self._under_way: dict[int, tuple[Chats, int, float]] = {}
        """id of a planned step's output -> the chats that it was planned for, its limited tokens, and when it was scheduled."""
        self._ended_at = 0.0
        self._not_ahead = set[str]()
        """Ids of clients' requests whose tenants are not ahead of their shares; may hold some that have ended."""
        self._ahead = set[str]()
        """Ids of the requests of tenants that are ahead; may hold some that have ended."""
        self._not_ahead_until = -math.inf
        """Until then, prompts of tenants that are ahead are limited like batches' requests: a tenant that is not may send the next one."""
        self._limited = set[str]()
        """Ids of requests of which the next step may hold few tokens."""
        self._is_alone = False
        """Whether in the last step only requests that had been put first could begin."""
        self._short_of_kv_id = ""
        """Id of the first queued request if it had a place and room in the last step and did not begin."""
        self._gave_way = dict[str, int]()
        """Id of a request that gave way -> its tokens then; may hold some that have ended."""
        self._overtakers = Overtakers()
        self._offered = ""
        """Id of the queued request for which a step last had room. If it is still the next one, it lacks a place or KV."""

    def start_from(self, costs: MeasuredCosts | None) -> None:
        """Take over what the engine measured of its steps."""
        if self._prompts is not None:
            self._prompts.room.start_from(costs)

    def add_request(self, request: Any) -> None:
        if self._prompts is not None:
            request.priority = self._prompts.due(request)
        if is_background(request):
            self._background.add(request.request_id)
        else:
            (self._ahead if is_ahead(request.priority) else self._not_ahead).add(request.request_id)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        self._background &= self.requests.keys()
        self._not_ahead &= self.requests.keys()
        self._ahead &= self.requests.keys()
        if len(self._gave_way) > 2 * len(self.requests):
            self._gave_way = {i: tokens for i, tokens in self._gave_way.items() if i in self.requests}
        if self._not_ahead:
            self._not_ahead_until = now + HOLD_S
        most_active = self.max_num_active_reqs
        is_open = self._pause_state is PauseState.UNPAUSED and (self.prefill_capacity_bound or not throttle_prefills)
        num_first = self._make_way(now) if is_open else 0
        self._is_alone = num_first > 0 and not self._is_alone  # not twice in succession: places must not stay free
        if self._is_alone:
            self.max_num_active_reqs = min(most_active, self._num_places_taken() + num_first)
        places = self.max_num_active_reqs
        chats = plan = None
        self._limited = self._background
        if self._ahead and now < self._not_ahead_until and self._prompts is None:  # else these prompts have a limit of their own
            self._limited = self._limited | (self._ahead - {r.request_id for r in self.running if not is_begun(r)})
        if self._background or any(map(is_begun, self.running)):
            self.running.sort(key=self._rank)
        if self._limited:
            chats = self._chats()
            if (plan := self._budget.plan(chats, now=now)) is not None:
                self.max_num_scheduled_tokens = plan.max_tokens
                self._hold_back(plan.max_answers)
        longest = self.scheduler_config.long_prefill_token_threshold
        if (chunk := self._longest_chunk(places if is_open else 0)) is not None:
            self.scheduler_config.long_prefill_token_threshold = min(chunk, longest or chunk)
        most_tokens = self.max_num_scheduled_tokens
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = self._most_tokens, most_active
            self.scheduler_config.long_prefill_token_threshold = longest
        is_full = output.total_num_scheduled_tokens >= most_tokens
        if plan is not None and is_full:
            self._queued.clear()  # the step was full: chats that are still in the queue lack neither a place nor KV
        if chats is not None:
            limited = sum(count for i, count in output.num_scheduled_tokens.items() if i in self._limited)
            self._under_way[id(output)] = chats, limited, now
        if self._prompts is not None:
            self._prompts.note(output, now, is_full=is_full)
        has_room = self._num_places_taken() < places and not is_full
        self._short_of_kv_id = self._startable_first() if is_open and has_room else ""
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = time.monotonic()
        planned = self._under_way.pop(id(scheduler_output), None)
        if planned is not None and scheduler_output.num_scheduled_tokens:
            chats, limited, scheduled_at = planned
            self._budget.learn(chats, limited, now - max(self._ended_at, scheduled_at))
        if self._prompts is not None:
            self._prompts.learn(scheduler_output, now, self._ended_at)
        self._ended_at = now
        return super().update_from_output(scheduler_output, model_runner_output)

    def _make_way(self, now: float) -> int:
        """Preempt running requests that give way to queued ones, if these lack a place or KV, and put these first in the queue.

        Full blocks of a preempted request stay in the prefix cache. By its tag it is one of the first to continue.

        Returns:
            The number of requests put first. No other is to begin in the same step: its prompt would make the step longer.
        """
        if not (self.waiting and self._can_preempt):
            return 0
        first = self._first_queued(now)
        level = first.priority - is_ahead(first.priority)
        giving = [r for r in self.running if gives_way(r.priority, level) and self._may_give_way(r, level, now)]
        free = 0 if first.request_id == self._short_of_kv_id else max(0, self.max_num_active_reqs - self._num_places_taken())
        if not (giving or (free and level != first.priority)):
            return 0
        giving.sort(key=lambda r: (r.priority >= FIRST_TAG["batch"], r.priority >= BACKGROUND_PRIORITY, -self._computed_again(r)))
        adapters = self._adapters(self.running)
        queued = [r for i in self._not_ahead if self._may_start(r := self.requests[i], adapters)]
        queued = sorted(r for r in queued if is_in_same_range(r.priority, level))  # as vLLM's queue: equal priorities by arrival
        if self._prompts is not None and free and len(queued) <= free:
            return 0  # none lacks a place, and the order is that of deadlines
        if (
            not queued and not free and self._may_start(first, adapters)
        ):  # one of a tenant that is ahead: only later priorities give way
            queued, giving = [first], [r for r in giving if gives_way(r.priority, first.priority)]
        put_first = queued[:free]
        for request in queued[free : free + _MAX_PREEMPTED_A_STEP]:
            if giving and self._request_blocks_can_be_freed(giving[-1]):
                self._preempt(giving.pop(), now)
                put_first.append(request)
        self._put_first([request for request in put_first if not is_ahead(request.priority)], now)
        return len(put_first)

    def _first_queued(self, now: float) -> Any:
        """Return the first request of the queue. If it is overdue, its tenant counts as not ahead from now on."""
        first = self.waiting.peek_request()
        if self._overtakers.is_overdue(first.priority, now):
            self.waiting.remove_request(first)
            first.priority -= 1  # even: its tenant is not ahead
            self.waiting.add_request(first)
            self._ahead.discard(first.request_id)
            self._not_ahead.add(first.request_id)
        return first

    def _may_give_way(self, request: Any, level: int, now: float) -> bool:
        if is_in_same_range(request.priority, level) and self._overtakers.is_overdue(request.priority, now):
            return False
        tokens = self._gave_way.get(request.request_id)
        return tokens is None or request.num_tokens - tokens >= _PROGRESS

    def _preempt(self, request: Any, now: float) -> None:
        self._gave_way[request.request_id] = request.num_tokens
        self.running.remove(request)
        self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _put_first(self, requests: list[Any], now: float) -> None:
        """Put queued requests before all others of the queue, in their order."""
        if not requests:
            return
        self.waiting.remove_requests(set(requests))
        for request in reversed(requests):
            if self.waiting:
                before = self.waiting.peek_request().priority - 1
                if request.priority > before:
                    self._overtakers.note(request.priority, now)
                request.priority = min(request.priority, before - is_ahead(before))  # even: its tenant is not ahead
            self.waiting.add_request(request)

    def _computed_again(self, request: Any) -> int:
        """Return how many tokens a running request would compute again if it were preempted: those of blocks that are not full."""
        return int(request.num_computed_tokens - request.num_output_placeholders) % self.block_size

    def _may_start(self, request: Any, adapters: Collection[int]) -> bool:
        """Return whether a request is queued and needs only a place and KV to begin. ``adapters`` are the ones that run."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            grammar = request.structured_output_request.grammar  # vLLM changes the state only once there is a place
            is_ready = grammar is not None and not isinstance(grammar, Exception)
        else:
            is_ready = request.status in _IN_QUEUE
        if not is_ready or self._holds_kv_blocks(request) or request.num_stale_output_tokens:
            return False
        if request.lora_request is None or self.lora_config is None:
            return True
        return request.lora_request.lora_int_id in adapters or len(adapters) < self.lora_config.max_loras

    def _startable_first(self) -> str:
        """Return the id of the first queued request if it needs only a place and KV to begin, else ""."""
        first = self.waiting.peek_request() if self.waiting else None
        return first.request_id if first is not None and self._may_start(first, self._adapters(self.running)) else ""

    def _num_places_taken(self) -> int:
        return len(self.running) + self.num_waiting_for_streaming_input

    def _adapters(self, requests: Iterable[Any]) -> set[int]:
        if self.lora_config is None:
            return set()
        return {r.lora_request.lora_int_id for r in requests if r.lora_request is not None}

    def _rank(self, request: Any) -> tuple[bool, bool, int]:
        """Order running requests: chats, answers before prompts, and prompts as they would begin; then those of batches.

        vLLM has them in the order in which they began: an answer that began while a long prompt was computed would wait for that prompt.
        """
        if is_background(request):
            return True, True, 0
        return False, request.request_id in self._limited, request.priority if is_begun(request) else _BEFORE_ALL

    def _chats(self) -> Chats:
        answers = prompts = 0
        for request in self.running:
            if is_background(request):
                break  # `schedule` has put chats in front
            if request.request_id in self._limited:
                continue
            if is_begun(request):
                prompts += tokens_wanted(request)
            else:
                answers += tokens_wanted(request)
        is_any = len(self.requests) > len(self._background)
        return Chats(is_any=is_any, answers=answers, prompts=prompts, queued_prompts=self._newly_queued_tokens() if is_any else 0)

    def _newly_queued_tokens(self) -> int:
        """Return the prompt tokens of chats that were queued since the last step was scheduled, or that a full step left in the queue.

        A chat that the last step could have begun and did not lacks a place or KV, which only running requests can free by continuing. So
        no line is held back for such a chat: lines whose prompts have begun may be all that runs.
        """
        seen, self._queued = self._queued, set()
        if not (self.waiting or self.kv_holding_waiting):
            return 0
        queued = {i: tokens_wanted(r) for i, r in self.requests.items() if r.status in _IN_QUEUE and i not in self._limited}
        self._queued |= queued.keys()
        return sum(tokens for i, tokens in queued.items() if i not in seen)

    def _longest_chunk(self, places: int) -> int | None:
        """Return the most tokens of the next step for a begun prompt of a client; None for no limit. It keeps half of the step at least.

        With several begun prompts there is no limit: the rest of the step is not theirs alone, and shorter ones make room soon. If running
        answers have an ITL target, it limits the step and all its prompts instead.
        """
        if self._prompts is not None:
            may_start = functools.partial(self._may_start, adapters=self._adapters(self.running))
            step = self._prompts.plan(self._rank, may_start, places - self._num_places_taken())
            if step is None:
                return None
            self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, step.max_tokens)
            for request in self._pausable(step.paused):
                self._pause(request)
            return step.chunk
        if not self.waiting or len(self.running) >= self.max_num_running_reqs:
            return None
        begun = [r for r in self.running if is_begun(r) and not is_background(r)]
        following = self.waiting.peek_request()
        if len(begun) != 1 or following.request_id == self._offered or following.priority >= begun[0].priority:
            return None
        self._offered = following.request_id
        answers = len(self.running) - 1
        left = max(2, self.max_num_scheduled_tokens - answers)
        return left - min(left // 2, tokens_wanted(following))

    def _hold_back(self, max_answers: int | None) -> None:
        """Leave limited requests that run out of the next step, except ``max_answers`` whose prompts are computed.

        vLLM counts only the adapters of a step. If the adapters of all requests are more than it may have, requests with one stay in the
        step: another adapter would begin in their place, and the step after it would have too many, which ends the engine.
        """
        if max_answers is None:
            return
        for request in self._pausable(r for r in self.running if r.request_id in self._limited):
            if not is_begun(request) and max_answers > 0:
                max_answers -= 1
            else:
                self._pause(request)

    def _pausable(self, requests: Iterable[Any]) -> list[Any]:
        """Return those of some running requests that may be left out of a step, for which `_hold_back` gives the reason."""
        may_swap = self.lora_config is not None and len(self._adapters(self.requests.values())) > self.lora_config.max_loras
        return [r for r in requests if not (may_swap and r.lora_request is not None)]

    def _pause(self, request: Any) -> None:
        """Leave a running request out of the next step."""
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)


class YieldingAsyncScheduler(YieldingScheduler, AsyncScheduler):
    """The same for vLLM's scheduler that plans the next step while a step runs."""


def bounded(scheduler: type) -> type:
    """Return our scheduler in place of one of vLLM's; a scheduler without such a replacement, for diffusion, is returned as it is."""
    return {Scheduler: YieldingScheduler, AsyncScheduler: YieldingAsyncScheduler}.get(scheduler, scheduler)
