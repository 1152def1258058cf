"""`OverloadedFleet` is a fleet in simulated time: engines with queues of their own, and tenants that ask for more than there is.

It records what became of each request.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.core.events import HeartbeatArrived, RequestArrived, StepCostsMeasured, Ticked
from serve_app.core.fair_tags import gives_way, is_ahead
from serve_app.core.instructions import AbortAttempts, FailRequest, Instruction, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState, Resume
from serve_app.core.step_costs import MeasuredCosts
from serve_app.errors import CannotStartInTime
from tests.core.helpers import Output, fleet_of, outputs

PLACES, ENGINES, STEP_TOKENS = 16, 2, 512
COSTS = MeasuredCosts(
    step_s=0.018,
    output_token_s=0.001,
    prompt_token_s=1e-4,
    step_error_s=1e-4,
    output_token_error_s=1e-5,
    prompt_token_error_s=1e-6,
)
TICK_S, HEARTBEAT_S = 0.25, 1.0
IDLE_STEP_S = 0.005


@dataclass
class Tenant:
    """A tenant that sends ``rate`` requests a second. Ranges of tokens include both ends."""

    name: str
    rate: float
    within_s: float
    weight: float = 1.0
    prompt: tuple[int, int] = (32, 96)
    answer: tuple[int, int] = (16, 48)


@dataclass(eq=False)
class Asked:
    """One request at its client."""

    tenant: Tenant
    name: str
    at: float
    state: RequestState = field(default_factory=lambda: RequestState("", 0, 0, Resume.CONTINUE))
    left: int = 0
    gave_way_left: int = 1 << 30
    prompt_left: int = 0
    begun_at: float | None = None
    refused_at: float | None = None
    late_at: float | None = None
    expected_s: float = 0.0


@dataclass(eq=False)
class Engine:
    """Computes prompts and answers of up to `PLACES` requests in steps."""

    queue: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    step: int = 0
    idle_s: float = 0.0
    """Seconds of places that were free while no request waited."""

    def begin(self, rng: random.Random) -> None:
        """Fill the places, as the scheduler does."""
        self.queue.sort(key=lambda asked: (asked.state.priority, asked.state.number))
        for asked in [each for each in self.queue if not is_ahead(each.state.priority)][:4]:
            if len(self.running) < PLACES:
                break
            able = [
                r for r in self.running if r.gave_way_left - r.left >= 16 and gives_way(r.state.priority, asked.state.priority)
            ]
            if not able:
                break
            giving = rng.choice(able)
            giving.gave_way_left = giving.left
            self.running.remove(giving)
            self.queue.append(giving)
            self.queue.remove(asked)
            self.running.append(asked)
        self.queue.sort(key=lambda asked: (asked.state.priority, asked.state.number))
        room = STEP_TOKENS - sum(asked.prompt_left or 1 for asked in self.running)
        while len(self.running) < PLACES and self.queue and room > 0:
            self.running.append(self.queue.pop(0))
            room -= self.running[-1].prompt_left or 1

    def take_step(self) -> tuple[float, list[Asked]]:
        """Return how long the step takes and the requests that get a token at its end."""
        answers = [asked for asked in self.running if not asked.prompt_left]
        room = STEP_TOKENS - len(answers)
        seconds = COSTS.step_s + COSTS.output_token_s * len(answers)
        for asked in self.running:
            if asked.prompt_left and room > 0:
                computed = min(room, asked.prompt_left)
                asked.prompt_left -= computed
                room -= computed
                seconds += computed * COSTS.prompt_token_s
                if not asked.prompt_left:
                    answers.append(asked)
        self.step += 1
        return seconds, answers


class OverloadedFleet:
    """A fleet of `ENGINES` engines whose tenants send until the end. Its engines answer about 26 requests of the usual size a second."""

    def __init__(self, tenants: Sequence[Tenant], seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = {f"e{number}": Engine() for number in range(ENGINES)}
        self.fleet = fleet_of(
            *self.engines,
            credit=2048,
            heartbeat_timeout_s=1e9,
            no_replica_s=1e9,
            max_waiting_requests=100_000,
            max_replicas=ENGINES,
        )
        self.fleet.handle(StepCostsMeasured(COSTS), now=0.0)
        self.now = 0.0
        self.asked: list[Asked] = []
        self.open: dict[str, Asked] = {}
        self._events: list[tuple[float, int, str, Any]] = []
        self._num = 0
        for tenant in tenants:
            self._at(self.random.expovariate(tenant.rate), "arrival", tenant)
        self._at(0.0, "tick", None)
        for name in self.engines:
            self._at(self.random.random() * HEARTBEAT_S, "heartbeat", name)
            self._at(0.0, "step", name)
        self._ending: dict[str, list[Asked]] = defaultdict(list)

    def _at(self, at: float, what: str, of: Any) -> None:
        self._num += 1
        heapq.heappush(self._events, (at, self._num, what, of))

    def run(self, until_s: float) -> None:
        while self._events[0][0] < until_s:
            self.now, _, what, of = heapq.heappop(self._events)
            getattr(self, f"_{what}")(of)

    def _arrival(self, tenant: Tenant) -> None:
        self._ask(Asked(tenant, f"r{self._num}", self.now))
        self._at(self.now + self.random.expovariate(tenant.rate), "arrival", tenant)

    def _ask(self, asked: Asked) -> None:
        tenant = asked.tenant
        asked.prompt_left, asked.left = self.random.randint(*tenant.prompt), self.random.randint(*tenant.answer)
        event = RequestArrived(
            asked.name,
            asked.prompt_left,
            tenant.answer[1],
            Resume.CONTINUE,
            asked.name,
            start_by=self.now + tenant.within_s,
            first_token_s=tenant.within_s,
            tenant=tenant.name,
            weight=tenant.weight,
        )
        self.asked.append(asked)
        self.open[asked.name] = asked
        self._carry_out(self.fleet.handle(event, now=self.now))

    def _tick(self, _: object) -> None:
        self._carry_out(self.fleet.handle(Ticked(), now=self.now))
        self._at(self.now + TICK_S, "tick", None)

    def _heartbeat(self, name: str) -> None:
        engine = self.engines[name]
        load = EngineLoad(engine.step, len(engine.running), len(engine.queue))
        self._carry_out(self.fleet.handle(HeartbeatArrived(name, load, draining=False), now=self.now))
        self._at(self.now + HEARTBEAT_S, "heartbeat", name)

    def _step(self, name: str) -> None:
        engine, items = self.engines[name], list[Output]()
        for asked in self._ending.pop(name, []):
            if asked.name not in self.open or asked not in engine.running:
                continue
            asked.left -= 1
            if asked.begun_at is None:
                asked.begun_at = self.now
            items.append(Output(asked.state.attempt_id, [1], finish_reason=None if asked.left else "stop"))
            if not asked.left:
                engine.running.remove(asked)
                del self.open[asked.name]
        if items:
            self._carry_out(self.fleet.handle(outputs(name, *items), now=self.now))
        engine.begin(self.random)
        if not engine.running:
            engine.idle_s += IDLE_STEP_S * PLACES
            self._at(self.now + IDLE_STEP_S, "step", name)
            return
        seconds, self._ending[name] = engine.take_step()
        if not engine.queue:
            engine.idle_s += seconds * (PLACES - len(engine.running))
        self._at(self.now + seconds, "step", name)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, StartAttempt):
                asked = self.open[instruction.request_id]
                asked.state = self.fleet.requests[instruction.request_id]
                self.engines[instruction.replica_id].queue.append(asked)
            elif isinstance(instruction, AbortAttempts):
                engine = self.engines[instruction.replica_id]
                ids = {attempt_id.rpartition("@")[0] for attempt_id in instruction.attempt_ids}
                engine.queue = [asked for asked in engine.queue if asked.name not in ids]
                engine.running = [asked for asked in engine.running if asked.name not in ids]
            elif isinstance(instruction, FailRequest):
                asked, error = self.open.pop(instruction.request_id), instruction.error
                assert isinstance(error, CannotStartInTime)
                if error.waited_s:
                    asked.late_at = self.now
                else:
                    asked.refused_at, asked.expected_s = self.now, error.expected_s
