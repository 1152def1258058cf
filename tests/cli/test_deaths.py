"""A process of the fleet that dies is one line on the terminal of `serve-app up`."""

import inspect
import io
from pathlib import Path

import pytest
from ray._private import worker
from rich.console import Console

from serve_app.cli.deaths import death_line, print_deaths_in_one_line

RAYS = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, check the logs for "
    "the dead worker. Lease ID: 01 Worker ID: ae Node ID: d8 Worker IP address: 192.0.2.2 Worker port: 35937 Worker PID: 11336 Worker "
    "exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
)
WHY = "the engine core died: it ended without a message (killed?) [Errno 12] [/x]"
LOST = f"ERROR 2026-11-29 first9_replica-m 98l -- engine lost (engine_dead): {WHY}\n"


def written(folder: Path, actor: str, log: str = "") -> None:
    (folder / "worker-af-01000000-11336.err").write_text(f":job_id:01000000\n:actor_name:{actor}\n{log}")


@pytest.mark.parametrize(
    ("actor", "log", "line"),
    [
        (
            "ServeReplica:first9:replica-m",
            LOST,
            f"replica-m (pid 11336) has died: {WHY}; "
            "its streams continue at other replicas, or wait for the next; Ray Serve starts another",
        ),
        (
            "ServeReplica:first9:ingress",
            "",
            "ingress (pid 11336) has died: killed, out of memory, or crashed; "
            "its streams are cut, and clients connect again; Ray Serve starts another",
        ),
        (
            "LeaseBoard",
            "",
            "LeaseBoard (pid 11336) has died: killed, out of memory, or crashed; Ray starts another where one is needed",
        ),
    ],
)
def test_who_died_and_why_is_read_from_the_log_of_the_worker(tmp_path: Path, actor: str, log: str, line: str) -> None:
    written(tmp_path, actor, log)
    assert death_line(RAYS, tmp_path) == line


def test_a_worker_without_a_log_is_named_by_its_pid(tmp_path: Path) -> None:
    assert death_line(RAYS, tmp_path).startswith("a worker of Ray (pid 11336) has died")


def test_other_reports_of_ray_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "ServeReplica:first9:replica-m", LOST)
    others = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: others.append(data))
    out = io.StringIO()
    print_deaths_in_one_line(Console(file=out, width=1000), tmp_path)
    for lines in ([RAYS], ["the node is out of disk"]):
        worker.print_to_stdstream({"lines": lines, "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert out.getvalue().count("\n") == 1
    assert WHY in out.getvalue()
    assert [data["lines"] for data in others] == [["the node is out of disk"]]


def test_ray_prints_its_reports_by_the_function_that_is_replaced() -> None:
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
