"""`FleetKeeper` runs here in this process: the tests read what it reports to worker processes when things go wrong."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.batch import fleet_keeper as keeper_module
from serve_app.batch.fleet_keeper import LOCK, LOG, STATE, USERS, FleetKeeper, KeeperReport, sweep
from serve_app.batch.fleet_process import FleetProcess
from serve_app.batch.fleet_watch import Keep
from tests.batch.fake_fleet import FOLDER
from tests.e2e.fleet import wait_until

CONFIG: dict[str, Any] = {"models": {"tiny": {"model": "embedded:smollm2-135m-instruct"}}, "timeouts": {"drain_s": 1.0}}
COMMAND = [sys.executable, "-m", "tests.batch.fake_fleet"]


def test_an_error_that_nobody_foresaw_is_told_so_that_no_worker_starts_the_next_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FleetProcess) -> None:
        raise subprocess.SubprocessError("Exception occurred in preexec_fn.")

    monkeypatch.setattr(FleetProcess, "start", fail)
    FleetKeeper(tmp_path, CONFIG, Keep(), COMMAND).run()
    assert KeeperReport.read(tmp_path) == KeeperReport(1, "failed", why="SubprocessError: Exception occurred in preexec_fn.")


def test_a_fleet_whose_port_was_taken_meanwhile_starts_at_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(keeper_module, "_PORT_LIMIT_S", 0.0)
    keeper = FleetKeeper(tmp_path, CONFIG, Keep(), COMMAND)
    with keeper._ended(), socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(keeper._fleet.address)
        stranger.listen()
        keeper._start()
        wait_until(lambda: keeper._fleet.status() == 200, limit_s=60.0, what="ready")
        state = KeeperReport.read(tmp_path)
        assert (state.port == stranger.getsockname()[1], state.url) == (False, f"http://127.0.0.1:{state.port}")
        assert state.fleet[0] == keeper._fleet.pid


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"fleet": 3}', '{"fleet": [1, 2.0], "of another version": 1}', "\xff"])
def test_a_damaged_state_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_bytes(text.encode("latin-1"))
    assert KeeperReport.read(tmp_path) == KeeperReport()


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = KeeperReport(3, "ready", "http://127.0.0.1:1", 1, "the fleet was stuck", 2, (os.getpid(), 1.5))
    state.write(tmp_path)
    assert KeeperReport.read(tmp_path) == state
    assert json.loads((tmp_path / STATE).read_text())["number"] == 3


def test_folders_of_fleets_that_nobody_uses_go_after_a_week(tmp_path: Path) -> None:
    week_s, made_at = 7 * 86400.0, 1_000_000.0
    for name in ("unused", "young", "kept", "used"):
        (tmp_path / name).mkdir()
        for file in (STATE, USERS, LOCK, LOG):
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (made_at, made_at))
        os.utime(tmp_path / name, (made_at, made_at))
    os.utime(tmp_path / "young" / STATE, (made_at + 60, made_at + 60))
    with (tmp_path / "kept" / LOCK).open("ab") as lock, (tmp_path / "used" / USERS).open("ab") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        sweep(tmp_path, made_at + week_s + 1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["kept", "used", "young"]
