"""These tests compute costs of windows whose replicas are written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtest.judge.analysis import analyse
from loadtest.judge.cost import Cost, cost_of
from loadtest.records import ServerSample
from tests.loadtest.judge.written_runs import every_fourth, write_run


def seconds(*values: float) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def serve(t_s: float, **ready: float) -> ServerSample:
    return ServerSample(t_s, "serve", {f"replicas_ready/{name}": value for name, value in ready.items()})


def test_replicas_count_for_as_long_as_they_were_ready_inside_the_window() -> None:
    # 1 replica until 5 s, 3 from 5 to 9, 2 from there; the window is 2 s to 12 s: 3 + 12 + 6.
    samples = [serve(0, a=1), serve(5, a=1, b=2), ServerSample(6, "metrics", {"running": 9}), serve(9, a=2)]
    found = cost_of(samples, (2, 12), good_at_s=seconds(*np.linspace(2, 11.9, 40)), output_tokens=1000, gpus_per_replica=8)
    assert found == Cost(25.0, replica_s=21.0, seen_s=10.0, gpu_s=168.0, replica_s_per_good=21 / 40, gpu_s_per_good=168 / 40)


def test_time_in_which_nobody_told_the_replicas_is_not_charged() -> None:
    found = cost_of([serve(0, a=2), serve(60, a=2)], (0, 70), good_at_s=seconds(*np.arange(70.0) + 0.5), output_tokens=70)
    assert (found.replica_s, found.seen_s, found.gpu_s) == (40.0, 20.0, None)
    assert found.replica_s_per_good == 2.0, "of the 20 that were good in those 20 s, not of all 70"
    assert found.gpu_s_per_good is None


def test_good_requests_count_where_replicas_were_seen_even_if_the_load_was_another_one_there() -> None:
    # Seen from 5 s to 15 s and from 60 s to 70 s. Of 100 good requests 8 were due then, two of them at an edge.
    good_at_s = seconds(4.9, *np.linspace(16, 59, 91), 5.0, 6.0, 14.0, 15.0, 60.5, 61.0, 69.0, 69.9)
    found = cost_of([serve(60, a=1), serve(5, a=3)], (0, 70), good_at_s=good_at_s, output_tokens=200, gpus_per_replica=2)
    assert found == Cost(2.0, replica_s=40.0, seen_s=20.0, gpu_s=80.0, replica_s_per_good=5.0, gpu_s_per_good=10.0)


def test_without_replicas_and_without_good_requests_nothing_is_made_up() -> None:
    assert cost_of([], (0, 10), good_at_s=seconds(*np.arange(10.0)), output_tokens=30) == Cost(3.0)
    assert cost_of([serve(0, a=0)], (0, 10), good_at_s=seconds(), output_tokens=60) == Cost(None, replica_s=0.0, seen_s=10.0)


def test_an_ingress_is_no_replica() -> None:
    samples = [serve(0, **{"ingress": 4, "replica-chat": 1, "replica-code": 2})]
    found = cost_of(samples, (0, 10), good_at_s=seconds(*np.arange(10.0)), output_tokens=10, gpus_per_replica=2)
    assert (found.replica_s, found.gpu_s) == (30.0, 60.0)


def test_tokens_are_those_of_the_requests_that_could_be_good(tmp_path: Path) -> None:
    # A request each 0.1 s until 40 s; every fourth is answered, by 4 tokens within 1.5 s. The window ends at 40 s.
    judged: tuple[dict[str, Any], ...] = ({}, {"slo": "ttft_p50=2s"})
    for number, slo in enumerate(judged):
        run = write_run(tmp_path / f"run-{number}", 400, every_fourth(100), **slo)
        cost = analyse(run).cost
        assert cost is not None
        assert cost.tokens_per_good == 4.0, "with the SLO those due in the window count, whose last ones end behind it"
