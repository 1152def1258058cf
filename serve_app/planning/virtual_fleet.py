"""`VirtualFleet` plays requests on real engine cores behind real ingress cores, in virtual time.

The engine cores are vLLM's with our scheduler; a step takes as long as the simulated accelerator says. An ingress is a `FleetState` with
`PrefixAffinity`. Nothing sleeps, and the clock of the scheduler is the fleet's. So a run depends on its seed alone, and a minute takes
seconds. Links, texts and Python's own time take no virtual time.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.events import (
    HeartbeatArrived,
    LinkOpened,
    OutputsArrived,
    RequestArrived,
    StepCostsMeasured,
    Ticked,
    WaitsReported,
)
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import (
    AbortAttempts,
    DeliverOutputs,
    FailRequest,
    FreeKeptKv,
    HandOverAttempt,
    Instruction,
    StartAttempt,
)
from serve_app.core.load import EngineLoad
from serve_app.core.order_board import OrderBoard
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import Resume
from serve_app.core.step_costs import MeasuredCosts
from serve_app.planning.virtual_loads import Asked, Load
from serve_app.planning.virtual_time import time_of_schedulers
from serve_app.replica.kv_params import CAME_AT

BLOCK = 16
"""Tokens of a block."""
_STEP_S, _PROMPT_TOKEN_S = 0.033, 3.5e-4
"""Costs of a simulated A10G: a step of answers takes about as long with one as with 16."""
DELIVERED_S = 1e-3
"""Seconds from one end of a link to the other."""
_HEARTBEAT_S, _TICK_S, _EXCHANGE_S, _SILENCE_S = 0.5, 0.25, 1.0, 10.0
_STARTS = itertools.count(1 << 24, 10_000)
"""When the clock of each fleet of this process starts: later than that of the one before it, because they use the same engine cores. From
2^24 to 2^25 all floats have the same spacing, so equal runs have times that are equal to the last bit."""


@dataclass(eq=False)
class Engine:
    """An engine core and what the fleet knows of it."""

    name: str
    core: Any
    is_busy: bool = False
    drain_ends_at: float | None = None

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler


@dataclass(eq=False)
class Ingress:
    """An ingress core and its requests."""

    fleet: FleetState
    asked: dict[str, Asked] = field(default_factory=dict)
    """Its requests that have not ended."""
    num_reports: int = 0


class VirtualFleet:
    """Engines behind ingresses.

    Args:
        cores: The engine cores. What an earlier fleet left in them is removed.
        slowness: Factor of all step times.
        costs: What the ingresses know of steps; None for those of a simulated A10G.
        settings: Values of `FleetSettings` other than those here. Hand-overs need cores that can do them.
        change: What is done to each ingress's fleet before its first event.
    """

    def __init__(
        self,
        cores: Sequence[Any],
        *,
        seed: int,
        ingresses: int = 1,
        slowness: float = 1.0,
        costs: MeasuredCosts | None = None,
        settings: Mapping[str, Any] | None = None,
        change: Callable[[FleetState], object] = lambda fleet: None,
        moves_kv: bool = True,
    ) -> None:
        self._engines = {str(number): Engine(str(number), core) for number, core in enumerate(cores)}
        self._random, self._slowness = random.Random(seed), slowness
        self._costs, self._settings, self._change, self._moves_kv = costs, settings or {}, change, moves_kv
        self._now = self._counts_from = float(next(_STARTS))
        self._ingresses = [Ingress(self._make_fleet()) for _ in range(ingresses)]
        self._board = OrderBoard(_SILENCE_S)
        self._num = itertools.count(1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.asked: list[Asked] = []
        """All requests in the order of arrival."""
        self.tokens: Counter[str] = Counter()
        """Tenant -> tokens of answers since the warm-up."""
        from serve_app.replica.scheduler import YieldingScheduler

        for core in cores:
            core.scheduler.finish_requests(list(core.scheduler.requests), _aborted())
            core.scheduler.reset_prefix_cache()
            if isinstance(core.scheduler, YieldingScheduler):
                core.scheduler.start_anew()

    def monotonic(self) -> float:
        """Return the virtual time: the scheduler's clock."""
        return self._now

    def play(self, seconds: float, *, warmup_s: float, to_the_end: bool = False) -> None:
        """Play what `at` has planned, once. What comes before the end of the warm-up is not counted.

        Args:
            to_the_end: Continue until each request that came by then has ended.
        """
        self._counts_from = self._now + warmup_s
        ends_at = self._counts_from + seconds
        for number, ingress in enumerate(self._ingresses):
            self._at(self._random.uniform(0.0, _EXCHANGE_S), self._exchange, number, ingress)
            self._at(self._random.uniform(0.0, _TICK_S), self._tick, ingress)
        for engine in self._engines.values():
            self._at(self._random.uniform(0.0, _HEARTBEAT_S), self._beat, engine)
        with time_of_schedulers(self):
            while self._events[0][0] < ends_at or (to_the_end and any(ingress.asked for ingress in self._ingresses)):
                self._now, _, happen, arguments = heapq.heappop(self._events)
                happen(*arguments)
        for ingress in self._ingresses:
            ingress.fleet.validate()

    def counted(self, prefix: str = "") -> list[Asked]:
        """Return the requests that came after the warm-up, of tenants whose names begin so."""
        return [asked for asked in self.asked if asked.at >= self._counts_from and asked.load.tenant.startswith(prefix)]

    def drain(self, number: int, left_s: float | None) -> None:
        """Let an engine say from now on that it drains, or, with None, that it does not. Its link stays open."""
        engine = self._engines[str(number)]
        engine.drain_ends_at = None if left_s is None else self._now + left_s
        self._say(engine)

    def at(self, second: float, happen: Callable[..., None], *arguments: Any) -> None:
        """Plan something, so many seconds from now on. To be called before `play`, or by what happens."""
        self._at(second, happen, *arguments)

    def waits_s(self, prefix: str) -> list[float]:
        """Return the waits for the first token, of the counted requests that have it."""
        return [asked.begun_at - asked.at for asked in self.counted(prefix) if asked.begun_at is not None]

    def kv_read(self) -> tuple[int, int]:
        """Return the tokens whose KV was read, and the bytes of that KV."""
        hand_overs = [ingress.fleet.hand_overs for ingress in self._ingresses]
        return sum(each.tokens for each in hand_overs), sum(each.num_bytes for each in hand_overs)

    def _ingress_of(self, load: Load, connection: int) -> Ingress:
        """Return where a connection of the load leads."""
        return self._ingresses[connection % len(self._ingresses)]

    def _ended(self, asked: Asked) -> None:
        """Note that an answer is complete."""

    def _fail(self, name: str, asked: Asked, error: Exception) -> None:
        raise error

    def _make_fleet(self) -> FleetState:
        limits: dict[str, Any] = {"max_waiting_requests": 10**7, "no_replica_s": 1e9, "heartbeat_timeout_s": 1e9}
        first = next(iter(self._engines.values()))
        config = first.core.vllm_config
        preempts = config.scheduler_config.policy == "priority" and bool(config.cache_config.enable_prefix_caching)
        limits |= {"max_replicas": len(self._engines), "engines_preempt": preempts, **self._settings}
        fleet = FleetState(FleetSettings(model="m", **limits), PrefixAffinity())
        self._change(fleet)
        for name, engine in self._engines.items():
            blocks = engine.core.vllm_config.cache_config.num_gpu_blocks
            opened = LinkOpened(name, credit=2048, weights="m", kv_tokens=blocks * BLOCK)
            if self._moves_kv and engine.scheduler.connector is not None:
                token_bytes = engine.core.model_executor.profile.model.kv_bytes_per_token
                opened = replace(opened, kv_transfer="simulated", kv_token_bytes=token_bytes)
            fleet.handle(opened, now=self._now)
        errors = dict.fromkeys(("step_error_s", "output_token_error_s", "prompt_token_error_s"), 1e-4)
        token_s = self._slowness * _STEP_S / first.scheduler.max_num_running_reqs
        prompt_token_s = self._slowness * _PROMPT_TOKEN_S
        costs = MeasuredCosts(step_s=0.0, output_token_s=token_s, prompt_token_s=prompt_token_s, **errors)
        fleet.handle(StepCostsMeasured(self._costs or costs), now=self._now)
        return fleet

    def _at(self, in_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._now + in_s, next(self._num), happen, arguments))

    def ask(self, load: Load, name: str, prompt: list[int], answer: int, points: Sequence[int], connection: int = 0) -> None:
        """Send a request of one of the loads that run. ``points`` are the hashes of `Prefix`."""
        asked = Asked(load, self._now, connection, prompt, answer)
        arrived = RequestArrived(
            name,
            len(asked.prompt),
            asked.answer,
            Resume.CONTINUE,
            name,
            prefix=Prefix(points, BLOCK),
            start_by=None if load.first_token_s is None else self._now + load.first_token_s,
            first_token_s=load.first_token_s or 0.0,
            tenant=load.of_tenant,
            weight=load.weight,
        )
        ingress = self._ingress_of(load, connection)
        ingress.asked[name] = asked
        self.asked.append(asked)
        self._follow(ingress, ingress.fleet.handle(arrived, now=self._now))

    def _follow(self, ingress: Ingress, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartAttempt():
                    self._start(ingress, instruction)
                case AbortAttempts():
                    self._engines[instruction.replica_id].scheduler.finish_requests(instruction.attempt_ids, _aborted())
                case HandOverAttempt():
                    self._hand_over(ingress, self._engines[instruction.replica_id], instruction.attempt_id)
                case FreeKeptKv():
                    self._engines[instruction.replica_id].scheduler.free_kv([instruction.attempt_id])
                case DeliverOutputs():
                    for output in instruction.outputs:
                        self._take(ingress, output)
                case FailRequest():
                    self._fail(instruction.request_id, ingress.asked.pop(instruction.request_id), instruction.error)

    def _hand_over(self, ingress: Ingress, engine: Engine, attempt_id: str) -> None:
        ended = [each for outputs in engine.scheduler.hand_over([attempt_id]).values() for each in outputs]
        if ended:
            self._at(
                DELIVERED_S,
                lambda: self._follow(ingress, ingress.fleet.handle(OutputsArrived(engine.name, ended), now=self._now)),
            )

    def _start(self, ingress: Ingress, start: StartAttempt) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        asked, engine = ingress.asked[start.request_id], self._engines[start.replica_id]
        asked.state = ingress.fleet.requests[start.request_id]
        kv: Any = {} if start.kv is None else {"kv_transfer_params": {**cast("dict[str, Any]", start.kv), CAME_AT: self._now}}
        made = EngineCoreRequest(
            request_id=start.attempt_id,
            prompt_token_ids=[*asked.prompt, *start.continue_from],
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=asked.state.max_tokens, ignore_eos=True, detokenize=False, extra_args=kv or None
            ),
            pooling_params=None,
            arrival_time=self._now,
            lora_request=None,
            cache_salt=asked.load.of_tenant or None,
            data_parallel_rank=None,
            priority=asked.state.priority,
        )
        engine.core.add_request(*engine.core.preprocess_add_request(made))
        if not engine.is_busy:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        engine.is_busy = engine.scheduler.has_requests()
        if engine.is_busy:
            planned = engine.scheduler.schedule()
            made, step_s = engine.core.model_executor._step(planned)
            self._at(max(step_s, DELIVERED_S) * self._slowness + DELIVERED_S, self._deliver, engine, planned, made)

    def _deliver(self, engine: Engine, planned: Any, made: Any) -> None:
        outputs = [each for frame in engine.scheduler.update_from_output(planned, made).values() for each in frame.outputs]
        for ingress in self._ingresses:
            own = [each for each in outputs if each.request_id.rpartition("@")[0] in ingress.asked]
            if own:
                self._follow(ingress, ingress.fleet.handle(OutputsArrived(engine.name, own), now=self._now))
        self._step(engine)

    def _take(self, ingress: Ingress, output: Any) -> None:
        asked = ingress.asked[output.request_id]
        if output.new_token_ids:
            if asked.begun_at is None:
                asked.begun_at = self._now
            else:
                asked.gaps.append(self._now - asked.token_at)
            asked.token_at = self._now
        self.tokens[asked.load.tenant] += len(output.new_token_ids) * (self._now >= self._counts_from)
        if output.finish_reason is not None:
            del ingress.asked[output.request_id]
            asked.is_complete = True
            self._ended(asked)

    def _beat(self, engine: Engine) -> None:
        self._at(_HEARTBEAT_S, self._beat, engine)
        self._say(engine)

    def _say(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        load = EngineLoad(0, len(scheduler.running), len(scheduler.waiting))
        if scheduler.connector is not None:  # requests that wait for their KV count as running ones, as in a replica
            reading = len(scheduler.kv_holding_waiting)
            load = EngineLoad(0, load.running + reading, load.waiting, scheduler.kv_cache_manager.usage)
        for ingress in self._ingresses:
            ends_at = engine.drain_ends_at
            beat = HeartbeatArrived(engine.name, load, ends_at is not None, max(0.0, (ends_at or 0.0) - self._now))
            self._follow(ingress, ingress.fleet.handle(beat, now=self._now))

    def _tick(self, ingress: Ingress) -> None:
        self._at(_TICK_S, self._tick, ingress)
        self._follow(ingress, ingress.fleet.handle(Ticked(), now=self._now))

    def _exchange(self, number: int, ingress: Ingress) -> None:
        self._at(_EXCHANGE_S, self._exchange, number, ingress)
        order, before = ingress.fleet.order, ingress.num_reports
        ingress.num_reports += 1
        report = order.report()
        waits = self._board.exchange(str(number), {"m": report}, self._now, number=before + 1, last_answered=before)
        order.answered(report)
        self._follow(ingress, ingress.fleet.handle(WaitsReported(waits["m"]), now=self._now))


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
