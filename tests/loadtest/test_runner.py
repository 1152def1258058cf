"""Whole runs against the law server: what is on disk afterwards, and what is left when something dies in the middle.

The machine that runs the tests may be busy, which makes a run invalid for its lag, and rightly: only gates about time may fail here.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loadtest.errors import ExitCode, UsageError
from loadtest.recorder import as_lines, claim
from loadtest.records import Manifest, Row, read_lines, read_manifest
from loadtest.runner import count_tokens, exit_code, run
from loadtest.scenario import Scenario, parse_scenario
from loadtest.schedule import Schedule, read_schedule
from loadtest.summary import Summary
from loadtest.target import Target

WITHIN_S = 90.0
ABOUT_TIME = {"lag p50", "lag p99", "loop stalls", "CPU p95", "health samples", "delivered arrivals", "CPU throttling"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Answers of 8 tokens in about 0.1 s."""
    folder = tmp_path_factory.mktemp("truth")
    (folder / "law.yaml").write_text("ttft: {law: constant, s: 0.03}\ngap: {law: constant, s: 0.01}\n")
    command = [sys.executable, "-m", "loadtest.truth", "--port", "0", "--law", "law.yaml", "--log", "log.jsonl"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Target(process.stdout.readline().split()[-1])
        process.terminate()


def a_scenario(**values: Any) -> dict[str, Any]:
    lengths = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": 8}}
    arrival = {"law": "poisson", "rate": 30}
    base = {"name": "short", "arrival": arrival, "requests": [lengths], "duration_s": 2, "warmup_s": 0.5, "drain_s": 10}
    return {**base, "timeout_s": 10, "observe": {"metrics_url": "none"}, **values}


class Finished:
    """What a run left."""

    def __init__(self, out: Path) -> None:
        self.manifest = read_manifest(out)
        self.summary = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
        self.schedule: Schedule = read_schedule(out / "schedule.jsonl")
        self.rows = list(read_lines(out / "rows.jsonl", Row))
        self.failed_gates = {gate.name for gate in self.summary.gates if not gate.ok} - ABOUT_TIME

    def ids(self) -> list[int]:
        return sorted(row.id for row in self.rows)


def test_every_scheduled_request_has_one_row_by_the_worker_that_had_to_send_it(target: Target, tmp_path: Path) -> None:
    scenario = parse_scenario(a_scenario(workers=2, slo="ttft_p50=1s"))
    code = run(scenario, target, tmp_path / "out", quiet=True, report=False)
    found = Finished(tmp_path / "out")
    assert found.failed_gates == set()
    assert code in (ExitCode.PASS, ExitCode.UNDECIDED, ExitCode.INVALID)
    assert (found.manifest.state, found.manifest.problems, found.manifest.model) == ("finished", [], "truth")
    assert found.ids() == [request.id for request in found.schedule.requests]
    assert {row.state for row in found.rows} == {"ok"}
    for worker in range(2):
        part = found.schedule.part(worker, 2)
        assert {row.id for row in found.rows if row.worker == worker} == {request.id for request in part}
    due = {request.id: request.due_s for request in found.schedule.requests}
    assert all(row.due_s == due[row.id] and row.sent_s is not None and row.sent_s >= row.due_s - 0.001 for row in found.rows)
    assert all(row.output_tokens == sum(n for _, n in row.chunks) == 8 for row in found.rows)


def test_a_closed_loop_never_has_more_requests_in_flight_than_clients(target: Target, tmp_path: Path) -> None:
    arrival = {"law": "closed", "concurrency": 3, "max_requests": 200}
    run(parse_scenario(a_scenario(arrival=arrival)), target, tmp_path / "out", quiet=True, report=False)
    found = Finished(tmp_path / "out")
    assert found.failed_gates == set()
    assert found.summary.loop == "closed"
    assert found.ids() == list(range(200))
    sent = [row for row in found.rows if row.sent_s is not None]
    assert all(row.state == "never_sent" and row.reason for row in found.rows if row.sent_s is None)
    steps = sorted([(row.sent_s, 1) for row in sent if row.sent_s is not None] + [(row.end_s, -1) for row in sent if row.end_s])
    in_flight = [sum(step for _, step in steps[: k + 1]) for k in range(len(steps))]
    assert max(in_flight) == 3
    assert len(sent) > 6


class Command:
    """``serve-app-loadtest run`` as its user starts it."""

    def __init__(self, target: Target, folder: Path, scenario: dict[str, Any], **popen: Any) -> None:
        self.out = folder / "out"
        (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
        command = [sys.executable, "-m", "loadtest.cli", "run", str(folder / "scenario.yaml"), "--no-report"]
        self.process = subprocess.Popen(
            [*command, "--target", target.base_url, "--out", str(self.out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **popen,
        )

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not holds():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            os.sched_yield()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def has_rows(self) -> bool:
        rows = self.out / "rows.jsonl"
        return rows.exists() and rows.stat().st_size > 0

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, said


def test_a_killed_worker_makes_the_run_invalid_and_ends_it(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(command.has_rows)
    children = command.children()
    worker = next(child for child in children if "--worker" in child.cmdline())
    worker.kill()
    code, said = command.end()
    assert code == ExitCode.INVALID
    assert f"worker process {worker.pid} ended: signal SIGKILL" in said
    assert "TTFT p99" not in said
    found = Finished(command.out)
    assert found.manifest.state == "interrupted"
    assert {"generator complete", "every request accounted for"} <= found.failed_gates
    assert {row.worker for row in found.rows} == {0, 1}
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []


def test_an_interrupted_run_keeps_and_reports_what_was_sent(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(duration_s=60))
    command.until(command.has_rows)
    children = command.children()
    command.process.send_signal(signal.SIGINT)
    code, said = command.end()
    found = Finished(command.out)
    assert code in (ExitCode.UNDECIDED, ExitCode.INVALID), said
    assert "(interrupted)" in said
    assert found.failed_gates == set()
    assert (found.manifest.state, found.manifest.problems) == ("interrupted", [])
    assert found.manifest.ended_s is not None
    due = [request.id for request in found.schedule.requests if (request.due_s or 0.0) < found.manifest.ended_s]
    assert len(due) < len(found.schedule.requests)
    assert set(due) <= set(found.ids())
    assert {row.state for row in found.rows} <= {"ok", "cancelled", "never_sent"}
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []


@pytest.mark.slow
def test_a_generator_whose_owner_is_killed_ends_too(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(command.has_rows)
    children = command.children()
    command.process.kill()
    command.end()
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []
    assert read_manifest(command.out).state == "interrupted"


def test_a_full_disk_ends_the_run_with_a_reason_and_whole_rows(target: Target, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    command = Command(target, tmp_path, a_scenario(arrival={"law": "constant", "rate": 20}), preexec_fn=small_files)
    code, said = command.end()
    assert code == ExitCode.INVALID
    assert "the records cannot be written: File too large" in said
    rows = list(read_lines(command.out / "rows.jsonl", Row))
    assert 0 < len(rows) < 40
    assert (command.out / "rows.jsonl").read_bytes().endswith(b"\n")


def test_a_folder_with_something_in_it_is_refused_before_anything_is_sent(target: Target, tmp_path: Path) -> None:
    claim(tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        run(parse_scenario(a_scenario()), target, tmp_path / "out", quiet=True)


def test_an_unreachable_target_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Connection refused"):
        run(parse_scenario(a_scenario()), Target("http://127.0.0.1:1"), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_answers_are_counted_with_the_tokenizer_where_there_is_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [Row(k, 0, 0.0, "ok", text=text) for k, text in enumerate(["one two", "", "two two three one"])]
    (tmp_path / "rows.jsonl").write_bytes(as_lines(rows))
    count_tokens(tmp_path, str(tmp_path / "tokenizer.json"))
    counted = list(read_lines(tmp_path / "rows.jsonl", Row))
    assert [row.retokenized for row in counted] == [2, None, 4]
    assert [row.text for row in counted] == [row.text for row in rows]


@pytest.mark.parametrize(
    ("verdict", "state", "code"),
    [
        ("pass", "finished", 0),
        ("slo-missed", "finished", 1),
        ("invalid", "finished", 3),
        ("undecided", "finished", 5),
        ("pass", "interrupted", 5),
        ("slo-missed", "interrupted", 1),
    ],
)
def test_verdicts_and_exit_statuses(verdict: Any, state: Any, code: int) -> None:
    scenario = Scenario.model_validate(a_scenario())
    manifest = Manifest(state, {}, "", 0, "", "", 0.0, [])
    summary = Summary(scenario.name, verdict, "open", (0.0, 1.0), [], {}, "")
    assert exit_code(summary, manifest) == code
