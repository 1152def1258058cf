"""A demo's button kills one engine of the fleet, and no other process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest

from serve_app.ui.killing import Killer, is_local, victim_of
from tests.ui.fake_service import MODEL, ingress, member, starting

WAITS = "input()"


@pytest.fixture
def engine() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends with its standard input."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as process:
        yield process
        if process.stdin is not None:
            process.stdin.close()


def report(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"time": 1000.0, "members": [ingress(), *members], "decisions": [], **more}


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ([member("a", running=1, engine_pid=5), member("b", running=3, engine_pid=6)], "b"),
        ([member("a", running=9, state="draining", engine_pid=5), member("b", running=0, engine_pid=6)], "b"),
        ([member("a", running=1), member("b", running=0, engine_pid=6)], "b"),
        ([member("a", running=9, engine_pid=4) | {"model": "x"}, member("b", engine_pid=5), member("c", engine_pid=6)], "b"),
    ],
)
def test_the_busiest_replica_is_the_victim_where_another_one_can_take_over(members: list[dict[str, Any]], name: str) -> None:
    victim = victim_of(report(*members))
    assert victim is not None
    assert victim.replica_id == f"fake#replica#{name}"


def test_without_a_ready_replica_nothing_is_killed() -> None:
    start = {MODEL: {"target": 1, "starting": [starting("c", since=999.0)]}}
    said = Killer(psutil.Process()).kill(report(models=start))
    assert said == "No replica is ready, so there is no engine to kill."


def test_an_engine_that_the_starter_has_started_is_killed(engine: "subprocess.Popen[bytes]") -> None:
    said = Killer(psutil.Process()).kill(report(member("a", engine_pid=engine.pid)))
    assert said.startswith(f"Killed the engine of replica a, process {engine.pid}")
    assert engine.wait() == -SIGKILL


def test_a_process_of_somebody_else_is_left_alone(engine: "subprocess.Popen[bytes]") -> None:
    """Here the pages' starter is another child of this process."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as starter:
        said = Killer(psutil.Process(starter.pid)).kill(report(member("a", engine_pid=engine.pid)))
        starter.communicate()
    assert "was not started on this machine by this" in said
    assert engine.poll() is None


def test_an_engine_that_was_forked_for_the_starters_ray_node_is_killed(tmp_path: Path) -> None:
    """The engine is a child of this process, and the starter is another one."""
    (tmp_path / "raylet").symlink_to(Path(sys.executable).resolve())
    starts = f"import subprocess; raylet = subprocess.Popen([{str(tmp_path / 'raylet')!r}, '-ISc', {WAITS!r}]); print(raylet.pid)"
    starts += "; raylet.wait()"
    with subprocess.Popen([sys.executable, "-uc", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        environment = {**os.environ, "RAY_RAYLET_PID": starter.stdout.readline().strip(), "SPT_NOENV": "1"}
        entitled = f"from setproctitle import setproctitle; setproctitle('engine ' * 1000); print(1); {WAITS}"
        with subprocess.Popen(
            [sys.executable, "-uc", entitled], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as engine:
            assert engine.stdout is not None
            engine.stdout.readline()
            said = Killer(psutil.Process(starter.pid)).kill(report(member("a", engine_pid=engine.pid)))
            assert said.startswith(f"Killed the engine of replica a, process {engine.pid}")
        starter.communicate("\n")


def test_after_the_end_of_the_starter_nothing_is_killed(engine: "subprocess.Popen[bytes]") -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as starter:
        killer = Killer(psutil.Process(starter.pid))
        starter.communicate()
    assert "has just ended" in killer.kill(report(member("a", engine_pid=engine.pid)))
    assert engine.poll() is None


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1:8011", True),
        ("localhost", True),
        ("[::1]:8011", True),
        ("other.example:8011", False),
        ("", False),
        ("[", False),
    ],
)
def test_a_page_under_another_name_is_not_local(host: str, is_here: bool) -> None:
    assert is_local(host) is is_here
