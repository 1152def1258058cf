"""The GPU-seconds of all requests are the time that the engines spent in steps, and each request pays for what it used."""

import random
from dataclasses import asdict, dataclass, field

import pytest

from serve_app.core.events import HeartbeatArrived
from serve_app.core.fleet import FleetState
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts
from serve_app.ingress.books.gpu_time import GpuTime
from serve_app.ingress.exchange.engine_requests import EngineRequests
from tests.core.helpers import Output, arrived, fleet_of, outputs

STEP_S, OUTPUT_S, PROMPT_S = 0.03, 0.0005, 0.0004
COSTS = MeasuredCosts(
    step_s=STEP_S,
    output_token_s=OUTPUT_S,
    prompt_token_s=PROMPT_S,
    step_error_s=1.0,
    output_token_error_s=1.0,
    prompt_token_error_s=1.0,
)
LEASED = asdict(COSTS)


@dataclass
class Engine:
    """An engine that obeys the law of costs exactly: each step makes a token for each request, after the prompts of new ones."""

    fleet: FleetState
    gpu_time: GpuTime
    now: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    paid_s: dict[str, float | None] = field(default_factory=dict)
    _running: dict[str, RequestState] = field(default_factory=dict)
    _beat_at: float = 0.0

    def ask(self, request_id: str, *, prompt_tokens: int, max_tokens: int) -> None:
        event = arrived(request_id, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        self.fleet.handle(event, now=self.now)
        self._running[request_id] = self.fleet.requests[request_id]

    def step(self) -> None:
        new = sum(r.prompt_tokens for r in self._running.values() if not r.emitted_ids)
        took_s = STEP_S + OUTPUT_S * len(self._running) + PROMPT_S * new
        self.now, self.busy_s, self.num_steps = self.now + took_s, self.busy_s + took_s, self.num_steps + 1
        made = [Output(r.attempt_id, [1], finish_reason="length" if r.max_tokens == 1 else None) for r in self._running.values()]
        self.fleet.handle(outputs("a", *made), now=self.now)
        if self.now >= self._beat_at:
            self.beat()
        for request_id in [r for r, state in self._running.items() if state.trail.end]:
            requests = EngineRequests()
            requests.add(self._running.pop(request_id), request_id)
            self.paid_s[request_id] = self.gpu_time.seconds(requests.totals("complete"), self.now)

    def beat(self) -> None:
        self._beat_at = self.now + 1.0
        load = EngineLoad(self.num_steps, sum(not r.trail.end for r in self._running.values()))
        self.fleet.handle(HeartbeatArrived("a", load, draining=False), now=self.now)

    @property
    def sum_s(self) -> float:
        return sum(paid or 0.0 for paid in self.paid_s.values())

    @property
    def num_running(self) -> int:
        return len(self._running)


def engine(gpus: int = 1) -> Engine:
    fleet = fleet_of("a", credit=1000)
    made = Engine(fleet, GpuTime(fleet, gpus))
    made.gpu_time.learn([LEASED])
    made.beat()
    return made


@pytest.mark.parametrize("rate", [0.2, 1.0, 4.0])
def test_the_sum_over_all_requests_is_the_time_in_steps(rate: float) -> None:
    chosen, one, due = random.Random(1), engine(), 0.0
    for number in range(400):
        due += chosen.expovariate(rate)
        while one.num_running and one.now < due:
            one.step()
        one.now = max(one.now, due)
        one.ask(f"r{number}", prompt_tokens=chosen.randrange(20, 600), max_tokens=chosen.randrange(2, 120))
    while one.num_running:
        one.step()
    assert one.sum_s == pytest.approx(one.busy_s, rel=0.03)


def test_who_decodes_together_shares_the_steps_and_a_prompt_is_paid_by_its_own_request() -> None:
    one = engine()
    for number in range(200):
        one.ask(f"long{number}", prompt_tokens=1000, max_tokens=20)
        one.ask(f"short{number}", prompt_tokens=10, max_tokens=20)
        while one.num_running:
            one.step()
    long, short = one.paid_s["long199"], one.paid_s["short199"]
    assert long == pytest.approx(20 * (STEP_S / 2 + OUTPUT_S) + 1000 * PROMPT_S, rel=0.03)
    assert short == pytest.approx(20 * (STEP_S / 2 + OUTPUT_S) + 10 * PROMPT_S, rel=0.03)


def test_all_gpus_of_a_replica_count_and_a_replica_without_one_counts_as_one() -> None:
    paid = []
    for gpus in (0, 1, 4):
        one = engine(gpus)
        one.ask("r", prompt_tokens=10, max_tokens=3)
        while one.num_running:
            one.step()
        paid.append(one.paid_s["r"])
    assert paid == pytest.approx([0.0955, 0.0955, 4 * 0.0955])


def test_without_measured_costs_there_are_no_gpu_seconds_and_who_used_nothing_has_none() -> None:
    fleet = fleet_of("a")
    one = Engine(fleet, GpuTime(fleet, 1))
    one.gpu_time.learn([None, {"step_s": 1.0, "of another release": 2.0}])
    one.ask("r", prompt_tokens=10, max_tokens=1)
    assert one.gpu_time.seconds(EngineRequests().totals("rejected"), 0.0) == 0.0
    one.step()
    assert one.paid_s == {"r": None}


def test_costs_stay_known_while_no_replica_has_a_lease() -> None:
    one = engine()
    one.gpu_time.learn([])
    for number in range(2):
        one.ask(f"r{number}", prompt_tokens=10, max_tokens=100)
        while one.num_running:
            one.step()
        one.beat()
    assert one.paid_s["r1"] == pytest.approx(100 * (STEP_S + OUTPUT_S) + 10 * PROMPT_S, rel=0.05)
