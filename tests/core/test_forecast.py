"""These tests compare forecasts with what engines begin that always take the work with the lowest tag."""

import itertools
import random

import pytest

from serve_app.core.forecast import Demand, Forecast
from serve_app.core.queue_rate import RecentWork


def backlog(waiting_s: float, *, weight: float = 1.0, per_s: float = 0.0, begins_s: float = 0.0) -> Demand:
    return Demand(begins_s, begins_s + waiting_s / weight, waiting_s, weight, per_s)


def light(per_s: float) -> Demand:
    return Demand(0.0, 0.0, 0.0, 1.0, per_s)


@pytest.mark.parametrize(
    ("demands", "tag_s", "expected_s"),
    [
        ([backlog(10)], 10.0, 5.0),
        ([backlog(10), backlog(10)], 10.0, 10.0),
        ([backlog(10), backlog(40, weight=4.0)], 10.0, 25.0),
        ([backlog(10), backlog(10, begins_s=10)], 10.0, 5.0),
        ([backlog(10), light(1.0)], 10.0, 10.0),
        ([backlog(10), light(3.0)], 10.0, 100.0),
        # After 1 s it has begun, and 0.5 more has come; after 2 s that has begun too: then it has no backlog. Work: 10 + 1 + 7.33 / 2.
        ([backlog(10), backlog(1, per_s=0.5)], 10.0, 7 + 1 / 3),
        # It has more to come than its share, so it takes its weight all the time.
        ([backlog(10), backlog(1, per_s=1.5)], 10.0, 10.0),
        # Requests with nearly equal tags: all of its work begins before the last one.
        ([Demand(0.0, 0.001, 10.0, 1.0, 0.0)], 0.001, 5.0),
        ([], 10.0, 0.0),
    ],
    ids=["alone", "equal", "weights", "later", "light", "too light", "ends", "stays", "equal tags", "nothing"],
)
def test_a_request_waits_for_what_has_lower_tags_and_for_what_comes_meanwhile(
    demands: list[Demand], tag_s: float, expected_s: float
) -> None:
    assert Forecast(demands, 2.0).wait_s(tag_s, 1.0) == pytest.approx(expected_s)


def test_a_request_of_now_is_behind_its_tenants_work_that_came_after_the_forecast() -> None:
    forecast = Forecast([backlog(10), backlog(5)], 2.0)
    assert forecast.wait_s(-1.0, 1.0) == 0.0
    assert forecast.wait_s(12.0, 1.0) == pytest.approx((10 + 5 + 2) / 2)
    assert forecast.wait_s(12.0, 4.0) == pytest.approx((10 + 5 + 8) / 2)


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_now_begins_in_the_order_of_tags(seed: int) -> None:
    """Without further work the forecast is exact, but for the size of a request."""
    rng = random.Random(seed)
    demands, work = [], list[tuple[float, float]]()
    for _ in range(rng.randrange(1, 12)):
        weight, cost_s, number, begins_s = (
            rng.choice((1.0, 2.0, 4.0)),
            rng.uniform(0.01, 0.05),
            rng.randrange(1, 200),
            rng.random(),
        )
        work += [(begins_s + cost_s * n / weight, cost_s) for n in range(1, number + 1)]
        demands.append(backlog(number * cost_s, weight=weight, begins_s=begins_s))
    forecast, begun_s = Forecast(demands, 2.0), 0.0
    for tag_s, cost_s in sorted(work):
        begun_s += cost_s
        assert forecast.wait_s(tag_s, 1.0) == pytest.approx(begun_s / 2.0, abs=0.05 * len(demands) / 2.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_flood_beside_tenants_that_ask_for_less_waits_as_long_as_an_engine_makes_it(seed: int) -> None:
    """One engine; light tenants send at random, each at the tag of the work that begins just then."""
    rng = random.Random(seed)
    rates = [rng.uniform(0.02, 0.1) for _ in range(6)]
    forecast = Forecast([backlog(200.0), *map(light, rates)], 1.0)
    arrivals = sorted(
        at for rate in rates for at in itertools.accumulate(rng.expovariate(rate / 0.1) for _ in range(round(5000 * rate)))
    )
    now = begun_s = 0.0
    while begun_s < 200.0:
        if arrivals[0] <= now:
            arrivals.pop(0)
        else:
            begun_s += 0.1
        now += 0.1
    assert forecast.wait_s(200.0, 1.0) == pytest.approx(now, rel=0.1)


def test_recent_work_is_that_of_about_ten_seconds_and_a_first_request_is_no_flood() -> None:
    recent = RecentWork()
    assert recent.per_second(5.0) == 0.0
    recent.add(0.5, 100.0)
    assert recent.per_second(100.0) == pytest.approx(0.5, rel=0.1)
    for number in range(1, 300):
        recent.add(0.5, 100.0 + number)
    assert recent.per_second(399.5) == pytest.approx(0.5, rel=0.1)
    assert recent.per_second(430.0) < 0.05
