"""The GPU-seconds of all requests are the time that the engines spent in steps, and each request pays for what it used."""

import random
from dataclasses import asdict, dataclass, field

import pytest

from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened
from serve_app.core.fleet import FleetState
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState
from serve_app.core.step_costs import CONTEXT_TOKENS, MeasuredCosts
from serve_app.ingress.books.gpu_time import GpuTime
from serve_app.ingress.exchange.engine_requests import EngineRequests
from tests.core.helpers import Output, arrived, fleet_of, outputs

STEP_S, OUTPUT_S, PROMPT_S = 0.03, 0.0005, 0.0004
COSTS = asdict(
    MeasuredCosts(
        step_s=STEP_S,
        output_token_s=OUTPUT_S,
        prompt_token_s=PROMPT_S,
        step_error_s=1.0,
        output_token_error_s=1.0,
        prompt_token_error_s=1.0,
    )
)


@dataclass
class Engine:
    """An engine that obeys the law of costs: each step makes a token for each request, after the prompts of new ones."""

    gpus: int = 1
    fleet: FleetState = field(default_factory=lambda: fleet_of("a", credit=1000))
    now: float = 0.0
    busy_s: float = 0.0
    paid_s: dict[str, float | None] = field(default_factory=dict)
    running: dict[str, RequestState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gpu_time = GpuTime(self.gpus)
        self.gpu_time.learn([COSTS])

    def ask(self, request_id: str, *, prompt_tokens: int, max_tokens: int) -> None:
        self.fleet.handle(arrived(request_id, prompt_tokens=prompt_tokens, max_tokens=max_tokens), now=self.now)
        self.running[request_id] = self.fleet.requests[request_id]

    def step(self, *, others: int = 0) -> None:
        """Make a step, also for the requests of ``others`` of another ingress."""
        new = sum(r.prompt_tokens for r in self.running.values() if not r.emitted_ids)
        took_s = STEP_S + OUTPUT_S * (len(self.running) + others) + PROMPT_S * new
        self.now, self.busy_s = self.now + took_s, self.busy_s + took_s
        made = [Output(r.attempt_id, [1], finish_reason="length" if r.max_tokens == 1 else None) for r in self.running.values()]
        self.fleet.handle(outputs("a", *made), now=self.now)
        for request_id in [name for name, state in self.running.items() if state.trail.end]:
            self._pay(request_id)

    def _pay(self, request_id: str) -> None:
        requests = EngineRequests()
        requests.add(self.running.pop(request_id), request_id)
        self.paid_s[request_id] = self.gpu_time.seconds(requests.totals("complete"))

    def run(self) -> None:
        while self.running:
            self.step()

    @property
    def sum_s(self) -> float:
        return sum(paid or 0.0 for paid in self.paid_s.values())


@pytest.mark.parametrize("rate", [0.2, 1.0, 4.0])
def test_the_sum_over_all_requests_is_the_time_in_steps(rate: float) -> None:
    chosen, one, due = random.Random(1), Engine(), 0.0
    for number in range(400):
        due += chosen.expovariate(rate)
        while one.running and one.now < due:
            one.step()
        one.now = max(one.now, due)
        one.ask(f"r{number}", prompt_tokens=chosen.randrange(20, 600), max_tokens=chosen.randrange(1, 120))
    one.run()
    assert one.sum_s == pytest.approx(one.busy_s)


def test_who_decodes_together_shares_the_steps_and_each_pays_for_its_own_prompt() -> None:
    one = Engine()
    one.ask("long", prompt_tokens=1000, max_tokens=20)
    one.ask("short", prompt_tokens=10, max_tokens=10)
    one.run()
    assert one.paid_s == pytest.approx(
        {
            "short": 10 * STEP_S / 2 + 10 * OUTPUT_S + 10 * PROMPT_S,
            "long": 10 * STEP_S / 2 + 10 * STEP_S + 20 * OUTPUT_S + 1000 * PROMPT_S,
        }
    )


def test_a_request_pays_nothing_for_the_steps_for_which_it_waited_in_the_engine() -> None:
    one = Engine()
    one.ask("first", prompt_tokens=10, max_tokens=5)
    one.fleet.handle(arrived("late", prompt_tokens=10, max_tokens=1), now=0.0)
    late = one.fleet.requests["late"]
    one.run()
    one.running["late"] = late
    one.run()
    assert one.paid_s["late"] == pytest.approx(STEP_S + OUTPUT_S + 10 * PROMPT_S)


def test_two_ingresses_share_the_steps_by_their_requests() -> None:
    one = Engine()
    for name in ("a", "b"):
        one.ask(name, prompt_tokens=10, max_tokens=5)
    one.fleet.handle(HeartbeatArrived("a", EngineLoad(1, running=6, waiting=2), draining=False), now=0.0)
    for _ in range(5):
        one.step(others=6)
    assert one.paid_s["a"] == one.paid_s["b"] == pytest.approx(5 * (STEP_S / 8 + OUTPUT_S) + 10 * PROMPT_S)


def test_requests_of_another_ingress_that_only_wait_have_no_part_of_the_steps() -> None:
    one = Engine()
    for name in ("a", "b"):
        one.ask(name, prompt_tokens=10, max_tokens=5)
    one.step(others=6)
    one.fleet.handle(HeartbeatArrived("a", EngineLoad(1, running=8, waiting=20), draining=False), now=0.0)
    for _ in range(4):
        one.step(others=6)
    assert one.paid_s["a"] == one.paid_s["b"] == pytest.approx(STEP_S / 2 + 4 * STEP_S / 8 + 5 * OUTPUT_S + 10 * PROMPT_S)


def test_an_answer_pays_for_the_tokens_before_it() -> None:
    one = Engine()
    one.gpu_time.learn([{**COSTS, "context_token_s": 1e-6, "context_token_error_s": 1e-7}])
    for name, prompt_tokens in (("long", 30_000), ("short", 100)):
        one.ask(name, prompt_tokens=prompt_tokens, max_tokens=100)
    one.run()
    of_tokens_s = 100 * (STEP_S / 2 + OUTPUT_S)
    assert one.paid_s["short"] == pytest.approx(of_tokens_s + 100 * PROMPT_S)
    before = sum(30_000 + made - CONTEXT_TOKENS for made in range(100))
    assert one.paid_s["long"] == pytest.approx(of_tokens_s + 30_000 * PROMPT_S + 1e-6 * before)


def test_all_gpus_of_a_replica_count_and_a_replica_without_one_counts_as_one() -> None:
    paid = []
    for gpus in (0, 1, 4):
        one = Engine(gpus)
        one.ask("r", prompt_tokens=10, max_tokens=3)
        one.run()
        paid.append(one.paid_s["r"])
    assert paid == pytest.approx([0.0955, 0.0955, 4 * 0.0955])


def test_what_a_failover_computes_again_is_not_paid() -> None:
    one = Engine()
    one.ask("r", prompt_tokens=10, max_tokens=9)
    for _ in range(4):
        one.step()
    one.fleet.handle(LinkLost("a", LinkEnd.ENGINE_DIED), now=one.now)
    one.fleet.handle(LinkOpened("a", 8), now=one.now)
    one.run()
    assert one.paid_s["r"] == pytest.approx(4 * STEP_S + 9 * OUTPUT_S + 10 * PROMPT_S)


def test_without_measured_costs_there_are_no_gpu_seconds_and_who_used_nothing_has_none() -> None:
    one = Engine()
    one.gpu_time = GpuTime(1)
    one.gpu_time.learn([None, {"step_s": 1.0, "of another release": 2.0}])
    one.ask("r", prompt_tokens=10, max_tokens=1)
    one.run()
    assert one.paid_s == {"r": None}
    assert one.gpu_time.seconds(EngineRequests().totals("rejected")) == 0.0


def test_where_one_replica_has_measured_its_costs_count_for_the_others_too() -> None:
    gpu_time = GpuTime(1)
    gpu_time.learn([None, COSTS])
    assert gpu_time.costs == MeasuredCosts(**COSTS)


def test_costs_stay_known_while_no_replica_has_a_lease() -> None:
    one = Engine()
    one.gpu_time.learn([])
    one.ask("r", prompt_tokens=10, max_tokens=1)
    one.run()
    assert one.paid_s["r"] is not None
