"""These tests check the terminal's output during a run."""

from pathlib import Path

import msgspec
import pytest

from loadtest.control.progress import Figures, print_verdict
from loadtest.judge.analysis import analyse
from loadtest.judge.cost import Cost
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import HealthSample, Row, read_manifest
from tests.loadtest.judge.written_runs import write_run


def test_a_narrow_terminal_has_counts_and_figures_on_two_lines() -> None:
    cls = {"input_tokens": {"mean": 100}, "output_tokens": {"mean": 50}}
    scenario = parse_scenario({"name": "t", "arrival": {"law": "constant", "rate": 2}, "requests": [cls]})
    figures = Figures(scenario, make_schedule(scenario))
    assert figures.text(0.1, between="\n").count("\n") == 0  # no figures yet
    figures.add([], [HealthSample(1.0, 0, 0.1, lag_max_s=0.004, gc_s=0.0, in_flight=1, num_sent=2, num_rows=0)])
    assert figures.text(0.6) == "due 2  sent 2  done 0  failed 0  lag 4 ms"
    assert figures.text(0.6, between="\n") == "due 2  sent 2  done 0  failed 0\nlag 4 ms"


def test_the_first_tokens_of_answers_that_failed_are_no_ttft() -> None:
    scenario = parse_scenario({"name": "t", "arrival": {"law": "constant", "rate": 2}})
    figures = Figures(scenario, make_schedule(scenario))
    rows = [Row(k, 0, k / 2, "stream_error", sent_s=k / 2, first_s=k / 2 + 0.1, end_s=k / 2 + 0.2) for k in range(3)]
    figures.add(rows, [])
    assert figures.text(2.0) == "due 5  sent 0  done 3  failed 3  good 0.0/s"
    figures.add([Row(3, 0, 1.5, "ok", sent_s=1.5, first_s=1.7, last_s=1.9, end_s=1.9)], [])
    assert figures.text(2.0) == "due 5  sent 0  done 4  failed 3  TTFT p50 200 ms  good 0.5/s"


def test_the_verdict_tells_the_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 400)
    summary = msgspec.structs.replace(analyse(run), cost=Cost(4.0, replica_s=80.0, seen_s=40.0, replica_s_per_good=0.2))
    print_verdict(summary, read_manifest(run), run)
    told = "cost: 4 output tokens per good request, 80 replica-seconds in 40 s, 0.2 replica-seconds per good request"
    assert told in capsys.readouterr().out
