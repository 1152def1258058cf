"""These tests overload a fleet in simulated time, and count the admitted requests that begin too late."""

from dataclasses import replace

import pytest

from serve_app.core.request import RequestState, Resume
from serve_app.core.wait_margin import LEAST_MARGIN, WaitMargin
from tests.core.overloaded_fleet import ENGINES, PLACES, Asked, OverloadedFleet, Tenant

CAPACITY = 26.0
_WARMUP_S, _UNTIL_S = 20.0, 80.0
_EQUAL = [Tenant(f"t{number}", 3 * CAPACITY / 4, 10.0) for number in range(4)]
_UNEQUAL = [
    Tenant("chat", CAPACITY, 10.0),
    Tenant("writer", CAPACITY / 4, 10.0, weight=2.0, prompt=(16, 48), answer=(96, 160)),
    Tenant("reader", CAPACITY, 10.0, weight=4.0, prompt=(768, 1280), answer=(4, 12)),
    Tenant("light", 1.0, 10.0),
]
_FLOOD = [Tenant("flood", 5 * CAPACITY, 10.0), *(Tenant(f"v{number}", CAPACITY / 8, 10.0) for number in range(4))]


def is_late(asked: Asked) -> bool:
    return asked.late_at is not None or (asked.begun_at is not None and asked.begun_at - asked.at > asked.tenant.within_s)


@pytest.mark.parametrize("within_s", [2.0, 10.0])
@pytest.mark.parametrize("tenants", [_EQUAL, _UNEQUAL, _FLOOD], ids=["equal", "unequal", "flood"])
def test_at_most_one_in_20_admitted_requests_begins_too_late_and_no_engine_is_idle(
    tenants: list[Tenant], within_s: float
) -> None:
    fleet = OverloadedFleet([replace(tenant, within_s=within_s) for tenant in tenants], seed=0)
    fleet.run(_WARMUP_S)
    idle_s = sum(engine.idle_s for engine in fleet.engines.values())
    fleet.run(_UNTIL_S)
    idle_s = sum(engine.idle_s for engine in fleet.engines.values()) - idle_s
    assert idle_s < 0.01 * ENGINES * PLACES * (_UNTIL_S - _WARMUP_S)
    fleet.run(_UNTIL_S + within_s + 1.0)
    admitted = [each for each in fleet.asked if _WARMUP_S <= each.at < _UNTIL_S and each.refused_at is None]
    assert len(admitted) > 0
    assert sum(map(is_late, admitted)) <= 0.05 * len(admitted)


def test_of_equal_tenants_nine_in_ten_refused_requests_are_told_when_their_tenants_next_one_starts() -> None:
    fleet = OverloadedFleet(_EQUAL, seed=0)
    fleet.run(_UNTIL_S + 11.0)
    following: dict[str, Asked] = {}
    errors = list[float]()
    for asked in reversed(fleet.asked):
        if asked.refused_at is None:
            following[asked.tenant.name] = asked
        elif _WARMUP_S <= asked.at < _UNTIL_S and (begun_at := following[asked.tenant.name].begun_at) is not None:
            errors.append(asked.expected_s / (begun_at - asked.at) - 1)
    assert sum(abs(error) <= 0.25 for error in errors) >= 0.9 * len(errors) > 1000


def waited(margin: WaitMargin, seconds: float, *, has_begun: bool = True, expected_s: float = 4.0) -> float:
    """Let a request with a limit of 10 s wait for so long, and return the factor after it."""
    request = RequestState("r", 1, 1, Resume.CONTINUE, start_by=10.0, expected_wait_s=expected_s)
    margin.learn(request, seconds, has_begun=has_begun)
    return margin.factor


def test_a_margin_grows_with_waits_above_it_within_bounds_and_comes_back() -> None:
    margin = WaitMargin()
    assert waited(margin, 5.0) > LEAST_MARGIN
    assert max(waited(margin, 10.0, has_begun=False) for _ in range(100)) == 2.0
    assert min(waited(margin, 4.0) for _ in range(2000)) == LEAST_MARGIN


def test_a_margin_learns_nothing_from_waits_that_were_cut_short_or_are_short_for_their_limit() -> None:
    margin = WaitMargin()
    waited(margin, 9.0)
    before = margin.factor
    assert waited(margin, 1.0, has_begun=False) == before
    assert waited(margin, 9.0, expected_s=2.0) == before
    assert waited(margin, 9.0) > before


def test_a_tenants_only_request_is_admitted_by_the_least_margin() -> None:
    fleet = OverloadedFleet(_EQUAL, seed=0)
    fleet.run(5.0)
    order = fleet.fleet.order
    account = order._lanes["interactive"].accounts["t0"]
    account.margin.factor = 2.0
    last = account.latest
    request = next(r for r in fleet.fleet.requests.values() if order._places[r.request_id] is last)
    assert order.wait_margin(request) == 2.0
    alone = RequestState("alone", 1, 1, Resume.CONTINUE)
    order.place(alone, "anew", 1.0, "interactive", 5.0)
    order._places["alone"].account.margin.factor = 2.0
    assert order.wait_margin(alone) == LEAST_MARGIN
