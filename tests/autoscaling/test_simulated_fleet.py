"""These tests compare the simulated fleet with counts made by hand."""

import random

import pytest

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.simulation.simulated_fleet import Outcome, SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica, steps_of_times

HARDWARE = Hardware(step_s=steps_of_times(StepTimes(1.0, 0.0, 0.1)), kv_tokens=1000, max_num_seqs=2, max_batched_tokens=10)
"""A step lasts a second, and a tenth more for each prompt token; ten tokens fit into a step."""


class Plan:
    """A policy with fixed numbers of replicas from given times on."""

    def __init__(self, plan: dict[float, int]) -> None:
        self.plan = plan

    def __call__(self, at: float, seen: Observation) -> int:
        return ([n for t, n in self.plan.items() if t <= at] or [seen.target])[-1]


def run(jobs: list[Job], plan: dict[float, int] | None = None, **world: object) -> Outcome:
    settings = {"hardware": HARDWARE, "cold_starts_s": (5.0,), **world}
    return SimulatedFleet(World(**settings)).run(jobs, 30.0, Plan(plan or {}))  # type: ignore[arg-type]


def test_one_request_takes_its_prompt_and_a_step_per_token() -> None:
    (job,) = run([Job("a", 0.5, prompt_tokens=5, output_tokens=4)]).jobs
    assert job.first_at == pytest.approx(2.0)
    assert job.done_at == pytest.approx(5.0)


def test_a_long_prompt_is_computed_in_chunks_beside_what_runs() -> None:
    first, second = run([Job("a", 0.0, 5, 20), Job("b", 2.0, prompt_tokens=15, output_tokens=2)]).jobs
    # a: first token at 1.5, then steps until 2.5 and 3.5 ... b joins the one that begins at 2.5, nine tokens of it, then six.
    assert first.first_at == pytest.approx(1.5)
    assert second.first_at == pytest.approx(2.5 + 1.9 + 1.6)
    assert first.done_at == pytest.approx(1.5 + 19 + 0.9 + 0.6)


def test_sequences_and_cache_limit_what_runs_and_the_queue_is_first_come_first_served() -> None:
    jobs = run([Job(name, 0.0, 1, 3) for name in "abc"]).jobs
    assert [j.first_at for j in jobs[:2]] == [pytest.approx(1.2)] * 2
    assert jobs[2].first_at is not None
    assert jobs[2].first_at > (jobs[0].done_at or 0.0)
    big = run([Job(name, 0.0, 1, 600) for name in "ab"]).jobs
    assert (big[1].first_at or 0.0) > (big[0].done_at or 0.0)


def test_a_replica_does_the_same_in_one_go_as_in_many() -> None:
    def replica() -> Replica:
        rng, made = random.Random(5), Replica("r", Hardware(step_s=HARDWARE.step_s, kv_tokens=500, max_num_seqs=4), 0.0)
        for i in range(20):
            made.add(Job(f"j{i}", 0.0, rng.randint(1, 30), rng.randint(1, 30)), f"j{i}", 0.0)
        return made

    whole, stepwise = replica(), replica()
    happened = [(job.request_id, ended) for job, _, ended in whole.run_to(1000.0)]
    again = [(job, ended) for t in range(1, 1001) for job, _, ended in stepwise.run_to(float(t))]
    assert happened == [(job.request_id, ended) for job, ended in again]
    assert whole.at == pytest.approx(max(job.done_at or 0.0 for job, _ in again))
    assert whole.is_idle()
    assert whole.steps == stepwise.steps


def test_replicas_are_paid_from_their_order_to_the_end_of_their_drain() -> None:
    long = Job("a", 1.0, 1, 20)
    outcome = run([long], {3.0: 2, 12.0: 1})
    assert [(c.at, c.before, c.after) for c in outcome.changes] == [(3.0, 1, 2), (12.0, 2, 1)]
    assert outcome.replica_s == pytest.approx(30.0 + (12.0 - 3.0))
    serving = {at: n for at, _, n, _ in outcome.timeline}
    assert (serving[7.0], serving[9.0], serving[13.0]) == (1, 2, 1)


def test_each_replica_takes_its_own_start_and_the_policy_sees_those_that_serve() -> None:
    starts: dict[float, tuple[float, ...]] = {}

    def scaling(at: float, seen: Observation) -> int:
        starts[at] = seen.load.cold_start_s
        return 4

    world = World(hardware=HARDWARE, cold_starts_s=(9.0, 5.0, 3.0))
    outcome = SimulatedFleet(world).run([], 30.0, scaling)
    (ordered,) = outcome.changes
    at = ordered.at
    assert [n for t, _, n, _ in outcome.timeline if t in {at + 2, at + 4, at + 6}] == [1, 3, 4]
    assert (starts[at], starts[at + 5], starts[at + 7]) == ((9.0,), (9.0, 3.0, 3.0), (9.0, 5.0, 3.0, 3.0))


def test_a_replica_that_goes_ends_what_it_has_first() -> None:
    jobs = [Job(f"j{i}", 0.0, 1, 20) for i in range(2)]
    outcome = run(jobs, {2.0: 1}, initial=2)
    assert all(j.done_at is not None for j in outcome.jobs)
    assert 30.0 + 20.0 < outcome.replica_s < 30.0 + 25.0


def test_without_a_replica_requests_wait_and_are_refused_at_the_limit() -> None:
    (served,) = run([Job("a", 0.5, 1, 2)], {2.0: 1}, initial=0, minimum=0).jobs
    assert served.first_at == pytest.approx(7.0 + 1.1, abs=1.1)
    (refused,) = run([Job("a", 0.5, 1, 2)], initial=0, minimum=0, no_replica_s=3.0).jobs
    assert (refused.refused, refused.first_at) == ("NoReplica", None)


def test_what_waits_in_an_engine_moves_to_a_new_replica() -> None:
    outcome = run([Job(f"j{i}", 0.0, 1, 10) for i in range(8)], {2.0: 4})
    alone = run([Job(f"j{i}", 0.0, 1, 10) for i in range(8)])
    assert max(j.first_at or 0.0 for j in outcome.jobs) < max(j.first_at or 0.0 for j in alone.jobs) - 10


def test_attainment_counts_what_was_refused_as_missed() -> None:
    jobs = [Job("a", 0.0, 1, 1, first_at=1.0), Job("b", 0.0, 1, 1, first_at=3.0), Job("c", 0.0, 1, 1, refused="NoReplica")]
    outcome = Outcome(jobs, 10.0)
    assert outcome.attainment(2.0) == pytest.approx(1 / 3)
    assert outcome.ttft_s(0.5) == 3.0
    assert outcome.ttft_s(0.95) == float("inf")
