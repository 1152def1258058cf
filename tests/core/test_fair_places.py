"""These tests let tenants compete for the places of engines in simulated time, with the rule by which requests give way."""

import random
import statistics
from dataclasses import dataclass, field

import pytest

from serve_app.core.fair_order import FairOrder
from serve_app.core.fair_tags import gives_way, is_ahead
from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts
from tests.core.test_fair_order import request

PLACES, ENGINES, STEP_S = 16, 2, 0.032
COSTS = MeasuredCosts(
    step_s=0.0,
    output_token_s=STEP_S / PLACES,
    prompt_token_s=0.0,
    step_error_s=1e-3,
    output_token_error_s=1e-4,
    prompt_token_error_s=1e-4,
)
SHORTEST, LONGEST = 16, 48
CAPACITY = ENGINES * PLACES / STEP_S / ((SHORTEST + LONGEST) / 2)
"""Requests a second."""


@dataclass
class Tenant:
    """Keeps ``depth`` requests open, or sends ``rate`` a second."""

    name: str
    weight: float = 1.0
    depth: int = 0
    rate: float = 0.0
    next_at: float = 0.0
    num_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Asked:
    state: RequestState
    tenant: Tenant
    at: float
    left: int
    gave_way_left: int = 1 << 30

    @property
    def key(self) -> tuple[int, int]:
        return self.state.priority, self.state.number


class Engines:
    """Each step gives a token to each running request. ``gives``: whether requests give way."""

    def __init__(self, tenants: list[Tenant], *, gives: bool, seed: int) -> None:
        self._tenants, self._gives, self._random = tenants, gives, random.Random(seed)
        self._order, self._now, self._num = FairOrder(), 0.0, 0
        self._order.learn(COSTS)
        self._running: list[list[Asked]] = [[] for _ in range(ENGINES)]
        self._queues: list[list[Asked]] = [[] for _ in range(ENGINES)]
        self._counts_from = 0.0
        for tenant in tenants:
            tenant.next_at = self._random.expovariate(tenant.rate) if tenant.rate else float("inf")
            for _ in range(tenant.depth):
                self._add(tenant)

    def run(self, until_s: float, counts_from: float) -> None:
        self._counts_from = counts_from
        while self._now < until_s:
            self._order.note_fullness(ENGINES, None, self._now)
            for number, (running, queue) in enumerate(zip(self._running, self._queues, strict=True)):
                self._order.note_queue(str(number), len(queue), [asked.state for asked in queue])
                self._begin(running, queue)
                self._step(running)
            self._now += STEP_S
            for tenant in self._tenants:
                while tenant.next_at < self._now:
                    self._add(tenant)
                    tenant.next_at += self._random.expovariate(tenant.rate)

    def _add(self, tenant: Tenant) -> None:
        self._num += 1
        state = request(f"{tenant.name}{self._num}", prompt_tokens=1, max_tokens=LONGEST)
        self._order.place(state, tenant.name, tenant.weight, "interactive", self._now)
        asked = Asked(state, tenant, self._now, self._random.randint(SHORTEST, LONGEST))
        self._queues[min(range(ENGINES), key=lambda each: len(self._running[each]) + len(self._queues[each]))].append(asked)

    def _begin(self, running: list[Asked], queue: list[Asked]) -> None:
        queue.sort(key=lambda asked: asked.key)
        for asked in [asked for asked in queue if self._gives and not is_ahead(asked.state.priority)]:
            if len(running) >= PLACES:
                able = [
                    each
                    for each in running
                    if each.gave_way_left - each.left >= 16 and gives_way(each.state.priority, asked.state.priority)
                ]
                if not able:
                    break
                giving = self._random.choice(able)
                giving.gave_way_left = giving.left
                running.remove(giving)
                queue.append(giving)
            queue.remove(asked)
            running.append(asked)
        queue.sort(key=lambda asked: asked.key)
        while len(running) < PLACES and queue:
            running.append(queue.pop(0))

    def _step(self, running: list[Asked]) -> None:
        for asked in list(running):
            state, tenant = asked.state, asked.tenant
            if not state.emitted_ids:
                self._order.begin(state, self._now)
                tenant.waits_s += [self._now + STEP_S - asked.at] * (self._now >= self._counts_from)
            state.emitted_ids.append(1)
            tenant.num_tokens += self._now >= self._counts_from
            asked.left -= 1
            if not asked.left:
                running.remove(asked)
                self._order.end(state, self._now)
                if tenant.depth:
                    self._add(tenant)


def played(*tenants: Tenant, gives: bool, seed: int, until_s: float = 150.0) -> list[float]:
    """Return each tenant's share of the tokens."""
    Engines(list(tenants), gives=gives, seed=seed).run(until_s, counts_from=60.0)
    total = sum(tenant.num_tokens for tenant in tenants)
    return [tenant.num_tokens / total for tenant in tenants]


def beside_a_flood(gives: bool, seed: int) -> float:
    """Return the p99 of the waits of five tenants that use half of their share each, while a sixth floods the engines."""
    victims = [Tenant(f"v{number}", rate=0.5 * CAPACITY / 6) for number in range(5)]
    played(*victims, Tenant("flood", depth=300), gives=gives, seed=seed)
    return statistics.quantiles([wait_s for victim in victims for wait_s in victim.waits_s], n=100)[-1]


@pytest.mark.parametrize("seed", range(2))
def test_who_gives_way_keeps_the_others_waits_short(seed: int) -> None:
    assert beside_a_flood(True, seed) <= 2 * STEP_S < beside_a_flood(False, seed) / 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("gives", [False, True])
def test_shares_are_those_of_weights_whether_or_not_requests_give_way(seed: int, gives: bool) -> None:
    shares = played(*(Tenant(f"w{weight:g}", weight, depth=48) for weight in (1.0, 2.0, 4.0)), gives=gives, seed=seed)
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03)


@pytest.mark.parametrize("seed", range(2))
def test_a_flood_has_its_share_beside_tenants_that_are_never_far_ahead(seed: int) -> None:
    tenants = [*(Tenant(f"few{number}", depth=6) for number in range(6)), Tenant("flood", depth=100)]
    assert played(*tenants, gives=True, seed=seed) == pytest.approx([1 / 7] * 7, rel=0.05)
