"""These tests (T9) search on simulated servers whose capacity is known in closed form."""

import math

import msgspec
import numpy as np
import pytest

from loadtest.judge.search import Ask, Capacity, Probe, Search, SearchSettings
from loadtest.proof.selftest.estimates import holds, simulated_search

CLEAR = SearchSettings(start_rate=1.0, quantiles=(0.99,))


def run(settings: SearchSettings, capacity: float, *, sick_above: float = math.inf) -> Search:
    """Search a server that keeps every limit up to its capacity and none above."""
    search = Search(settings)
    while (ask := search.next_rate()) is not None:
        over = 0.0 if ask.rate <= capacity else ask.num_requests / 2
        search.add(Probe(ask, ((float(ask.num_requests), over),), valid=ask.rate <= sick_above))
    return search


def test_a_sharp_capacity_is_bracketed_to_three_percent_and_confirmed() -> None:
    found = run(CLEAR, 37.0).result()
    assert found.winner is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 37.0 <= found.high < 1.03 * found.low * 1.03
    assert found.winner <= 37.0 < found.winner * 1.03
    assert found.confirmed
    assert not found.generator_limited


def test_rates_double_until_one_fails_and_are_then_bisected() -> None:
    rates = list(dict.fromkeys(probe.ask.rate for probe in run(CLEAR, 5.0).probes))
    assert rates[:6] == pytest.approx([1, 2, 4, 8, math.sqrt(32), math.sqrt(4 * math.sqrt(32))])


def test_a_first_rate_that_fails_is_halved() -> None:
    found = run(SearchSettings(start_rate=100.0, quantiles=(0.99,)), 9.0).result()
    assert found.winner == pytest.approx(9.0, rel=0.03)


def test_nothing_passes() -> None:
    found = run(CLEAR, 0.0).result()
    assert (found.rate, found.low, found.winner, found.confirmed) == (None, None, None, False)


def test_winner_and_five_percent_above_get_five_fresh_seeds_each() -> None:
    search = run(CLEAR, 37.0)
    winner = search.result().winner
    assert winner is not None
    confirming = [probe.ask.rate for probe in search.probes if probe.ask.purpose == "confirm"]
    assert confirming == [winner] * 5 + [winner * 1.05] * 5
    assert len({probe.ask.seed for probe in search.probes}) == len(search.probes)


def test_an_undecided_rate_is_asked_for_more_at_most_four_times() -> None:
    search = Search(CLEAR)
    asked: list[Ask] = []
    while (ask := search.next_rate()) is not None and ask.rate == 1.0:
        asked.append(ask)
        search.add(Probe(ask, ((float(ask.num_requests), 0.01 * ask.num_requests),)))  # exactly at the limit
    assert len(asked) == 4
    total = np.cumsum([ask.num_requests for ask in asked])
    assert total.tolist() == pytest.approx(CLEAR.looks(), abs=4)  # of 2 to 20 allowed violations
    assert (CLEAR.looks()[0], CLEAR.looks()[-1]) == (838, 3304)


def test_dependent_samples_cost_more_requests_up_to_the_limit() -> None:
    search = Search(SearchSettings(start_rate=1.0, quantiles=(0.99,), max_requests=5000))
    first = search.next_rate()
    assert first is not None
    search.add(Probe(first, ((first.num_requests / 10, 0.0),)))
    second = search.next_rate()
    assert second is not None
    assert second.rate == first.rate
    assert second.num_requests == 5000 - first.num_requests  # a tenth counts: 12,000 would be wanted


def test_a_growing_backlog_does_not_pass() -> None:
    search = Search(CLEAR)
    ask = search.next_rate()
    assert ask is not None
    search.add(Probe(ask, ((1000.0, 0.0),), steady=False))
    assert search.verdict(ask.rate) == "undecided"


def test_a_failed_confirmation_overrules_the_search() -> None:
    search = Search(CLEAR)
    while (ask := search.next_rate()) is not None:
        lucky = ask.purpose == "search" and ask.rate < 40  # the truth is 38.5
        search.add(Probe(ask, ((float(ask.num_requests), 0.0 if lucky or ask.rate < 38.5 else ask.num_requests / 5),)))
    found = search.result()
    assert found.winner is not None
    assert 37 < found.winner < 38.5
    assert any(rate.rate > 38.5 and rate.verdict == "fail" for rate in found.rates if rate.rate < 40)
    assert found.confirmed


def test_a_sick_generator_is_asked_again_once_and_then_limits_the_search() -> None:
    found = run(CLEAR, 1000.0, sick_above=50.0).result()
    assert found.generator_limited
    assert found.winner == pytest.approx(50.0, rel=0.04)
    assert sum(probe.ask.rate == 64 for probe in found.probes) == 2


def test_the_first_limit_to_be_crossed_decides() -> None:
    search = Search(SearchSettings(start_rate=1.0, quantiles=(0.99, 0.9)))
    while (ask := search.next_rate()) is not None:
        n = float(ask.num_requests)
        search.add(Probe(ask, ((n, 0.0 if ask.rate < 30 else n / 2), (n, 0.0 if ask.rate < 12 else n / 2))))
    assert search.result().winner == pytest.approx(12, rel=0.03)
    with pytest.raises(ValueError, match="1 counts for 2 limits"):
        search.add(Probe(Ask(1.0, 100, 1, "search"), ((1.0, 0.0),)))


def test_a_result_survives_its_file() -> None:
    found = run(CLEAR, 37.0).result()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Capacity) == found


def test_the_interval_holds_the_capacity_of_a_simulated_server() -> None:
    assert sum(holds(*simulated_search(seed)) for seed in range(6)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load", "q"), [(8, 0.8, 0.9), (8, 0.8, 0.99), (32, 0.8, 0.99), (1, 0.5, 0.95)])
def test_nine_of_ten_intervals_hold_the_capacity(servers: int, load: float, q: float) -> None:
    assert sum(holds(*simulated_search(seed, servers=servers, load=load, q=q)) for seed in range(30)) >= 27
