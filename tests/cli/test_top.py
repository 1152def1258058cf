"""`serve-app top` takes one look at a fake service, and computes rates between two looks."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.cli.top import screen
from serve_app.ui.changes import Happening
from tests.ui.fake_service import KEY, MODEL, fake_service, ingress, lost, member, starting


def drawn(report: dict[str, Any], before: dict[str, Any] | None = None, happened: tuple[Happening, ...] = ()) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(screen(report, before, happened))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def report(time: float, steps: int = 9, state: str = "ready") -> dict[str, Any]:
    replica = member("a", running=3, state=state)
    replica["load"]["steps"] = steps
    return {"url": "http://x", "time": time, "members": [ingress(), replica], "decisions": []}


@pytest.mark.parametrize("once", [["--once"], []])  # a pipe gets one look in any case
def test_one_look_shows_replicas_queues_and_ingresses(once: list[str]) -> None:
    with fake_service() as fake:
        done = CliRunner().invoke(app, ["top", *once, "--url", fake.url])
    words = [line.split() for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert ["a", "ready", "127.0.0.1:4001", "1", "0", "█░░░░", "25%", "31", "s"] in words
    assert ["in1", "ready", "127.0.0.1:4000", "2", "0", "0", "0"] in words


def test_the_json_is_what_the_ingress_tells() -> None:
    with fake_service(asks_for_key=True) as fake:
        done = CliRunner().invoke(app, ["top", "--json", "--url", fake.url, "--key", KEY])
    assert json.loads(done.stdout)["members"] == fake.report["members"]


def test_steps_a_second_come_from_two_looks() -> None:
    (line,) = (line for line in drawn(report(1010.0, steps=259), report(1000.0)) if line.startswith("a "))
    assert line.split() == ["a", "ready", "127.0.0.1:4001", "3", "0", "█░░░░", "25%", "25.0", "31", "s"]


def test_a_model_without_a_replica_has_its_table_and_happenings_come_last() -> None:
    lines = drawn({**report(1000.0), "members": [ingress()]}, None, (Happening(0.0, "old"), Happening(1.0, "new")))
    assert MODEL in lines
    assert any(line.startswith("none") for line in lines)
    assert lines[-2:] == ["00:00:01  new", "00:00:00  old"]


def test_targets_starts_and_losses_are_shown_where_the_report_has_them() -> None:
    models = {MODEL: {"target": 2, "starting": [starting("c", since=988.0)]}}
    losses = [lost("b", time=998.0, cause="its engine was killed")]
    lines = drawn({**report(1000.0), "models": models, "lost": losses})
    assert lines[0] == "http://x  00:16:40 UTC  1 of 2 replicas ready, 1 starting, 1 lost"
    assert f"{MODEL}: 1 of 2 ready, 1 starting, 1 lost" in lines
    assert "c  starting for 12 s: loads the model" in lines
    assert "b  lost 2 s ago: its engine was killed" in lines


def test_without_a_target_there_is_no_number_of_wanted_replicas() -> None:
    assert drawn(report(1000.0))[0] == "http://x  00:16:40 UTC  1 replica ready"


def test_what_a_service_names_is_no_markup() -> None:
    hostile = report(1000.0)
    hostile["members"][1]["replica_id"] = "x#[red]"
    assert any(line.startswith("[red]") for line in drawn(hostile))
