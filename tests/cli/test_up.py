"""What `serve-app up` does while the fleet serves."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.cli import up
from serve_app.config import parse_settings
from serve_app.errors import ClusterFailed, ClusterSilent

SETTINGS = parse_settings({"models": {"a": {"model": "some/model"}}})
SILENT = ClusterSilent(problem="Ray has not answered for 30 s", hint="")


@dataclass
class Status:
    """As Serve's own of an application."""

    status: str = "RUNNING"
    message: str = ""
    deployments: dict[str, Any] = field(default_factory=dict)


def watch(monkeypatch: pytest.MonkeyPatch, *answers: Status | ClusterFailed) -> None:
    """Watch while Serve gives these answers, then be told to stop."""
    stop = threading.Event()
    given = iter(answers)
    monkeypatch.setattr(up, "_WATCH_S", 0.0)
    monkeypatch.setattr(up, "application_status", lambda name: next_answer(given, stop.set))
    up._watch(SETTINGS, stop)
    assert list(given) == []


def next_answer(given: Iterator[Status | ClusterFailed], end: Callable[[], None]) -> Status:
    answer = next(given, None)
    if answer is None:
        end()
        return Status()
    if isinstance(answer, ClusterFailed):
        raise answer
    return answer


def test_a_control_plane_that_does_not_answer_ends_nothing_and_is_told_once_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(monkeypatch, Status(), SILENT, SILENT, Status(), SILENT)
    said = "Ray has not answered for 30 s: what runs goes on, and nothing is replaced until it answers"
    assert " ".join(capsys.readouterr().err.split()) == f"{said} {said}"


def test_an_application_that_serve_gave_up_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterFailed, match="did not come up; serve-app: no memory"):
        watch(monkeypatch, Status(), Status("DEPLOY_FAILED", "no memory"))
