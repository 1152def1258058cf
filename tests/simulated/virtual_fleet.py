"""`VirtualFleet` plays tenants' loads on real engine cores in virtual time: a step takes as long as the simulated accelerator says.

The engine cores are vLLM's, with our scheduler and `SimulatedExecutor`; each ingress is a `FairOrder`. Nothing sleeps, and the clock of the
scheduler is the fleet's. So a run depends on its seed alone, and a minute takes seconds.
"""

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.core.fair_order import FairOrder
from serve_app.core.order_board import OrderBoard
from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts
from tests.core.test_fair_order import request

SHARED, KINDS = 256, 4
"""Tokens of a prompt's beginning, which is one of so many."""
_STEP_S, _PROMPT_TOKEN_S = 0.033, 3.5e-4
"""Costs of a simulated A10G: a step of answers takes about as long with one as with 16."""
_DELIVERED_S = 1e-3
_HEARTBEAT_S, _EXCHANGE_S = 0.1, 1.0
_SILENCE_S = 10.0
_NUMBERS = itertools.count(1)
"""Of fleets, which use the same engine cores one after the other. The clock of the next one is later."""


@dataclass(eq=False)
class Load:
    """The load of one tenant: ``rate`` requests a second, or ``depth`` clients that each send one request after the other."""

    tenant: str
    rate: float = 0.0
    depth: int = 0
    weight: float = 1.0
    own: tuple[int, int] = (32, 96)
    """Least and most tokens of the prompt's own part."""
    answer: tuple[int, int] = (16, 48)


@dataclass(eq=False)
class _Asked:
    state: RequestState
    load: Load
    at: float
    engine: "_Engine"
    order: FairOrder


class _Engine:
    def __init__(self, core: Any) -> None:
        self.core, self.scheduler, self.executor = core, core.scheduler, core.model_executor
        self.is_busy = False


class VirtualFleet:
    """Engines behind ingresses. Requests go to the engine that has the fewest.

    Args:
        cores: The engine cores. What an earlier fleet left in them is removed.
        ingresses: Number of ingresses; each request comes to one by chance.
        slowness: Factor of all step times.
    """

    def __init__(
        self, cores: Sequence[Any], monkeypatch: pytest.MonkeyPatch, *, seed: int, ingresses: int = 1, slowness: float = 1.0
    ) -> None:
        self._engines = [_Engine(core) for core in cores]
        self._orders = [FairOrder() for _ in range(ingresses)]
        errors = dict.fromkeys(("step_error_s", "output_token_error_s", "prompt_token_error_s"), 1e-4)
        token_s = slowness * _STEP_S / cores[0].scheduler.max_num_running_reqs
        for order in self._orders:
            order.learn(MeasuredCosts(step_s=0.0, output_token_s=token_s, prompt_token_s=slowness * _PROMPT_TOKEN_S, **errors))
        self._board = OrderBoard(_SILENCE_S)
        self._random, self._slowness = random.Random(seed), slowness
        self._now = self._counts_from = 10_000.0 * next(_NUMBERS)
        self._num = itertools.count(1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked: dict[str, _Asked] = {}
        self._kinds = [[self._random.randrange(10, 210) for _ in range(SHARED)] for _ in range(KINDS)]
        self.waits_s: defaultdict[str, list[float]] = defaultdict(list)
        """Tenant -> waits for the first token, of requests that came after the warm-up."""
        self.tokens: Counter[str] = Counter()
        """Tenant -> tokens of answers since the warm-up."""
        monkeypatch.setattr("serve_app.replica.scheduler.time", self)
        for core in cores:
            core.scheduler.finish_requests(list(core.scheduler.requests), _aborted())
            core.scheduler.reset_prefix_cache()

    def monotonic(self) -> float:
        return self._now

    def run(self, loads: Sequence[Load], seconds: float, *, warmup_s: float = 20.0) -> None:
        self._counts_from = self._now + warmup_s
        ends_at = self._counts_from + seconds
        for load in loads:
            for _ in range(load.depth):
                self._at(self._random.random() * _HEARTBEAT_S, self._arrive, load)
            if load.rate:
                self._at(self._random.expovariate(load.rate), self._arrive, load)
        self._at(0.0, self._heartbeat)
        for number in range(len(self._orders)):
            self._at(self._random.random() * _EXCHANGE_S, self._exchange, number)
        while self._events[0][0] < ends_at:
            self._now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)

    def _at(self, in_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._now + in_s, next(self._num), happen, arguments))

    def _arrive(self, load: Load) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        if load.rate:
            self._at(self._random.expovariate(load.rate), self._arrive, load)
        name = f"{load.tenant}-{next(self._num)}"
        own = [self._random.randrange(10, 210) for _ in range(self._random.randint(*load.own))]
        prompt, answer = self._random.choice(self._kinds) + own, self._random.randint(*load.answer)
        state, order = request(name, prompt_tokens=len(prompt), max_tokens=answer), self._random.choice(self._orders)
        order.place(state, load.tenant, load.weight, "interactive", self._now)
        engine = min(self._engines, key=lambda each: len(each.scheduler.requests))
        made = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=self._now,
            lora_request=None,
            cache_salt=load.tenant,
            data_parallel_rank=None,
            priority=state.priority,
        )
        engine.core.add_request(*engine.core.preprocess_add_request(made))
        self._asked[name] = _Asked(state, load, self._now, engine, order)
        if not engine.is_busy:
            self._step(engine)

    def _step(self, engine: _Engine) -> None:
        engine.is_busy = engine.scheduler.has_requests()
        if engine.is_busy:
            planned = engine.scheduler.schedule()
            made, step_s = engine.executor._step(planned)
            self._at(max(step_s, _DELIVERED_S) * self._slowness + _DELIVERED_S, self._deliver, engine, planned, made)

    def _deliver(self, engine: _Engine, planned: Any, made: Any) -> None:
        for frame in engine.scheduler.update_from_output(planned, made).values():
            for output in frame.outputs:
                self._take(output)
        self._step(engine)

    def _take(self, output: Any) -> None:
        asked = self._asked[output.request_id]
        state, tenant = asked.state, asked.load.tenant
        if output.new_token_ids and not state.emitted_ids:
            state.trail.cached_tokens = output.prefill_stats.num_cached_tokens
            asked.order.begin(state, self._now)
            if asked.at > self._counts_from:
                self.waits_s[tenant].append(self._now - asked.at)
        state.emitted_ids += output.new_token_ids
        if self._now > self._counts_from:
            self.tokens[tenant] += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._asked[output.request_id]
            asked.order.end(state, self._now)
            if asked.load.depth:
                self._at(_DELIVERED_S, self._arrive, asked.load)
        elif len(state.emitted_ids) >= state.charge_at:
            asked.order.charge(state)

    def _heartbeat(self) -> None:
        self._at(_HEARTBEAT_S, self._heartbeat)
        for order in self._orders:
            order.note_fullness(len(self._engines), None, self._now)
            for number, engine in enumerate(self._engines):
                held = [asked.state for asked in self._asked.values() if asked.engine is engine and asked.order is order]
                order.note_queue(str(number), len(engine.scheduler.waiting), held)

    def _exchange(self, number: int) -> None:
        self._at(_EXCHANGE_S, self._exchange, number)
        order = self._orders[number]
        order.learn_waits(self._board.exchange(str(number), {"m": order.report()}, self._now)["m"])


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
