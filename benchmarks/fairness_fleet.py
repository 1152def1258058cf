"""This module simulates many engines that serve many tenants through several ingresses, in simulated time. Pure.

Routing and order are the product's own: a `FleetState` with `PrefixAffinity` per ingress, and one `OrderBoard`. An engine has slots. A
request holds a slot for the time of its uncached prompt and of its answer, and an engine with all slots in use computes one GPU-second per
second. As vLLM does with `--scheduling-policy priority`, an engine gives a free slot to the waiting request with the lowest
`RequestState.priority`.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.autoscaling.simulation.simulated_replica import SimulatedOutput
from serve_app.core.affinity import PrefixAffinity
from serve_app.core.events import (
    HeartbeatArrived,
    LinkOpened,
    OutputsArrived,
    RequestArrived,
    StepCostsMeasured,
    WaitsReported,
)
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import Instruction, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.order_board import LaneWaits, OrderBoard, Waits
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import Resume
from serve_app.core.routing import ReplicaState
from serve_app.core.step_costs import MeasuredCosts

COSTS = MeasuredCosts(
    step_s=0.0, output_token_s=2e-3, prompt_token_s=1e-4, step_error_s=1e-6, output_token_error_s=1e-6, prompt_token_error_s=1e-6
)
NUM_SLOTS = 4
BLOCK_TOKENS = 256
CACHE_TOKENS = 60_000
NUM_GROUPS = 2
"""Beginnings that the prompts of one tenant share: each takes half of a prompt, in full blocks."""
CREDIT = 2048
BEAT_S = 2.0
EXCHANGE_S, DELAY_S = 1.0, 0.1
"""Interval of the exchange with the board, and the longest delay of a message."""
SAMPLE_S = 0.5
RAMP_S = 10.0
"""Time in which a tenant that always has some requests open sends the first of them."""


@dataclass(frozen=True, slots=True)
class Client:
    """One tenant's demand: ``num_open`` requests at any time, or, with 0, ``rate`` requests per second at random times."""

    name: str
    weight: float
    prompt_tokens: int
    output_tokens: int
    num_open: int
    rate: float
    ingresses: tuple[int, ...]
    begins_at: float = 0.0
    """When it sends its first request, if it always has some open."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Ingresses are numbers, times are seconds since the start."""

    loss: float = 0.05
    """Share of the messages to and from the board that are lost."""
    restart: tuple[int, float] | None = None
    """An ingress that starts anew: its requests end, and their clients send them again."""
    cut: tuple[int, float, float] | None = None
    """An ingress, and from when until when it cannot reach the board."""


class Report(NamedTuple):
    """One report to the board, as `core.quota_shares.Report`. ``ingress`` is new for each start of an ingress."""

    ingress: str
    number: int
    last_answered: int
    waits: LaneWaits


class _Stats(NamedTuple):
    num_cached_tokens: int


