"""These tests check at 50 engines and 4 ingresses what benchmarks/results/fairness-at-scale.md states of 1,000 and 20."""

import pytest

from benchmarks.fairness_at_scale import Demand, Figures, Scale, demand_of, figures, played
from benchmarks.fairness_fleet import Faults

SCALE = Scale(engines=50, tenants=20, ingresses=4, seconds=120.0)
MIDDLE = 80.0


@pytest.fixture(scope="module")
def demand() -> Demand:
    return demand_of(SCALE)


def found(demand: Demand, *, is_fair: bool = True, faults: Faults = Faults()) -> Figures:  # noqa: B008
    return figures(played(SCALE, demand, is_fair=is_fair, faults=faults), demand, SCALE)


def test_tenants_with_a_backlog_get_their_shares_and_light_ones_do_not_wait_for_the_noisy_one(demand: Demand) -> None:
    fair, in_turn, quiet = found(demand), found(demand, is_fair=False), found(demand_of(SCALE, noise=1.0))
    assert fair.of_bound <= 1.0
    assert fair.jain >= 0.97
    assert fair.jain > in_turn.jain
    assert fair.used >= 0.97 * in_turn.used
    assert fair.light_p99_s <= 1.3 * quiet.light_p99_s
    assert fair.light_p50_s <= 0.5 * in_turn.light_p50_s
    assert fair.hits >= in_turn.hits - 0.05


def test_no_tenant_starves_when_another_comes_anew_with_a_backlog(demand: Demand) -> None:
    late = found(demand.late(MIDDLE))
    assert late.of_bound <= 1.0
    assert late.least_of_5 >= 0.1


def test_shares_hold_while_an_ingress_starts_anew_and_another_cannot_reach_the_board(demand: Demand) -> None:
    restarted, cut = demand.clients[0].ingresses[0], demand.clients[1].ingresses[-1]
    assert restarted != cut
    faulty = found(demand, faults=Faults(restart=(restarted, MIDDLE), cut=(cut, MIDDLE - 15.0, MIDDLE + 15.0)))
    assert faulty.of_bound <= 1.0
    assert faulty.jain >= 0.95
