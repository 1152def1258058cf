"""Tenants of weights 1, 2 and 4 want all of two engines that several ingresses share, in simulated time.

Each ingress is a `FleetState` with prefix affinity. A client's connection stays at one ingress, and its next request goes over a connection
that has become free, so that each tenant's requests are divided unevenly, and differently each second. What requests cost is learnt.
"""

import random
from dataclasses import dataclass

import pytest

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.events import HeartbeatArrived, LinkOpened, OutputsArrived, RequestArrived, StepCostsMeasured, WaitsReported
from serve_app.core.fair_tags import gives_way, is_ahead
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import Instruction, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.order_board import OrderBoard
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import RequestState, Resume
from serve_app.core.step_costs import MeasuredCosts
from tests.core.helpers import Output

COSTS = MeasuredCosts(
    step_s=0.029,
    output_token_s=2e-4,
    prompt_token_s=1e-4,
    step_error_s=1e-3,
    output_token_error_s=1e-5,
    prompt_token_error_s=1e-5,
)
WEIGHTS = (1.0, 2.0, 4.0)
ENGINES, PLACES, DEPTH, POOLS = 2, 16, 48, 8
SHARED_TOKENS, KINDS, BLOCK = 256, 4, 16
EXCHANGE_S, BEAT_S = 1.0, 2.0
SETTLED_S, UNTIL_S = 30.0, 150.0


@dataclass(frozen=True)
class Cached:
    num_cached_tokens: int


@dataclass(eq=False)
class Asked:
    tenant: int
    pool: int
    ingress: int
    kind: int
    own_tokens: int
    left: int
    state: RequestState | None = None
    attempt_id: str = ""
    to_compute: int | None = None
    """Tokens before the next one of the answer; None before a step has begun it."""
    cached_tokens: int = 0
    num_emitted: int = 0
    gave_way_at: int = -16

    @property
    def key(self) -> tuple[int, int]:
        assert self.state is not None
        return self.state.priority, self.state.number


class Engine:
    """Each step gives a token to each running request whose prompt is computed. ``at``: the end of its latest step."""

    def __init__(self) -> None:
        self.at = 0.0
        self.running: list[Asked] = []
        self.queue: list[Asked] = []
        self.cache: set[tuple[int, int]] = set()
        self.outputs: dict[int, list[Output]] = {}
        self.ended: list[Asked] = []

    def step(self) -> dict[int, float]:
        """Compute a step; return the GPU-seconds of each tenant."""
        self._fill()
        cost_s, room, running = COSTS.step_s, 512 - len(self.running), list(self.running)
        self.outputs, self.ended = {}, []
        for asked in running:
            if asked.to_compute is None:
                prefix = asked.tenant, asked.kind
                asked.cached_tokens = SHARED_TOKENS if prefix in self.cache else 0
                self.cache.add(prefix)
                asked.to_compute = SHARED_TOKENS + asked.own_tokens + asked.num_emitted - asked.cached_tokens
            computed = min(room, asked.to_compute)
            room -= computed
            asked.to_compute -= computed
            cost_s += computed * COSTS.prompt_token_s
            if not asked.to_compute:
                cost_s += COSTS.output_token_s
                self._emit(asked)
        self.at += cost_s
        used = dict.fromkeys(range(len(WEIGHTS)), 0.0)
        for asked in running:
            used[asked.tenant] += cost_s / len(running)
        return used

    def _emit(self, asked: Asked) -> None:
        asked.num_emitted += 1
        asked.left -= 1
        stats = Cached(asked.cached_tokens) if asked.num_emitted == 1 else None
        output = Output(asked.attempt_id, [5], None if asked.left else "length", prefill_stats=stats)
        self.outputs.setdefault(asked.ingress, []).append(output)
        if not asked.left:
            self.running.remove(asked)
            self.ended.append(asked)

    def _fill(self) -> None:
        """Begin requests that wait; those of tenants that are not ahead take places of others, if a place is missing."""
        for asked in sorted((each for each in self.queue if not is_ahead(each.key[0])), key=lambda each: each.key):
            if len(self.running) == PLACES:
                able = [
                    each
                    for each in self.running
                    if each.num_emitted - each.gave_way_at >= 16 and gives_way(each.key[0], asked.key[0])
                ]
                if not able:
                    break
                giving = min(able, key=lambda each: each.num_emitted)
                giving.gave_way_at, giving.to_compute = giving.num_emitted, None
                self.running.remove(giving)
                self.queue.append(giving)
            self.queue.remove(asked)
            self.running.append(asked)
        self.queue.sort(key=lambda each: each.key)
        while len(self.running) < PLACES and self.queue:
            self.running.append(self.queue.pop(0))


