"""A command finds the cluster that it asks."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import psutil._pslinux
import pytest

from serve_app.cli import cluster
from serve_app.cli.cluster import RunState, connect_to_run, find_run, interrupt
from serve_app.errors import ClusterFailed
from tests.e2e.fleet import wait_until


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Address, namespace and token of each connection that was made. One `serve-app up`, named `mine`, runs here: this process."""
    made: list[tuple[str, ...]] = []
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr(cluster, "connect", lambda *to: made.append(to))
    RunState.of_this_process("mine", "127.0.0.1:6379", "secret", "http://127.0.0.1:8010").save()
    return made


def test_without_an_address_it_is_the_one_that_up_started_here(connected: list[tuple[str, ...]]) -> None:
    assert (connect_to_run("mine", ""), connected) == ("http://127.0.0.1:8010", [("127.0.0.1:6379", "mine", "secret")])


def test_a_given_address_is_asked_though_another_runs_here(connected: list[tuple[str, ...]]) -> None:
    assert (connect_to_run("mine", "10.0.0.1:6379"), connected) == ("", [("10.0.0.1:6379", "mine")])


def test_a_name_that_does_not_run_here_is_told_with_those_that_do(connected: list[tuple[str, ...]]) -> None:
    with pytest.raises(ClusterFailed, match="no application named 'other' runs on this machine; running here: mine"):
        connect_to_run("other", "")
    assert connected == []


def test_a_url_in_place_of_a_name_is_told_its_option(connected: list[tuple[str, ...]]) -> None:
    with pytest.raises(ClusterFailed, match=r"; an address comes after --url: --url http://127\.0\.0\.1:8010$"):
        connect_to_run("http://127.0.0.1:8010", "")
    assert connected == []


def test_an_address_where_nothing_listens_is_refused_before_ray_is_loaded() -> None:
    """Ray would try for more than a minute."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ClusterFailed, match=rf"^no Ray cluster answers at 127.0.0.1:{port}: .*Connection refused; name the GCS"):
        cluster.connect(f"127.0.0.1:{port}", "any")


RAY = """
import signal, subprocess, sys, time

def init(**_):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    process = subprocess.Popen(["sleep", "600"])
    if sys.argv[1] == "in C++":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    print(process.pid, flush=True)
    time.sleep(600)
"""
"""Stands for a Ray that starts: its handler of SIGTERM, one process, and no end of the start.

In C++, the main thread would run no handler of signals; here it waits with both signals blocked, so that another thread gets them.
"""
START = """
from serve_app.cli.cluster import local_cluster
from serve_app.config import parse_settings

with local_cluster(parse_settings({"models": {"a": {"model": "some/model"}}})):
    pass
"""


@pytest.mark.parametrize("where", ["in Python", "in C++"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_start_of_ray_with_a_line(number: signal.Signals, where: str, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(RAY)
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(cluster.__file__).parents[2]}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", START, where]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "ending Ray, which was still starting: a second or two, longer on a busy machine\n"
    assert not started.is_running()
    assert [*tmp_path.glob("serve-app-*")] == []


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a `serve-app up`; its state is in `state_of`."""
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes], name: str = "other") -> RunState:
    state = RunState(name, process.pid, "127.0.0.1:6379", "secret", "", cluster.identity(process.pid))
    state.save()
    return state


@pytest.mark.parametrize("name", ["{0}/precious", "../precious", "../../precious"])
def test_a_name_that_no_application_can_have_names_no_file(name: str, connected: list[tuple[str, ...]], tmp_path: Path) -> None:
    files = [tmp_path / "precious.json", tmp_path.parent / "precious.json"]
    for file in files:
        file.write_text('{"important": 1}')
    with pytest.raises(ClusterFailed, match=r"^no application named '.*precious' runs on this machine; running here: mine$"):
        find_run(name.format(tmp_path))
    assert [file.read_text() for file in files] == ['{"important": 1}'] * 2


@pytest.mark.parametrize("text", ['{"important": 1}', "", '{"name": "x", "pid": "7"}'])
def test_a_file_that_is_no_state_is_told_and_stays(text: str, connected: list[tuple[str, ...]]) -> None:
    path = RunState.path("other")
    path.write_text(text)
    with pytest.raises(ClusterFailed, match=rf"^{path} is not a file of serve-app up; remove it"):
        find_run("other")
    with pytest.raises(ClusterFailed, match="no application named 'third' runs on this machine; running here: mine"):
        find_run("third")
    assert path.read_text() == text


def test_a_state_that_cannot_be_read_is_told(connected: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user. A folder stands for it: tests may run as root, who may read everything."""
    path = RunState.path("other")
    path.mkdir()
    with pytest.raises(ClusterFailed, match=rf"^{path} cannot be read: Is a directory; .*SERVE_APP_CACHE"):
        find_run("other")


def test_a_state_that_a_killed_up_has_left_is_removed(other: subprocess.Popen[bytes]) -> None:
    replace(state_of(other), process="another boot/1").save()
    assert (RunState.load("other"), RunState.path("other").exists()) == (None, False)


def test_a_step_of_the_clock_ends_no_run(other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(other)
    boot_time = psutil._pslinux.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time + 3600)
    assert RunState.load("other") == state


def test_a_killed_up_whose_parent_does_not_wait_for_it_runs_no_longer(other: subprocess.Popen[bytes]) -> None:
    state = state_of(other)
    other.kill()
    wait_until(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE, limit_s=60.0, what="the end of the process")
    interrupt(state)
    assert RunState.load("other") is None


def test_to_interrupt_is_to_wait_until_it_has_ended(other: subprocess.Popen[bytes]) -> None:
    interrupt(state_of(other))
    assert other.wait() == -signal.SIGTERM


def test_the_state_of_a_version_that_told_processes_by_the_clock_is_found(other: subprocess.Popen[bytes]) -> None:
    state = state_of(other)
    created = psutil.Process(other.pid).create_time()
    written = {key: value for key, value in asdict(state).items() if key != "process"}
    RunState.path("other").write_text(json.dumps({**written, "created": created}))
    assert RunState.load("other") == replace(state, process="", created=created)
    RunState.path("other").write_text(json.dumps({**written, "created": created - 3600}))
    assert (RunState.load("other"), RunState.path("other").exists()) == (None, False)
