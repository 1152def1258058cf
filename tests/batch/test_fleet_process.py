"""The configuration of a fleet that is started for one job."""

import sys
from pathlib import Path

import pytest

from serve_app.batch import fleet_process
from serve_app.batch.fleet_process import FleetProcess, _own
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