class Ingresses:
    """The ingresses, their clients, and the lease board."""

    def __init__(self, num: int, seed: int) -> None:
        self.random, self.num, self.now = random.Random(seed), 0, 0.0
        self.engines = [Engine() for _ in range(ENGINES)]
        self.fleets = [self._fleet() for _ in range(num)]
        self.board = OrderBoard(10.0)
        self.exchange_at = [self.random.uniform(0.0, EXCHANGE_S) for _ in range(num)]
        self.beat_at = [self.random.uniform(0.0, BEAT_S) for _ in range(ENGINES)]
        self.idle: dict[tuple[int, int], list[int]] = {(t, pool): [] for t in range(len(WEIGHTS)) for pool in range(POOLS)}
        """Tenant and pool of connections -> the ingresses of those that are free."""
        self.open: dict[str, Asked] = {}
        for tenant in range(len(WEIGHTS)):
            for _ in range(DEPTH):
                self._ask(tenant)

    def shares(self) -> list[float]:
        """Play; return each tenant's share of the GPU time."""
        served_s = [0.0] * len(WEIGHTS)
        while self.now < UNTIL_S:
            number, engine = min(enumerate(self.engines), key=lambda each: each[1].at)
            self.now = engine.at
            self._exchange()
            self._deliver(number, engine)
            if self.now >= self.beat_at[number]:
                self.beat_at[number] += BEAT_S
                load = EngineLoad(0, len(engine.running), len(engine.queue), 0.5)
                for ingress, fleet in enumerate(self.fleets):
                    self._follow(ingress, fleet.handle(HeartbeatArrived(f"e{number}", load, draining=False), now=self.now))
            for tenant, seconds in engine.step().items():
                served_s[tenant] += seconds * (self.now >= SETTLED_S)
        for fleet in self.fleets:
            fleet.validate()
        return [seconds / sum(served_s) for seconds in served_s]

    def _fleet(self) -> FleetState:
        settings = FleetSettings(model="m", max_waiting_requests=1000, no_replica_s=1e9, heartbeat_timeout_s=1e9)
        fleet = FleetState(settings, PrefixAffinity(continued=0.0))
        for number in range(ENGINES):
            fleet.handle(LinkOpened(f"e{number}", 2048, kv_tokens=60_000), now=0.0)
        fleet.handle(StepCostsMeasured(COSTS), now=0.0)
        return fleet

    def _ask(self, tenant: int) -> None:
        self.num += 1
        name, pool, number = str(self.num), self.num % POOLS, self.random.randrange
        free = self.idle[tenant, pool]
        ingress = free.pop() if free else number(len(self.fleets))
        asked = self.open[name] = Asked(tenant, pool, ingress, number(KINDS), 32 + number(65), 16 + number(33))
        shared = [((tenant * KINDS + asked.kind + 1) << 40) + block for block in range(SHARED_TOKENS // BLOCK)]
        own = [(1 << 63) + (self.num << 16) + block for block in range(asked.own_tokens // BLOCK)]
        prefix, tokens = Prefix([*shared, *own], BLOCK), SHARED_TOKENS + asked.own_tokens
        event = RequestArrived(
            name, tokens, asked.left, Resume.CONTINUE, name, prefix=prefix, tenant=f"t{tenant}", weight=WEIGHTS[tenant]
        )
        self._follow(ingress, self.fleets[ingress].handle(event, now=self.now))

    def _follow(self, ingress: int, instructions: list[Instruction]) -> None:
        for start in instructions:
            if isinstance(start, StartAttempt):
                asked = self.open[start.request_id]
                asked.state, asked.attempt_id = self.fleets[ingress].requests[start.request_id], start.attempt_id
                self.engines[int(start.replica_id[1:])].queue.append(asked)

    def _deliver(self, number: int, engine: Engine) -> None:
        """Deliver the outputs of the engine's latest step. Each client whose answer has ended sends its next request."""
        for ingress, outputs in engine.outputs.items():
            self._follow(ingress, self.fleets[ingress].handle(OutputsArrived(f"e{number}", outputs), now=self.now))
        for asked in engine.ended:
            assert asked.state is not None
            del self.open[asked.state.request_id]
            self.idle[asked.tenant, asked.pool].append(asked.ingress)
        for asked in engine.ended:
            self._ask(asked.tenant)

    def _exchange(self) -> None:
        for ingress, fleet in enumerate(self.fleets):
            if self.now >= self.exchange_at[ingress]:
                self.exchange_at[ingress] += EXCHANGE_S
                elsewhere = self.board.exchange(str(ingress), {"m": fleet.order.report()}, self.now)
                fleet.handle(WaitsReported(elsewhere["m"]), now=self.now)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ingresses", [1, 2, 3])
def test_shares_are_those_of_weights_whatever_part_of_each_tenant_an_ingress_has(num_ingresses: int, seed: int) -> None:
    assert Ingresses(num_ingresses, seed).shares() == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.05)
