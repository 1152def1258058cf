"""These tests check the length of the runs that compare the fleet with a bare server under open-loop load."""

import pytest

from benchmarks.latency import mixed


@pytest.mark.parametrize(("qps", "seconds", "lasts_s"), [(1, 180, 1010), (4, 180, 260), (4, 300, 310), (8, 180, 190)])
def test_a_run_lasts_until_a_thousand_requests_were_due_after_the_warm_up(qps: float, seconds: float, lasts_s: float) -> None:
    scenario = mixed(qps, seconds)
    assert (scenario.duration_s, scenario.warmup_s) == (lasts_s, 10)
