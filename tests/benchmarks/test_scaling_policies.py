"""These tests compare the autoscaler's rivals with the documents of their systems."""

from dataclasses import dataclass, field

import pytest

from benchmarks.autoscaling import SLO, hardware
from benchmarks.scaling_cases import Result, line_beside_others
from benchmarks.scaling_loads import CASES
from benchmarks.scaling_policies import MODEL, Keda, Oracle, Planner, RequestCount, Silent
from benchmarks.scaling_tables import COUNT, Mean, best_count
from serve_app.autoscaling.decision import Decision, Observation, ScalingRules
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.signals import ModelLoad
from serve_app.autoscaling.simulation.simulated_fleet import Scaling


def decide(policy: Scaling, counts: dict[float, float], *, until: int, target: int = 1, waiting: bool = False) -> dict[int, int]:
    """Return the changes of the target, by second. ``counts``: requests from that second on."""
    changes: dict[int, int] = {}
    for at in range(1, until):
        count = [n for t, n in counts.items() if t <= at][-1]
        load = ModelLoad(interval_s=1.0, waiting=count) if waiting else ModelLoad(interval_s=1.0, running=count)
        seen = Observation(running=target, target=target, minimum=1, maximum=20, load=load)
        if (wanted := policy(float(at), seen)) != target:
            changes[at] = target = wanted
    return changes


def test_serves_policy_waits_for_reports_the_average_and_its_delay() -> None:
    changes = decide(RequestCount(), {0: 2.0, 100: 8.0}, until=200)
    first = min(changes)
    assert 130 <= first <= 150, "10 s of reports and 30 s of delay"
    assert changes[max(changes)] == 4


def test_serves_policy_lets_go_after_ten_minutes() -> None:
    changes = decide(RequestCount(), {0: 8.0, 100: 2.0}, until=900, target=4)
    assert min(changes) >= 700
    assert changes[max(changes)] == 1


def test_keda_polls_and_grows_twofold_and_lets_go_after_its_stabilization() -> None:
    changes = decide(Keda(), {0: 5.0, 100: 60.0, 200: 0.0}, until=700, waiting=True)
    up = [n for at, n in changes.items() if at <= 200]
    assert 100 < min(changes) <= 145
    assert up[0] == 5, "four more, which is more than twice"
    assert min(at for at in changes if at > 200) >= 450, "waiting was last seen before 200 s, and counts for 300 s"
    assert changes[max(changes)] == 1


@pytest.mark.parametrize(("at", "wanted"), [(10.0, 2), (54.0, 2), (56.0, 4), (200.0, 4)])
def test_the_oracle_orders_a_cold_start_ahead(at: float, wanted: int) -> None:
    oracle = Oracle(rate_at=lambda t: 8.0 if t < 100 else 16.0, rate_per_replica=4.0, cold_start_s=40.0)
    seen = Observation(running=2, target=2, minimum=1, maximum=20, load=ModelLoad())
    assert oracle(at, seen) == wanted


def test_the_planner_forecasts_a_trend_each_three_minutes_and_divides_by_its_profile() -> None:
    """By the batches that a replica times (32.3 ms + 0.066 + 0.371, docs/autoscaling.md) a request is 0.115 s of work.

    Of those 100 ms between tokens allow 0.60 a second, so that a replica takes 5.2 requests/s.
    """
    planner, target, changes = Planner(hardware=hardware(), slo=SLO), 1, {}
    for at in range(1, 600):
        rate = 4.0 if at <= 182 else 12.0
        load = ModelLoad(interval_s=1.0, requests=rate, prompt_tokens=288 * rate, finished=rate, finished_tokens=128 * rate)
        seen = Observation(running=target, target=target, minimum=1, maximum=20, load=load)
        if (wanted := planner(float(at), seen)) != target:
            changes[at] = target = wanted
    first, second = changes.items()
    assert 360 <= first[0] <= 370, "the first interval that has the new rate"
    assert first[1] == 4, "it forecasts 20/s: 8 more again"
    assert second[1] == 3, "then 12/s, which do not grow"


