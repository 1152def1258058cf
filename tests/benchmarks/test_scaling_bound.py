"""These tests check that the autoscaling bound is below each result of the simulated fleet, and not far below the best."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscaling import PROFILE, hardware
from benchmarks.scaling_bound import least_busy_s, least_replica_s
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.simulation.simulated_fleet import SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Job, Replica
from serve_app.simulated.profiles import PROFILES

JOBS = st.lists(st.tuples(st.floats(0, 60), st.integers(1, 3000), st.integers(1, 1500)), min_size=1, max_size=60)


def made(values: list[tuple[float, int, int]]) -> list[Job]:
    return [Job(f"j{number}", *value) for number, value in enumerate(sorted(values))]


@settings(max_examples=25, deadline=None)
@given(JOBS, st.lists(st.integers(1, 5), min_size=1, max_size=12), st.sampled_from([0.0, 0.4, 0.8]))
def test_no_plan_of_replicas_takes_less_than_the_bound(
    values: list[tuple[float, int, int]], plan: list[int], cached_share: float
) -> None:
    def scaling(at: float, seen: Observation) -> int:
        return plan[int(at // 10) % len(plan)]

    machine = replace(hardware(), cached_share=cached_share)
    world = World(hardware=machine, initial=plan[0], cold_starts_s=(0.0,), max_waiting_requests=100)
    outcome = SimulatedFleet(world).run(made(values), 60.0, scaling)
    assert least_replica_s(outcome, machine, PROFILES[PROFILE], minimum=1) <= outcome.replica_s


def test_a_bound_above_what_a_run_took_is_refused() -> None:
    world = World(hardware=hardware(), initial=1)
    outcome = SimulatedFleet(world).run(made([(0.0, 100, 100)]), 10.0, lambda _at, _seen: 1)
    with pytest.raises(ArithmeticError, match="the bound of 20 replica-seconds lies above the 10 of a run"):
        least_replica_s(outcome, world.hardware, PROFILES[PROFILE], minimum=2)


@pytest.mark.parametrize(("prompt", "answer"), [(64, 64), (288, 128), (2000, 16)])
def test_a_replica_that_is_full_all_the_time_takes_half_more_than_the_bound_at_most(prompt: int, answer: int) -> None:
    replica, jobs = Replica("r", hardware(), 0.0), made([(0.0, prompt, answer)] * 1000)
    for job in jobs:
        replica.add(job, job.request_id, 0.0)
    replica.run_to(1e6)
    assert replica.busy_s / 1.5 <= least_busy_s(jobs, hardware(), PROFILES[PROFILE]) <= replica.busy_s


def test_the_minimum_counts_where_nobody_asks() -> None:
    world = World(hardware=hardware(), initial=2, minimum=2)
    outcome = SimulatedFleet(world).run([], 10.0, lambda _at, _seen: 2)
    assert least_replica_s(outcome, world.hardware, PROFILES[PROFILE], minimum=2) == 2 * outcome.duration_s


def test_what_was_refused_costs_nothing() -> None:
    world = World(hardware=hardware(), initial=0, minimum=0, no_replica_s=1.0)
    outcome = SimulatedFleet(world).run(made([(0.0, 100, 100)]), 10.0, lambda _at, _seen: 0)
    assert outcome.jobs[0].done_at is None
    assert least_replica_s(outcome, world.hardware, PROFILES[PROFILE], minimum=0) == 0.0
