"""`FleetProcess` changes the configuration of a fleet that is started for one job."""

import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.batch import fleet_process
from serve_app.batch.fleet_process import FleetProcess, _own, _progress
from serve_app.cli import up
from serve_app.cli.batch import _fleet, _OwnFleet
from serve_app.config import parse_settings
from serve_app.errors import BatchError
from tests.e2e.fleet import wait_until
from tests.ports import free_port


def test_a_fleet_of_a_job_has_a_name_and_a_port_of_its_own_and_no_pages() -> None:
    """`make run`, which the same file drives, may serve beside it."""
    given = {"models": {"a": {"model": "some/model"}}, "name": "mine", "ingress": {"port": 8010}, "ui": {"port": 8011}}
    mapping, settings = _own(given, 0)
    assert (settings.ui, settings.name == "mine", settings.ingress.port == 8010) == (None, False, False)
    assert mapping == {"models": given["models"], "name": settings.name, "ingress": {"port": settings.ingress.port}}


def test_a_fleet_on_a_cluster_whose_ingress_is_on_another_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_process, "_HERE_S", 0.0)
    port = free_port()
    says = f"import signal, sys; print(sys.argv[1:], 'at http://127.0.0.1:{port}', flush=True); signal.pause()"
    configuration = {"models": {"a": {"model": "some/model"}}, "timeouts": {"drain_s": 1.0}}
    fleet = FleetProcess(configuration, port=port, command=(sys.executable, "-c", says), address="head:6379")
    with pytest.raises(
        BatchError, match=f"runs on head:6379, and nothing answers at http://127.0.0.1:{port}; its ingress is on another"
    ):
        fleet.__enter__()
    assert fleet._words().startswith("['--address', 'head:6379']")
    assert fleet.pid == 0


def test_the_fleet_of_a_command_that_ignores_ctrl_c_hears_its_end() -> None:
    """As commands do that a script starts in the background."""
    configuration = {"models": {"a": {"model": "some/model"}}}
    fleet = FleetProcess(configuration, command=(sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fleet.start()
        wait_until(lambda: "up" in fleet._words(), limit_s=60.0, what="up")
        child = fleet._process
        fleet.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert child is not None
    assert child.returncode == -signal.SIGINT


def test_a_start_tells_what_its_child_says_of_it_and_a_failure_ends_it(tmp_path: Path) -> None:
    seen, told = tmp_path / "seen", list[str]()
    child = f"""
import pathlib, sys, time
print("starting Ray")
print("  ingress 1 starting", flush=True)
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.05)
sys.exit("error: no memory")
"""

    def tell(line: str) -> None:
        told.append(line)
        seen.touch()

    configuration = {"models": {"a": {"model": "some/model"}}}
    fleet = FleetProcess(configuration, command=(sys.executable, "-c", child), on_progress=tell)
    with pytest.raises(BatchError, match="the fleet ended with status 1: no memory"):
        fleet.__enter__()
    assert told == ["ingress 1 starting"]


def test_a_batch_shows_how_far_the_start_of_its_fleet_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {a: {model: some/model}}")
    child = "import sys; print('  ingress 1 starting', flush=True); sys.exit('error: no memory')"
    monkeypatch.setattr(fleet_process, "FleetProcess", partial(FleetProcess, command=(sys.executable, "-c", child)))
    with pytest.raises(BatchError), _fleet(_OwnFleet(file, "")):
        pass
    assert capsys.readouterr().err == f"starting the fleet of {file}\n  ingress 1 starting\n"


def test_the_example_that_up_prints_when_it_is_ready_is_no_progress_of_its_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployments = {"ingress": SimpleNamespace(replica_states={"STARTING": 1}, message="")}
    statuses = (SimpleNamespace(status=s, deployments=deployments) for s in ("DEPLOYING", "DEPLOYING", "RUNNING", "RUNNING"))
    settings = parse_settings({"models": {"a": {"model": "some/model"}}})
    monkeypatch.setattr(up, "_POLL_S", 0.0)
    monkeypatch.setattr(up, "application_status", lambda name: next(statuses))
    up._wait_ready(settings, "", threading.Event())
    up._say_ready(settings)
    said = "".join(reversed(capsys.readouterr()))
    assert "\n  -d '" in said
    assert _progress(said) == "ingress 1 starting"


def test_a_line_that_the_child_has_not_ended_yet_is_no_progress() -> None:
    assert _progress("starting Ray\n") == ""
    assert _progress("starting Ray\n  waiting for Ray Serve\n  ingress 1 st") == "waiting for Ray Serve"


def test_a_stop_that_takes_too_long_cuts_streams_on_a_cluster_before_it_kills(tmp_path: Path) -> None:
    """At the first SIGINT the child waits for its streams, at the second one it removes its application."""
    child = f"""
import signal, sys
came = []
def take(number, frame):
    came.append(number)
    if len(came) == 2:
        open({str(tmp_path / "removed")!r}, "w").close()
        sys.exit()
signal.signal(signal.SIGINT, take)
open({str(tmp_path / "up")!r}, "w").close()
while True:
    signal.pause()
"""
    configuration = {"models": {"a": {"model": "some/model"}}}
    fleet = FleetProcess(configuration, command=(sys.executable, "-c", child), address="head:6379")
    fleet.start()
    wait_until((tmp_path / "up").exists, limit_s=60, what="the child")
    fleet.stop(limit_s=1.0)
    assert (tmp_path / "removed").exists()
    assert fleet.pid == 0
