"""These tests replay a log under its own rules and under others."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.autoscaling.capacity import Slo, StepTimes
from serve_app.autoscaling.decision import Observation, ScalingRules
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.simulation.replay import Result, again, jobs_of, lived, measured
from serve_app.autoscaling.simulation.simulated_fleet import Outcome, SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, steps_of_times
from serve_app.errors import DecisionLogError

TIMES = StepTimes(step_s=0.03, output_token_s=0.0005, prompt_token_s=0.0002)
RULES = ScalingRules(slo=Slo(ttft_s=2.0, itl_s=0.1), utilization=0.8, gpus_per_replica=1)
SECONDS = 400
Logged = tuple[list[Record], Outcome]


def bounds(name: str, record: Record, cold_start_s: float) -> tuple[int, int]:
    assert cold_start_s in {60.0, 50.0}, "before the first observation, and the first replica's report"
    return record.seen.models[name].minimum, record.seen.models[name].maximum


@pytest.fixture(scope="module")
def logged() -> Logged:
    """Return the log of a simulated fleet: 4 requests/s, then 10. Its first replica had taken longer to start."""
    records: list[Record] = []
    scaler = FleetScaler(FleetRules(models={"chat": RULES}))

    def scaling(at: float, seen: Observation) -> int:
        observed = FleetObservation(at=1000 + at, models={"chat": seen})
        before = FleetScaler(FleetRules(models={"chat": RULES})) if not records else None
        decided = scaler.observe(observed)
        records.append(Record(number=len(records), time=1e9 + at, seen=observed, decided=decided, scaler=before))
        return decided["chat"].desired

    slow, fast = (range(4 * SECONDS // 2), range(10 * SECONDS // 2))
    due = [i / 4 for i in slow] + [SECONDS / 2 + i / 10 for i in fast]
    rng = random.Random(1)
    jobs = [Job(f"j{i}", at, 200, 1 + int(rng.expovariate(1 / 120))) for i, at in enumerate(due)]
    world = World(
        hardware=Hardware(step_s=steps_of_times(TIMES), kv_tokens=20_000, max_num_seqs=64), maximum=9, cold_starts_s=(50.0, 20.0)
    )
    return records, SimulatedFleet(world).run(jobs, float(SECONDS), scaling)


@pytest.fixture
def run(logged: Logged) -> Callable[..., Result]:
    def run(rules: FleetRules, **options: object) -> Result:
        settings = {"bounds": bounds, "no_replica_s": 30.0, "max_waiting_requests": 1000, **options}
        return again(logged[0], rules, **settings)["chat"]  # type: ignore[arg-type]

    return run


def test_the_log_shows_what_became_of_it(logged: Logged) -> None:
    records, outcome = logged
    said = lived(records, "chat")
    assert said.attainment == pytest.approx(outcome.attainment(2.0), abs=0.01)
    # Until the end of its last drain, and from the order on: the log has the replicas asked for.
    assert said.replica_s == pytest.approx(sum(wanted for _, wanted, _, _ in outcome.timeline), rel=0.02)
    assert (said.changes, said.most) == (len(outcome.changes), max(c.after for c in outcome.changes))


def test_its_requests_are_as_many_and_as_long(logged: Logged) -> None:
    records, outcome = logged
    jobs = list(jobs_of(records, "chat", 1))
    assert len(jobs) == pytest.approx(len(outcome.jobs), rel=0.01)
    assert [j.due_at for j in jobs] == sorted(j.due_at for j in jobs)
    assert {j.prompt_tokens for j in jobs} == {200}
    mean = sum(j.output_tokens for j in outcome.jobs) / len(outcome.jobs)
    assert sum(j.output_tokens for j in jobs) / len(jobs) == pytest.approx(mean, rel=0.1)
    assert list(jobs_of(records, "chat", 1)) == jobs
    assert list(jobs_of(records, "chat", 2)) != jobs


def test_under_its_own_rules_it_comes_to_about_the_same(logged: Logged, run: Callable[..., Result]) -> None:
    said, result = lived(logged[0], "chat"), run(FleetRules(models={"chat": RULES}))
    assert result.attainment == pytest.approx(said.attainment, abs=0.05)
    assert result.replica_s == pytest.approx(said.replica_s, rel=0.15)
    assert result.ttft_p95_s is not None
    assert result.ttft_p95_s < 2.0


def test_replicas_start_as_those_of_the_log_did(logged: Logged, run: Callable[..., Result]) -> None:
    def slow(record: Record) -> Record:
        load = replace(record.seen.models["chat"].load, cold_start_s=(60.0,))
        return replace(record, seen=replace(record.seen, models={"chat": replace(record.seen.models["chat"], load=load)}))

    rules = FleetRules(models={"chat": RULES})
    slower = again([slow(r) for r in logged[0]], rules, bounds, no_replica_s=30.0, max_waiting_requests=1000)["chat"]
    own = run(rules)
    assert slower.ttft_p95_s is not None
    assert own.ttft_p95_s is not None
    assert slower.ttft_p95_s > own.ttft_p95_s


def test_more_headroom_costs_more_replicas_and_fewer_gpus_cost_the_slo(run: Callable[..., Result]) -> None:
    own = run(FleetRules(models={"chat": RULES}))
    roomy = run(FleetRules(models={"chat": replace(RULES, utilization=0.4)}))
    assert roomy.replica_s > 1.3 * own.replica_s
    short = run(FleetRules(models={"chat": RULES}, max_gpus=1))
    assert short.most == 1
    assert short.attainment < own.attainment


def test_a_model_that_other_rules_do_not_scale_has_its_minimum(run: Callable[..., Result]) -> None:
    fixed = run(FleetRules(models={}), bounds=lambda name, record, cold_start_s: (6, 6))
    assert (fixed.most, fixed.changes) == (6, 1)


def test_models_that_were_never_measured_are_left_out(logged: Logged) -> None:
    records = logged[0]
    assert measured(records) == ["chat"]
    assert measured(records[:3]) == []
    assert again(records[:3], FleetRules(models={"chat": RULES}), bounds, no_replica_s=1.0, max_waiting_requests=1) == {}


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"requests": 1e18}, "1e\\+18 requests"),
        ({"prompt_tokens": 1e30}, "1e\\+30 tokens of .* requests"),
        ({"finished_tokens": float("nan")}, "nan tokens of .* requests"),
    ],
)
def test_a_load_that_cannot_be_is_a_damaged_log(logged: Logged, wrong: dict[str, Any], shown: str) -> None:
    records = list(logged[0])
    seen = records[200].seen.models["chat"]
    damaged = replace(seen, load=replace(seen.load, **wrong))
    records[200] = replace(records[200], seen=replace(records[200].seen, models={"chat": damaged}))
    with pytest.raises(DecisionLogError, match=f"record 200 has {shown}; the log is damaged"):
        again(records, FleetRules(models={"chat": RULES}), bounds, no_replica_s=1.0, max_waiting_requests=1)


def test_step_times_that_cannot_be_are_a_damaged_log(logged: Logged) -> None:
    records = list(logged[0])
    decision = records[-1].decided["chat"]
    wrong = replace(decision, inputs={**decision.inputs, "output_token_s": float("nan")})
    records[-1] = replace(records[-1], decided={"chat": wrong})
    with pytest.raises(DecisionLogError, match="has output_token_s = nan; the log is damaged"):
        again(records, FleetRules(models={"chat": RULES}), bounds, no_replica_s=1.0, max_waiting_requests=1)