@dataclass(slots=True, eq=False)
class Ask:
    """One request. Times are None until then. ``told_s``: after how many seconds it would start, as expected at its arrival."""

    number: int
    tenant: int
    ingress: int
    prompt_tokens: int
    output_tokens: int
    group: int
    arrived_at: float
    engine: int = -1
    attempt_id: str = ""
    told_s: float | None = None
    cached_tokens: int = 0
    cost_s: float = 0.0
    started_at: float | None = None
    first_at: float | None = None
    ends_at: float = 0.0
    is_over: bool = False

    def served_s(self, now: float) -> float:
        """Return the GPU-seconds that it has had."""
        if self.started_at is None:
            return 0.0
        return self.cost_s * min(1.0, (now - self.started_at) / (self.ends_at - self.started_at))


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: who waits, by (priority, number), who runs, and which beginnings of prompts it has cached."""

    replica_id: str
    waiting: list[tuple[int, int, Ask]] = field(default_factory=list)
    running: set[Ask] = field(default_factory=set)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0

    def look_up(self, group: int, tokens: int) -> int:
        """Return how many tokens of a beginning are cached, and cache all of them."""
        if group in self.cache:
            self.cache.move_to_end(group)
            return tokens
        self.cache[group] = tokens
        self.cached_tokens += tokens
        while self.cached_tokens > CACHE_TOKENS:
            self.cached_tokens -= self.cache.popitem(last=False)[1]
        return 0

    def load(self) -> EngineLoad:
        return EngineLoad(0, len(self.running), len(self.waiting), 0.5)


class FairFleet:
    """The fleet. ``is_fair``: engines serve by priority; else in the order of arrival, with all requests of one tenant."""

    def __init__(
        self, clients: Sequence[Client], *, num_engines: int, num_ingresses: int, seed: int, is_fair: bool, faults: Faults
    ) -> None:
        self.clients = clients
        self.is_fair = is_fair
        self.faults = faults
        self.random = random.Random(seed)
        self.now = 0.0
        self.engines = [Engine(f"e{number}") for number in range(num_engines)]
        self.fleets = [self._fleet() for _ in range(num_ingresses)]
        self.board = OrderBoard(10.0)
        self.reports = [Report(str(number), 0, 0, {}) for number in range(num_ingresses)]
        """The latest report of each ingress."""
        self.open: dict[int, Ask] = {}
        """All unfinished requests by number."""
        self.ended: list[Ask] = []
        self.done_s = [0.0] * len(clients)
        """GPU-seconds of each tenant's requests that have ended."""
        self.samples: list[tuple[float, list[float], list[int], list[int]]] = []
        """(time, then for each tenant: GPU-seconds that it has had, requests that wait, requests that run)."""
        self.expected_hit_tokens = 0
        self._number = 0
        self._agenda: list[tuple[float, int, str, Any]] = []
        self._order = 0

    def run(self, seconds: float) -> None:
        for number, client in enumerate(self.clients):
            for _ in range(client.num_open):
                at = client.begins_at + self.random.uniform(0.0, RAMP_S)
                self._put(at, "arrival", (number, self.random.choice(client.ingresses)))
            if client.rate:
                self._put(self.random.expovariate(client.rate), "open arrival", number)
        for ingress in range(len(self.fleets)):
            self._put(EXCHANGE_S * ingress / len(self.fleets), "report", ingress)
        self._put(BEAT_S, "beat", None)
        self._put(SAMPLE_S, "sample", None)
        if self.faults.restart is not None:
            self._put(self.faults.restart[1], "restart", self.faults.restart[0])
        on = {name.replace("_", " ")[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}
        while self._agenda[0][0] < seconds:
            self.now, _, kind, what = heapq.heappop(self._agenda)
            on[kind](what)

    def arrival_of(self, ask: Ask) -> RequestArrived:
        """Return the event of a request at its ingress."""
        client = self.clients[ask.tenant]
        shared = self._shared_tokens(ask) // BLOCK_TOKENS
        hashes = [(ask.group << 40) + point for point in range(shared)]
        hashes += [(1 << 63) + (ask.number << 16) + point for point in range(ask.prompt_tokens // BLOCK_TOKENS - shared)]
        name, tenant = str(ask.number), client.name if self.is_fair else ""
        return RequestArrived(
            name,
            ask.prompt_tokens,
            4 * client.output_tokens,
            Resume.CONTINUE,
            name,
            prefix=Prefix(hashes, BLOCK_TOKENS),
            tenant=tenant,
            weight=client.weight if self.is_fair else 1.0,
        )

    def ask_of(self, tenant: int, ingress: int) -> Ask:
        """Return a new request of random length."""
        self._number += 1
        client, uniform = self.clients[tenant], self.random.uniform
        prompt_tokens, output_tokens = (round(n * uniform(0.5, 1.5)) for n in (client.prompt_tokens, client.output_tokens))
        group = tenant * NUM_GROUPS + self.random.randrange(NUM_GROUPS)
        return Ask(self._number, tenant, ingress, prompt_tokens, max(2, output_tokens), group, self.now)

    def _fleet(self) -> FleetState:
        routing = PrefixAffinity(continued=0.0)  # no prompt is the next turn of a conversation
        fleet = FleetState(FleetSettings(model="m", max_waiting_requests=1 << 20, no_replica_s=1e9), routing)
        for engine in self.engines[:-1]:  # not by LinkOpened, of which each costs a look at all replicas: 0.5 s in all
            opened = LinkOpened(engine.replica_id, CREDIT, kv_tokens=CACHE_TOKENS)
            fleet.replicas[engine.replica_id] = ReplicaState.linked(opened, now=self.now)
            routing.changed(engine.replica_id)
        fleet.handle(LinkOpened(self.engines[-1].replica_id, CREDIT, kv_tokens=CACHE_TOKENS), now=self.now)
        fleet.handle(StepCostsMeasured(COSTS), now=self.now)
        return fleet

    def _put(self, at: float, kind: str, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (at, self._order, kind, what))

    def _on_open_arrival(self, tenant: int) -> None:
        client = self.clients[tenant]
        self._put(self.now + self.random.expovariate(client.rate), "open arrival", tenant)
        self._on_arrival((tenant, self.random.choice(client.ingresses)))

    def _on_arrival(self, what: tuple[int, int]) -> None:
        ask = self.ask_of(*what)
        self.open[ask.number] = ask
        fleet = self.fleets[ask.ingress]
        self._follow(ask.ingress, fleet.handle(self.arrival_of(ask), now=self.now))
        ask.told_s = fleet.order.expected_wait_s(fleet.requests[str(ask.number)], self.now)

    def _follow(self, ingress: int, instructions: Sequence[Instruction]) -> None:
        for start in instructions:
            if isinstance(start, StartAttempt):
                ask = self.open[int(start.request_id)]
                request = self.fleets[ingress].requests[start.request_id]
                ask.engine, ask.attempt_id = int(start.replica_id[1:]), start.attempt_id
                self.expected_hit_tokens += request.trail.expected_hit_tokens
                engine = self.engines[ask.engine]
                heapq.heappush(engine.waiting, (request.priority if self.is_fair else 0, ask.number, ask))
                self._fill(engine)

    def _fill(self, engine: Engine) -> None:
        """Give the free slots to those that wait."""
        while engine.waiting and len(engine.running) < NUM_SLOTS:
            ask = heapq.heappop(engine.waiting)[2]
            if ask.is_over:
                continue
            ask.cached_tokens = engine.look_up(ask.group, self._shared_tokens(ask))
            prompt_s = (ask.prompt_tokens - ask.cached_tokens) * COSTS.prompt_token_s
            ask.cost_s = prompt_s + ask.output_tokens * COSTS.output_token_s
            ask.started_at, ask.ends_at = self.now, self.now + NUM_SLOTS * ask.cost_s
            engine.running.add(ask)
            self._put(self.now + NUM_SLOTS * (prompt_s + COSTS.output_token_s), "first", ask)

    def _shared_tokens(self, ask: Ask) -> int:
        return min(self.clients[ask.tenant].prompt_tokens, ask.prompt_tokens) // (2 * BLOCK_TOKENS) * BLOCK_TOKENS

    def _on_first(self, ask: Ask) -> None:
        if not ask.is_over:
            ask.first_at = self.now
            self._put(ask.ends_at, "end", ask)
            self._output(ask, SimulatedOutput(ask.attempt_id, [0], prefill_stats=_Stats(ask.cached_tokens)))

    def _on_end(self, ask: Ask) -> None:
        if not ask.is_over:
            self._close(ask)
            self.ended.append(ask)
            self._output(ask, SimulatedOutput(ask.attempt_id, [0] * (ask.output_tokens - 1), "stop"))
            self._fill(self.engines[ask.engine])

    def _output(self, ask: Ask, output: SimulatedOutput) -> None:
        event = OutputsArrived(self.engines[ask.engine].replica_id, [output])
        self._follow(ask.ingress, self.fleets[ask.ingress].handle(event, now=self.now))

    def _close(self, ask: Ask) -> None:
        """Forget a request; its client sends the next one if it always has some open."""
        ask.is_over = True
        del self.open[ask.number]
        self.engines[ask.engine].running.discard(ask)
        self.done_s[ask.tenant] += ask.served_s(self.now)
        if self.clients[ask.tenant].num_open:
            self._put(self.now, "arrival", (ask.tenant, ask.ingress))

    def _on_restart(self, ingress: int) -> None:
        self.fleets[ingress] = self._fleet()
        self.reports[ingress] = Report(f"{ingress} anew", 0, 0, {})
        for ask in [ask for ask in self.open.values() if ask.ingress == ingress]:
            self._close(ask)
        for engine in self.engines:
            self._fill(engine)

    def _on_report(self, ingress: int) -> None:
        self._put(self.now + EXCHANGE_S, "report", ingress)
        last = self.reports[ingress]
        report = self.reports[ingress] = last._replace(number=last.number + 1, waits=self.fleets[ingress].order.report())
        self._send(ingress, "board", (ingress, report))

    def _on_board(self, what: tuple[int, Report]) -> None:
        ingress, report = what
        waits = self.board.exchange(
            report.ingress, {"m": report.waits}, self.now, number=report.number, last_answered=report.last_answered
        )
        self._send(ingress, "answer", (ingress, report.ingress, waits))

    def _on_answer(self, what: tuple[int, str, Waits]) -> None:
        ingress, name, waits = what
        report = self.reports[ingress]
        if report.ingress == name:  # else it has started anew meanwhile
            self.reports[ingress] = report._replace(last_answered=report.number)
            self.fleets[ingress].order.answered(report.waits)
            self.fleets[ingress].handle(WaitsReported(waits["m"]), now=self.now)

    def _send(self, ingress: int, kind: str, what: Any) -> None:
        is_cut = (
            self.faults.cut is not None and self.faults.cut[0] == ingress and self.faults.cut[1] <= self.now < self.faults.cut[2]
        )
        if not is_cut and self.random.random() >= self.faults.loss:
            self._put(self.now + self.random.uniform(0.0, DELAY_S), kind, what)

    def _on_beat(self, _: None) -> None:
        self._put(self.now + BEAT_S, "beat", None)
        for engine in self.engines:
            event = HeartbeatArrived(engine.replica_id, engine.load(), draining=False)
            for ingress, fleet in enumerate(self.fleets):
                self._follow(ingress, fleet.handle(event, now=self.now))

    def _on_sample(self, _: None) -> None:
        self._put(self.now + SAMPLE_S, "sample", None)
        served_s, waiting, running = list(self.done_s), [0] * len(self.clients), [0] * len(self.clients)
        for ask in self.open.values():
            served_s[ask.tenant] += ask.served_s(self.now)
            waiting[ask.tenant] += ask.first_at is None
            running[ask.tenant] += ask.first_at is not None
        self.samples.append((self.now, served_s, waiting, running))
