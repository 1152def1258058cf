"""These tests make runs whose workers start elsewhere: ``run --bind``, ``locust --worker``, ``verdict``, as the chart's Jobs do."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from loadtest.control.processes import Elsewhere
from loadtest.errors import ExitCode, UsageError
from loadtest.records import read_manifest
from loadtest.wire.target import Target
from tests.loadtest.test_loadtest_cli import failure
from tests.loadtest.whole_runs import WITHIN_S, Finished, a_scenario
from tests.ports import free_port

CLI = [sys.executable, "-m", "loadtest.cli"]


class Pods:
    """A master and two workers, each a process of its own, as in pods."""

    def __init__(self, url: str, folder: Path, *options: str, **values: Any) -> None:
        self.out = folder / "out"
        (folder / "scenario.yaml").write_text(yaml.safe_dump(a_scenario(**values)))
        (folder / "key").write_text("a-key\n")
        port = str(free_port())
        master = ["run", "scenario.yaml", "--target", url, "--out", "out", "--no-report", "--workers", "2"]
        worker = ["locust", "--worker", "--master-host", "127.0.0.1", "--master-port", port, "--api-key-file", "key"]
        commands = [[*master, "--bind", f"127.0.0.1:{port}", *options], worker, worker]
        self.master, *self.workers = [
            subprocess.Popen([*CLI, *c], cwd=folder, stderr=subprocess.PIPE, text=True) for c in commands
        ]

    def end(self) -> tuple[int, str]:
        """Return how the master ended, and what it said."""
        said = self.master.communicate(timeout=WITHIN_S)[1]
        return self.master.returncode, said

    def statuses(self) -> list[int]:
        """Return how the workers ended."""
        return [worker.wait(WITHIN_S) for worker in self.workers]


@contextmanager
def pods(*args: Any, **values: Any) -> Iterator[Pods]:
    started = Pods(*args, **values)
    try:
        yield started
    finally:
        for process in (started.master, *started.workers):
            process.kill()
            process.communicate()


def verdict(out: Path) -> int:
    return subprocess.run([*CLI, "verdict", str(out)], stdout=subprocess.DEVNULL, timeout=WITHIN_S).returncode


@pytest.mark.apart
def test_workers_elsewhere_do_the_run_and_end_with_it(target: Target, tmp_path: Path) -> None:
    with pods(target.base_url, tmp_path) as run:
        code, said = run.end()
        assert run.statuses() == [0, 0]
    found = Finished(tmp_path / "out")
    assert found.failed_gates == set(), said
    assert (found.manifest.state, found.manifest.workers, found.manifest.problems) == ("finished", 2, [])
    assert found.ids() == [request.id for request in found.schedule.requests]
    assert {row.worker for row in found.rows} == {0, 1}
    assert code == verdict(run.out)


@pytest.mark.apart
def test_a_missed_slo_is_for_verdict_to_say_when_it_judges_later(target: Target, tmp_path: Path) -> None:
    with pods(target.base_url, tmp_path, "--judge-later", slo="ttft_p50=1ms") as run:
        code, said = run.end()
    assert code == 0, said
    summary = Finished(run.out).summary
    expected = {"slo-missed": ExitCode.SLO_MISSED, "invalid": ExitCode.INVALID}  # invalid: this machine was busy
    assert verdict(run.out) == expected[summary.verdict]


@pytest.mark.apart
def test_a_worker_elsewhere_that_dies_makes_the_run_invalid(target: Target, tmp_path: Path) -> None:
    with pods(target.base_url, tmp_path, duration_s=60) as run:
        rows = run.out / "rows.jsonl"
        process = psutil.Process(run.workers[0].pid)
        never, deadline = threading.Event(), time.monotonic() + WITHIN_S
        while not (rows.exists() and rows.stat().st_size):
            assert run.master.poll() is None, run.end()
            assert time.monotonic() < deadline
            never.wait(0.02)
        assert process.environ()["LOADTEST_API_KEY"] == "a-key"
        process.kill()
        code, said = run.end()
        assert run.statuses()[1] == 0
    assert code == ExitCode.INVALID, said
    assert "1 of 2 workers were lost" in Finished(run.out).manifest.problems


@pytest.mark.apart
def test_workers_are_sent_home_when_there_is_no_run(tmp_path: Path) -> None:
    with pods("http://127.0.0.1:1", tmp_path) as run:
        code, said = run.end()
        assert run.statuses() == [0, 0]
    assert code == ExitCode.USAGE
    assert said.count("Connection refused") == 2  # at once, and at the end
    assert not run.out.exists()


@pytest.mark.apart
def test_a_worker_that_does_not_come_makes_the_run_invalid(target: Target, tmp_path: Path) -> None:
    with pods(target.base_url, tmp_path, "--wait-s", "1", "--workers", "3") as run:
        code, said = run.end()
    assert code == ExitCode.INVALID, said
    assert "not all 3 workers connected to 127.0.0.1:" in " ".join(read_manifest(run.out).problems)


@pytest.mark.apart
def test_a_link_that_remote_workers_do_not_pass_cannot_be_cut(target: Target, tmp_path: Path) -> None:
    with pods(target.base_url, tmp_path, faults=[{"at_s": 1, "action": "cut-link"}]) as run:
        code, said = run.end()
    assert (code, "cut-link" in said) == (ExitCode.USAGE, True)


def test_workers_elsewhere_are_there_for_one_run() -> None:
    assert "--bind" in failure("run", "chat-qps-1", "--target", "http://127.0.0.1:1", "--bind", "127.0.0.1:1", "--repeat", "2")


@pytest.mark.parametrize("address", ["", "5557", ":5557", "host:", "host:0", "host:65536", "host:x"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UsageError, match=r"is not like 0\.0\.0\.0:5557"):
        Elsewhere.at(address, 1.0)
    assert Elsewhere.at("[::]:5557", 1.0) == Elsewhere("[::]", 5557, 1.0)


@pytest.mark.apart
def test_a_folder_without_a_summary_has_no_verdict(tmp_path: Path) -> None:
    ended = subprocess.run([*CLI, "verdict", str(tmp_path)], capture_output=True, text=True, timeout=WITHIN_S)
    assert (ended.returncode, "holds no run" in ended.stderr) == (ExitCode.USAGE, True)


@pytest.mark.apart
def test_locust_is_the_one_with_this_kit_in_it() -> None:
    ended = subprocess.run([*CLI, "locust", "--list"], capture_output=True, text=True, timeout=WITHIN_S)
    assert "Dispatcher" in ended.stdout


@pytest.mark.apart
def test_modules_of_the_working_folder_do_not_stand_for_ours_or_for_locust(target: Target, tmp_path: Path) -> None:
    """Python's ``-c`` of the test itself would take them too: ``-P``, as an installed command works."""
    for name in ("loadtest.py", "locust.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(a_scenario(faults=[{"at_s": 1, "action": "cut-link", "for_s": 0.1}])))
    command = [sys.executable, "-P", "-m", "loadtest.cli"]
    for arguments in (["locust", "--list"], ["run", "scenario.yaml", "--target", target.base_url, "--out", "out", "--no-report"]):
        ended = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S)
        assert "the wrong module" not in ended.stdout + ended.stderr
    assert read_manifest(tmp_path / "out").state == "finished", ended.stderr