def test_an_interval_over_seeds_is_students() -> None:
    """Of 1, 2, 3: the standard error is 1 / sqrt(3), and t with 2 degrees is 4.303."""
    assert Mean.of([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert Mean.of([1.0, 2.0, 3.0]).text(".1f") == "2.0 ± 2.5"
    assert Mean.of([1.0]).text(".1f") == "1.0"


@dataclass(slots=True)
class Recording(FleetScaler):
    """A scaler that keeps what it was shown."""

    loads: list[ModelLoad] = field(default_factory=list)

    def observe(self, seen: FleetObservation) -> dict[str, Decision]:
        self.loads.append(seen.models[MODEL].load)
        return FleetScaler.observe(self, seen)


def test_of_replicas_that_fall_silent_the_steps_are_missing_and_what_runs_there_stays_as_last_reported() -> None:
    """2 of 10 replicas with 20 requests each fall silent; the load halves, and later 4 replicas are left, 2 of them silent."""
    policy = Silent(ScalingRules(slo=SLO), share=0.2, since_s=60.0)
    policy._scaler = scaler = Recording(FleetRules(models={MODEL: ScalingRules(slo=SLO)}))
    loads = [
        (59.0, 10, ModelLoad(interval_s=1.0, steps=200.0, busy_s=10.0, running=200.0, queued=10.0, kv_usage=0.8)),
        (60.0, 10, ModelLoad(interval_s=1.0, steps=200.0, busy_s=10.0, running=200.0, queued=10.0, kv_usage=0.8)),
        (61.0, 10, ModelLoad(interval_s=1.0, steps=300.0, busy_s=10.0, running=100.0, kv_usage=0.4)),
        (62.0, 4, ModelLoad(interval_s=1.0, steps=80.0, busy_s=4.0, running=80.0, kv_usage=0.8)),
    ]
    for at, running, load in loads:
        policy(at, Observation(running=running, target=running, minimum=1, maximum=20, load=load))
    assert scaler.loads[0] == loads[0][2]
    told = [(load.steps, load.busy_s, load.running, load.queued, load.kv_usage) for load in scaler.loads[1:]]
    assert told[0] == pytest.approx((160.0, 8.0, 200.0, 10.0, 0.8))
    assert told[1] == pytest.approx((240.0, 8.0, 80.0 + 40.0, 2.0, 0.8 * 0.4 + 0.2 * 0.8))
    assert told[2] == pytest.approx((40.0, 2.0, 40.0 + 40.0, 2.0, 0.8))
    assert [load.silent_replica_share for load in scaler.loads] == [0.0, 0.2, 0.2, 0.5]


def test_the_best_count_is_the_cheapest_of_those_that_are_as_good_as_we_are() -> None:
    counts = {"a": (0.97, 100.0), "b": (0.993, 300.0), "c": (0.992, 200.0)}
    assert best_count(counts, ours=0.999) == "c", "from 0.99 on all are good enough"
    assert best_count(counts, ours=0.96) == "a"
    assert best_count({"a": (0.5, 1.0), "b": (0.6, 9.0)}, ours=0.9) == "b", "none is: the best"


def test_a_case_stands_beside_other_policies_with_costs_over_ours() -> None:
    case = next(case for case in CASES if case.name == "step x1.5 from 8 replicas")
    ours = Result(most=1.2, in_time=0.98, replica_s=1000.0, changes=4, first_s=6.0, bound_s=500.0)
    worse, dear = ours._replace(in_time=0.9, replica_s=800.0), ours._replace(in_time=0.99, replica_s=1500.0)
    others = {"planner": [worse, worse._replace(in_time=0.7)], f"{COUNT} 16": [dear, dear], f"{COUNT} 32": [worse, worse]}
    assert line_beside_others(case, [ours, ours._replace(replica_s=3000.0)], others) == (
        "| step x1.5 from 8 replicas | 98.0% ± 0.0%, 98.0%; 1.00 | 80.0% ± 127.1%, 70.0%; 0.40 | 99.0% ± 0.0%, 99.0%; 0.75 (16) |"
    )
