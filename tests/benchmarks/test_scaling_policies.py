"""The policies that the autoscaler is compared with, against what the documents of their systems say."""

import pytest

from benchmarks.scaling_policies import Keda, Oracle, RequestCount
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.signals import Load
from serve_app.autoscaling.simulated_fleet import Scaling


def decide(policy: Scaling, counts: dict[float, float], *, until: int, target: int = 1, waiting: bool = False) -> dict[int, int]:
    """Return the changes of the target, by second. ``counts``: requests from that second on."""
    changes: dict[int, int] = {}
    for at in range(1, until):
        count = [n for t, n in counts.items() if t <= at][-1]
        load = Load(interval_s=1.0, waiting=count) if waiting else Load(interval_s=1.0, running=count)
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
    seen = Observation(running=2, target=2, minimum=1, maximum=20, load=Load())
    assert oracle(at, seen) == wanted
