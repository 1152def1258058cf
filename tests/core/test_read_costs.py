"""Reads of KV are expected to take as long as the latest ones did."""

import random

import pytest

from serve_app.core.read_costs import MIN_TOKENS, ReadCosts
from serve_app.core.usual_costs import GUESS
from tests.core.apart_fleet import COSTS


def test_reads_that_all_lie_on_a_line_are_expected_to_stay_on_it() -> None:
    costs, rng = ReadCosts(), random.Random(1)
    for number in range(60):
        tokens = rng.randrange(300, 9000)
        costs.learn(tokens, 0.2 + tokens * 1e-4, number)
    assert [costs.seconds(tokens) for tokens in (500, 8000)] == pytest.approx([0.25, 1.0], rel=0.02)


def test_a_read_costs_something_whatever_the_latest_ones_took() -> None:
    costs, rng = ReadCosts(), random.Random(2)
    for number in range(200):
        costs.learn(rng.choice((300, 310, 9000)), rng.choice((0.001, 0.01, 10.0)), number)
        assert 0 < costs.seconds(1) <= costs.seconds(100_000)


def test_reads_of_equal_length_say_nothing_of_other_lengths() -> None:
    costs = ReadCosts()
    for number in range(200):
        costs.learn(1000, 0.5, number)
    assert costs.seconds(1000) == pytest.approx(0.5, rel=0.01)
    assert costs.seconds(100) > 0


def test_slow_reads_are_forgotten_after_some_minutes_so_that_they_are_tried_again() -> None:
    costs, fresh = ReadCosts(), ReadCosts()
    for number in range(20):
        costs.learn(1000, 10.0, number)
    costs.tick(300.0)
    assert costs.seconds(1000) > 5.0
    costs.tick(320.0)
    assert costs.seconds(1000) == fresh.seconds(1000)


def test_a_read_pays_where_it_is_shorter_than_the_prefill() -> None:
    costs = ReadCosts()
    assert not costs.pays(100, COSTS)
    assert costs.pays(1000, COSTS)
    for number in range(20):
        costs.learn(1000, 1.0, number)
    assert not costs.pays(1000, COSTS)


def test_without_measured_costs_long_requests_are_read() -> None:
    assert [ReadCosts().pays(tokens, GUESS) for tokens in (MIN_TOKENS - 1, MIN_TOKENS)] == [False, True]
