"""`make demo-autoscaling` reports while its fleet starts, and draws and explains what happened whatever the load test's verdict is."""

import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from loadtest.report.figures import read_run
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.batch.fleet_process import FleetProcess
from tests.autoscaling.plant import RULES, Plant
from tests.docs.test_docs import parse
from tests.loadtest.synthetic import write_run
from tools import demo_autoscaling

STEP = {"arrival": {"law": "step", "rate": 8.0, "to_rate": 16.0, "at_s": 18.0}}


def write_decisions(run: Path) -> None:
    """Write the log of a minute in which the load doubles after 40 s."""
    plant, scaler = Plant(running=1, maximum=4), FleetScaler(FleetRules(models={"chat": RULES}))
    records = []
    for number in range(60):
        seen = FleetObservation(at=plant.at, models={"chat": plant.see(plant.load(3.0 if number < 40 else 12.0))})
        decided = scaler.observe(seen)
        plant.obey(decided["chat"])
        records.append(Record(number=number, time=1_790_000_000.0 + number, seen=seen, decided=decided))
    adapter = TypeAdapter(Record)
    (run / "decisions.jsonl").write_text(
        "".join(f"{adapter.dump_json(record, exclude_defaults=True, by_alias=True).decode()}\n" for record in records)
    )


def test_a_fleet_that_does_not_start_is_one_sentence_after_what_it_said_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import sys; print('  ingress 1 starting', flush=True); sys.exit('error: no memory')"
    monkeypatch.setattr(demo_autoscaling, "FleetProcess", partial(FleetProcess, command=(sys.executable, "-c", child)))
    assert demo_autoscaling.main(["--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr() == (
        "starting the fleet of examples/autoscaling.yaml, about a minute\n  ingress 1 starting\n",
        f"error: the fleet of {demo_autoscaling.CONFIG} ended with status 1: no memory\n",
    )


def test_ctrl_c_is_one_sentence_and_ends_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = f"""
import os, pathlib, signal, sys
def end(*_):
    pathlib.Path({str(tmp_path / "ended")!r}).touch()
    raise SystemExit
signal.signal(signal.SIGINT, end)
sys.stdin.read()  # until the parent knows its process
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
    monkeypatch.setattr(demo_autoscaling, "FleetProcess", partial(FleetProcess, command=(sys.executable, "-c", child)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert demo_autoscaling.main(["--out", str(tmp_path / "run")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "ended").exists()
    said = f"the fleet has ended; its records, if any, are in {tmp_path / 'run'}"
    assert capsys.readouterr().err == f"\nstopped before there was a plot; {said}\n"


def test_an_invalid_run_has_a_plot_and_the_reason_of_the_first_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", sick=True, scenario=STEP)
    write_decisions(run)
    assert demo_autoscaling.show(run, 3) == 0
    said = capsys.readouterr().out
    assert "\nchat, 2026-09-21T14:" in said
    assert "Z: 1 -> 2, because the demand needs that many\n" in said
    (log,) = re.findall(r"every decision: \S*(serve-app .+)", said)  # with the path of the environment that runs this test
    parse(shlex.split(log))
    assert f"replicas and latencies over time: {run}/plot/autoscaling.svg\n" in said
    assert (run / "plot" / "autoscaling.png").stat().st_size > 10_000


def test_the_plot_marks_the_jump_the_orders_and_when_replicas_serve(tmp_path: Path) -> None:
    found = [
        (mark.t_s, mark.text) for mark in demo_autoscaling.marks(read_run(write_run(tmp_path / "run", sick=True, scenario=STEP)))
    ]
    assert found == [
        (0.0, "busy machine: latencies inexact"),
        (18.0, "the load jumps"),
        (21.0, "2 ordered (+3 s)"),
        (25.0, "3 ordered (+7 s)"),
        (29.0, "2 serving (+11 s)"),
        (36.0, "3 serving (+18 s)"),
    ]


def test_without_records_the_demo_ends_with_the_load_tests_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [demo_autoscaling.show(tmp_path, status) for status in (0, 4)] == [1, 4]
    run = write_run(tmp_path / "run")
    (run / "server.jsonl").write_text("")
    assert demo_autoscaling.show(run, 0) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith(f"error: no plot: {tmp_path}: holds no run")
    assert third == f"error: no plot: {run}: has no record of replicas"


def test_an_application_that_is_gone_leaves_no_log(tmp_path: Path) -> None:
    reason = demo_autoscaling.save_decisions("gone", tmp_path / "decisions.jsonl")
    assert reason.startswith("error: no application named 'gone'")
    assert not (tmp_path / "decisions.jsonl").exists()


def test_a_log_that_takes_too_long_is_given_up_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_autoscaling, "LOG_LIMIT_S", 0.001)
    reason = demo_autoscaling.save_decisions("busy", tmp_path / "decisions.jsonl")
    assert reason == "`serve-app autoscale log` took longer than 0.001 s, on a machine that is too busy"


@pytest.mark.parametrize("has_empty_log", [False, True])
def test_without_a_log_the_plot_comes_with_the_reason_and_the_way_to_an_explanation(
    has_empty_log: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", sick=True, scenario=STEP)
    if has_empty_log:
        (run / "decisions.jsonl").touch()
    assert demo_autoscaling.show(run, 3, "" if has_empty_log else "the command took too long") == 1
    said = capsys.readouterr().out
    reason = "it is empty" if has_empty_log else "the command took too long"
    assert f"no explanation, because there is no log of the decisions: {reason}\n" in said
    up, autoscale = (shlex.split(command) for command in re.findall("serve-app [^,\n]+", said))
    parse(up)
    parse(autoscale)
    assert (demo_autoscaling.ROOT / up[-1], autoscale[1:]) == (demo_autoscaling.CONFIG, ["autoscale", "explain"])
    assert f"replicas and latencies over time: {run}/plot/autoscaling.svg\n" in said
    assert said.endswith("The demo itself is complete but for the explanation.\n")
