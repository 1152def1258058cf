"""A replica reports its start: the clocks are real, Serve's answer and the first output are the test's."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import ray
from ray.serve.context import ReplicaContext

from serve_app.replica.cold_start import EnginePhases
from serve_app.replica.start_report import StartReport, asked_at, process_created_at
from tests.doubles.fleet import in_loop, until

WHO = {"model": "tiny", "replica": "abc"}


class Shown:
    """Keeps the phases that a report shows."""

    def __init__(self) -> None:
        self.phases: list[Mapping[str, float]] = []

    def show(self, phases: Mapping[str, float]) -> None:
        self.phases.append(phases)


async def answer(asked_at: float | None) -> float | None:
    return asked_at


def report() -> StartReport:
    now = time.monotonic()
    return StartReport(WHO, began=now - 9.0, engine_ready=now - 0.5, engine=EnginePhases(0.0, load_s=2.0, warm_up_s=1.5))


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [r.getMessage() for r in caplog.records if r.name == "serve_app.replica.start_report"]
    return [json.loads(line.removeprefix("cold start: ")) for line in lines]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="serve_app")


@in_loop
async def _until_the_first_token(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    started, first_output = report(), asyncio.Event()
    assert started.load() == {}
    running = asyncio.create_task(started.run(answer(process_created_at() - 30.0), first_output, shown.show))
    await until(lambda: shown.phases)
    assert started.load()["cold_start"]["scheduled"] == pytest.approx(30.0, abs=0.1)
    assert logged(caplog) == []
    first_output.set()
    await running
    assert started.load()["cold_start"] == shown.phases[1]


def test_a_start_is_logged_once_as_its_first_token_goes_out(caplog: pytest.LogCaptureFixture) -> None:
    shown = Shown()
    _until_the_first_token(shown, caplog)
    assert [phases.keys() - shown.phases[0].keys() for phases in shown.phases] == [set(), {"first_token"}]
    (line,) = logged(caplog)
    assert (line["model"], line["replica"], line["until"]) == ("tiny", "abc", "first_token")
    assert line["phases"] == shown.phases[1]
    assert line["phases"]["import"] == pytest.approx(5.0)
    assert line["start_s"] == pytest.approx(sum(shown.phases[0].values()))


@pytest.mark.parametrize("cancel", [False, True])
def test_a_start_whose_first_token_does_not_come_is_logged_without(caplog: pytest.LogCaptureFixture, cancel: bool) -> None:
    @in_loop
    async def run() -> None:
        shown = Shown()
        running = asyncio.create_task(report().run(answer(None), asyncio.Event(), shown.show, limit_s=60.0 if cancel else 0.0))
        await until(lambda: shown.phases)
        if cancel:
            running.cancel()
        await asyncio.wait([running])

    run()
    (line,) = logged(caplog)
    assert line["until"] == "ready"
    assert not line["phases"].keys() & {"scheduled", "first_token"}


@pytest.mark.parametrize(
    "failure",
    [
        OSError(24, "Too many open files"),
        ConnectionError("refused"),
        TimeoutError(),
        ray.exceptions.RaySystemError("away"),
        ValueError("no such actor"),
        RuntimeError("can't start new thread"),
        AttributeError("get_deployment_details"),
    ],
    ids=lambda failure: type(failure).__name__,
)
@in_loop
async def test_no_failure_to_ask_serve_ends_the_report(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(ray, "get_actor", fail)
    replica = SimpleNamespace(app_name="app", deployment="tiny")
    assert await asked_at(cast(ReplicaContext, replica)) is None


def test_the_creation_of_the_process_is_between_the_moments_around_it() -> None:
    command = "from serve_app.replica.start_report import process_created_at; print(process_created_at())"
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    after = time.time()
    created_at = float(process.communicate()[0])
    assert before - 0.02 <= created_at <= after + 0.02  # two ticks
    assert process_created_at() == pytest.approx(psutil.Process().create_time(), abs=1.1)
