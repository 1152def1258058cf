"""These tests let tenants compete for one engine in simulated time, and measure what each of them gets."""

import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from serve_app.core.events import StepCostsMeasured
from serve_app.core.fair_order import FairOrder
from serve_app.core.order_board import LaneWaits
from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts, long_context
from serve_app.core.tenants import Priority
from tests.core.helpers import Output, arrived, fleet_of, outputs
from tests.core.test_fair_order import COSTS, placed, request
from tests.core.test_order_board import Board


@dataclass
class Client:
    """A tenant that always has ``backlog`` requests at each of its ingresses. ``cached`` is the part of its prompts that the engine has."""

    name: str
    weight: float
    prompt_tokens: int
    output_tokens: int
    backlog: int
    ingresses: tuple[int, ...] = (0,)
    cached: float = 0.0
    served_s: float = 0.0
    num: int = 0


@dataclass
class Contest:
    """One engine that computes one request at a time, in the order of their tags, and ingresses that exchange what waits."""

    clients: list[Client]
    seed: int
    num_ingresses: int = 1
    priority: Priority = "interactive"
    costs: MeasuredCosts = COSTS
    known: MeasuredCosts | None = None
    """What the ingresses know of the costs; None for all."""
    now: float = 0.0
    queue: dict[str, tuple[RequestState, Client, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.orders = [FairOrder() for _ in range(self.num_ingresses)]
        self.board = Board(10.0)
        for order in self.orders:
            order.learn(self.known or self.costs)
        for client in self.clients:
            for ingress in client.ingresses:
                for _ in range(client.backlog):
                    self.add(client, ingress)

    def add(self, client: Client, ingress: int) -> None:
        client.num += 1
        prompt_tokens = max(1, round(client.prompt_tokens * self.random.uniform(0.5, 1.5)))
        state = request(f"{client.name}{client.num}", prompt_tokens=prompt_tokens, max_tokens=4 * client.output_tokens)
        self.orders[ingress].place(state, client.name, client.weight, self.priority, self.now)
        self.queue[state.request_id] = state, client, ingress

    def exchange(self) -> None:
        for number, order in enumerate(self.orders):
            report = order.report()
            elsewhere = self.board.tell(str(number), {"m": report}, self.now)
            order.answered(report)
            order.learn_waits(elsewhere["m"])

    def step(self, counted_from_s: float = 0.0) -> None:
        """Compute one request."""
        state, client, ingress = min(self.queue.values(), key=lambda each: (each[0].priority, each[0].number))
        del self.queue[state.request_id]
        num_tokens = max(1, round(client.output_tokens * self.random.uniform(0.5, 1.5)))
        self.orders[ingress].begin(state, self.now)
        state.emitted_ids = [1] * num_tokens
        state.trail.cached_tokens = round(client.cached * state.prompt_tokens)
        cost_s = self.costs.seconds(
            computed_tokens=state.prompt_tokens - state.trail.cached_tokens,
            output_tokens=num_tokens,
            context_tokens=long_context(state.prompt_tokens, num_tokens),
        )
        self.now += cost_s
        client.served_s += cost_s * (self.now > counted_from_s)
        self.orders[ingress].end(state, self.now)
        self.add(client, ingress)

    def run(self, seconds: float, *, counted_from_s: float = 0.0) -> None:
        exchanged = 0.0
        while self.now < seconds:
            self.step(counted_from_s)
            if self.now - exchanged >= 1.0:
                exchanged = self.now
                self.exchange()

    def shares(self) -> list[float]:
        total_s = sum(client.served_s for client in self.clients)
        return [client.served_s / total_s for client in self.clients]


@pytest.mark.parametrize("seed", range(3))
def test_equal_tenants_get_equal_gpu_time_whatever_their_requests_look_like(seed: int) -> None:
    shapes = [(2000, 10, 20), (100, 100, 5), (10, 300, 10), (500, 50, 1)]
    contest = Contest([Client(f"t{i}", 1.0, *shape) for i, shape in enumerate(shapes)], seed)
    contest.run(1000.0, counted_from_s=300.0)  # the first answers were not known
    assert contest.shares() == pytest.approx([0.25] * 4, rel=0.05)


def test_answers_pay_for_the_tokens_before_them() -> None:
    """A token after 30,000 others costs four times as much as one after 100."""
    cheap_prompts = replace(COSTS, prompt_token_s=1e-6)
    costs, shares = replace(cheap_prompts, context_token_s=1e-6), list[list[float]]()
    for known in (cheap_prompts, costs):
        contest = Contest(
            [Client("long", 1.0, 30_000, 50, 10), Client("short", 1.0, 100, 50, 10)], 1, 1, known=known, costs=costs
        )
        contest.run(1000.0, counted_from_s=300.0)
        shares.append(contest.shares())
    assert shares[0][0] > 0.7, "if only the number of tokens counts"
    assert shares[1] == pytest.approx([0.5, 0.5], rel=0.05)


@pytest.mark.parametrize("priority", ["interactive", "background"])  # lines of batches are background work
@pytest.mark.parametrize("seed", range(3))
def test_weights_divide_gpu_time(seed: int, priority: Priority) -> None:
    contest = Contest([Client(f"t{weight}", weight, 300, 30, 20) for weight in (1.0, 2.0, 4.0)], seed, priority=priority)
    contest.run(1000.0, counted_from_s=300.0)  # the first answers were not known
    assert contest.shares() == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03)


@pytest.mark.parametrize(("cheap", "costly"), [((1, 0.0), (200, 0.0)), ((30, 1.0), (30, 0.0)), ((1, 1.0), (200, 0.0))])
@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_gains_nothing_from_cheap_requests_after_which_its_costly_ones_seem_cheap(
    seed: int, cheap: tuple[int, float], costly: tuple[int, float]
) -> None:
    trainer, honest = Client("trainer", 1.0, 300, 30, 20), Client("honest", 1.0, 300, 30, 20)
    contest = Contest([trainer, honest], seed)
    while contest.now < 1000.0:
        trainer.output_tokens, trainer.cached = cheap if trainer.num % 100 < 80 else costly
        contest.step(300.0)
    assert contest.shares()[0] < 0.51


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_gains_nothing_from_more_ingresses(seed: int) -> None:
    clients = [
        Client("everywhere", 1.0, 300, 30, 20, ingresses=(0, 1, 2, 3)),
        Client("one", 1.0, 300, 30, 20, ingresses=(0,)),
        Client("double", 2.0, 300, 30, 20, ingresses=(1, 2)),
    ]
    contest = Contest(clients, seed, num_ingresses=4)
    contest.run(1000.0, counted_from_s=300.0)  # what came before the first exchange was ordered at each ingress alone
    assert contest.shares() == pytest.approx([0.25, 0.25, 0.5], rel=0.05)


def test_an_ingress_that_starts_anew_is_level_with_the_others_after_its_first_exchange() -> None:
    old, new = FairOrder(), FairOrder()
    elsewhere: LaneWaits = {"interactive": (5000.0, {})}
    old.learn_waits(elsewhere)
    placed(new, "first", "a")
    new.learn_waits(elsewhere)
    assert placed(new, "second", "a").priority == placed(old, "other", "b").priority


def test_tenants_of_long_and_of_short_answers_are_told_how_long_they_wait() -> None:
    contest = Contest([Client("long", 1.0, 1000, 100, 10), Client("short", 1.0, 100, 10, 30)], seed=1)
    (order,) = contest.orders
    order.note_queue("engine", 1)
    order.note_fullness(1, None, 0.0)
    told: dict[str, tuple[float, float]] = {}
    errors: dict[str, list[float]] = {"long": [], "short": []}
    while contest.now < 300.0:
        for state, _, _ in contest.queue.values():
            if state.request_id not in told and (expected_s := order.expected_wait_s(state, contest.now)) is not None:
                told[state.request_id] = contest.now, expected_s
        queued = dict(contest.queue)
        contest.step()
        (begun,) = queued.keys() - contest.queue.keys()
        if begun in told and told[begun][0] > 100.0:
            at, expected_s = told[begun]
            errors[queued[begun][1].name].append(expected_s / (contest.now - at))
    assert [statistics.median(each) for each in errors.values()] == pytest.approx([1.0, 1.0], abs=0.25)


def start_s(order: FairOrder, state: RequestState) -> float:
    return order._places[state.request_id].start_s


def backlog() -> tuple[FairOrder, list[RequestState]]:
    order = FairOrder()
    order.learn(COSTS)
    return order, [placed(order, f"a{number}", "a") for number in range(6)]


def test_a_tenants_later_requests_take_the_time_of_those_that_gave_up() -> None:
    order, mine = backlog()
    for state in mine[:3]:
        order.end(state, 1.0)
    again = [placed(order, f"again{number}", "a") for number in range(4)]
    assert [state.priority for state in again[:3]] == [state.priority for state in mine[:3]]
    assert again[3].priority > mine[-1].priority
    order.end(again[1], 1.0)
    assert placed(order, "once more", "a").priority == mine[1].priority


def test_a_request_that_needs_more_takes_the_time_of_several_and_one_that_needs_too_much_takes_none() -> None:
    order, mine = backlog()
    for state in mine[:3]:
        order.end(state, 1.0)
    large, larger = (request(name, prompt_tokens=tokens, max_tokens=10) for name, tokens in (("large", 160), ("larger", 1000)))
    order.place(larger, "a", 1.0, "interactive", 1.0)
    assert larger.priority > mine[-1].priority
    order.end(larger, 1.0)  # as if it were refused
    order.place(large, "a", 1.0, "interactive", 1.0)
    assert mine[1].priority < large.priority < mine[2].priority
    assert placed(order, "a6", "a").priority > mine[-1].priority, "less than its cost is left"


def test_requests_without_a_tenant_take_no_time_of_those_that_gave_up() -> None:
    order = FairOrder()
    mine = [placed(order, f"r{number}") for number in range(6)]
    order.end(mine[1], 1.0)
    assert placed(order, "later").priority >= mine[-1].priority


def test_time_that_virtual_time_has_passed_is_not_taken() -> None:
    order, mine = backlog()
    order.end(mine[0], 1.0)
    order.learn_waits({"interactive": (start_s(order, mine[3]), {})})
    order.end(mine[4], 1.0)
    assert placed(order, "again", "a").priority == mine[4].priority
    assert placed(order, "later", "a").priority == mine[5].priority


def test_a_change_of_weight_ends_free_time() -> None:
    order, mine = backlog()
    for state in mine[:3]:
        order.end(state, 1.0)
    assert placed(order, "again", "a", weight=2.0).priority >= mine[-1].priority


class Batching:
    """A fleet whose one engine computes 32 answers at a time, ten tokens of each in a step. The tenant "good" always has 64 requests."""

    def __init__(self) -> None:
        self.fleet = fleet_of("a", credit=32, heartbeat_timeout_s=1e9, no_replica_s=1e9, max_waiting_requests=10_000)
        self.fleet.handle(StepCostsMeasured(COSTS), now=0.0)
        self.now, self.number = 0.0, 0
        self.left: dict[str, int] = {}
        self.served_s = {"good": 0.0, "bad": 0.0}
        for _ in range(64):
            self.send("good", 100)

    def send(self, tenant: str, tokens: int) -> None:
        self.number += 1
        self.left[f"r{self.number}"] = tokens
        self.fleet.handle(replace(arrived(f"r{self.number}", max_tokens=4000), tenant=tenant), now=self.now)

    def step(self) -> int:
        """Compute a step; return how many answers of "bad" have ended."""
        running, items, ended = list(self.fleet.replicas["a"].held.values()), list[Output](), list[str]()
        for state in running:
            num_tokens = min(10, self.left[state.request_id])
            self.left[state.request_id] -= num_tokens
            self.now += num_tokens * COSTS.output_token_s
            self.served_s[state.tenant] += num_tokens * COSTS.output_token_s
            is_last = not self.left[state.request_id]
            ended += [state.tenant] if is_last else []
            items.append(Output(state.attempt_id, [5] * num_tokens, finish_reason="stop" if is_last else None))
        self.fleet.handle(outputs("a", *items), now=self.now)
        for _ in range(ended.count("good")):
            self.send("good", 100)
        return ended.count("bad")


def test_a_tenant_of_short_answers_that_turns_to_long_ones_is_charged_for_them_before_they_end() -> None:
    engine = Batching()
    for _ in range(100):
        engine.send("bad", 1)
        while not engine.step():
            pass
    begun_at = next_at = engine.now
    engine.served_s = {"good": 0.0, "bad": 0.0}
    while engine.now < begun_at + 600.0:
        engine.step()
        while next_at <= engine.now:
            engine.send("bad", 1000)  # 10 GPU-seconds every five seconds: four times its share
            next_at += 5.0
    # 0.84 if answers are charged only at their ends: none of the first 20 has ended before the engine is full of them.
    assert engine.served_s["bad"] / sum(engine.served_s.values()) < 0.62
    engine.fleet.validate()
