"""These tests make whole runs against the law server: the records on disk, also when a process dies during the run.

The machine that runs the tests may be busy, which makes a run invalid for its lag, and rightly: only gates about time may fail here.
"""

import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.control import processes, runner
from loadtest.control.processes import Generator
from loadtest.control.runner import conclude, count_tokens, prepare, run, settle
from loadtest.errors import ExitCode, InvalidRun, UsageError
from loadtest.plan.scenario import parse_scenario
from loadtest.proof.truth.server import running as serving
from loadtest.proof.truth.settings import Law
from loadtest.recorder import Batch, Recorder, as_lines, claim, write_manifest
from loadtest.records import Manifest, Row, read_lines, read_manifest, read_rows
from loadtest.seal import broken_seals
from loadtest.wire.target import Target
from tests.loadtest.test_recorder import small_disk
from tests.loadtest.whole_runs import WITHIN_S, Finished, a_scenario


@pytest.mark.apart
def test_every_scheduled_request_has_one_row_by_the_worker_that_had_to_send_it(target: Target, tmp_path: Path) -> None:
    scenario = parse_scenario(a_scenario(workers=2, slo="ttft_p50=1s"))
    code = run(scenario, target, tmp_path / "out", quiet=True, report=False)
    found = Finished(tmp_path / "out")
    assert found.failed_gates == set()
    assert code in (ExitCode.PASS, ExitCode.UNDECIDED, ExitCode.INVALID)
    assert (found.manifest.state, found.manifest.problems, found.manifest.model) == ("finished", [], "truth")
    assert set(found.manifest.sealed) == {"scenario", "rows.jsonl", "health.jsonl"}
    assert broken_seals(tmp_path / "out", found.manifest) == []
    assert found.ids() == [request.id for request in found.schedule.requests]
    assert {row.state for row in found.rows} == {"ok"}
    for worker in range(2):
        part = found.schedule.part(worker, 2)
        assert {row.id for row in found.rows if row.worker == worker} == {request.id for request in part}
    due = {request.id: request.due_s for request in found.schedule.requests}
    assert all(row.due_s == due[row.id] and row.sent_s is not None and row.sent_s >= row.due_s - 0.001 for row in found.rows)
    assert all(row.output_tokens == sum(n for _, n in row.chunks) == 8 for row in found.rows)


@pytest.mark.apart
def test_a_closed_loop_never_has_more_requests_in_flight_than_clients(target: Target, tmp_path: Path) -> None:
    arrival = {"law": "closed", "concurrency": 3, "max_requests": 200}
    run(parse_scenario(a_scenario(arrival=arrival, workers=2)), target, tmp_path / "out", quiet=True, report=False)
    found = Finished(tmp_path / "out")
    assert found.failed_gates == set()
    assert found.summary.loop == "closed"
    assert found.ids() == list(range(200))
    assert all(row.worker == row.id % 3 % 2 for row in found.rows)  # clients 0 and 2 are worker 0's, client 1 is worker 1's
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
        never, deadline = threading.Event(), time.monotonic() + WITHIN_S
        while not holds():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            never.wait(0.02)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def has_rows(self) -> bool:
        rows = self.out / "rows.jsonl"
        return rows.exists() and rows.stat().st_size > 0

    def workers_with_rows(self) -> set[int]:
        return {row.worker for row in read_lines(self.out / "rows.jsonl", Row)} if self.has_rows() else set()

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, said


@pytest.mark.apart
def test_a_load_goes_on_when_nobody_reads_what_it_prints(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(duration_s=8))
    command.until(command.has_rows)
    assert command.process.stdout is not None
    command.process.stdout.close()
    command.process.wait(WITHIN_S)
    found = Finished(command.out)
    assert (found.manifest.state, found.failed_gates) == ("finished", set())
    assert found.ids() == [request.id for request in found.schedule.requests]


@pytest.mark.apart
def test_a_killed_worker_makes_the_run_invalid_and_ends_it(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(lambda: command.workers_with_rows() == {0, 1})
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


@pytest.mark.apart
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


@pytest.mark.apart
def test_a_run_that_is_interrupted_before_its_start_says_so(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(duration_s=60))
    command.until(lambda: len(command.children()) > 0)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == (ExitCode.UNDECIDED, "interrupted before the start; nothing was sent\n")
    manifest = read_manifest(command.out)
    assert (manifest.state, manifest.problems, command.has_rows()) == ("interrupted", [], False)
    judged = CliRunner().invoke(app, ["verdict", str(command.out)])
    assert (judged.exit_code, judged.output) == (ExitCode.UNDECIDED, "interrupted before the start; nothing was sent\n")


@pytest.mark.apart
def test_a_worker_that_dies_before_the_start_ends_the_run_as_its_manifest_says(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(lambda: any("--worker" in child.cmdline() for child in command.children()))
    next(child for child in command.children() if "--worker" in child.cmdline()).kill()
    code, said = command.end()
    assert code == ExitCode.INVALID
    assert re.search(r"the run is invalid: worker process \d ended before the start: signal SIGKILL", said), said
    manifest = read_manifest(command.out)
    assert (manifest.state, command.has_rows()) == ("interrupted", False)
    assert "ended before the start: signal SIGKILL" in manifest.problems[-1]


@pytest.mark.apart
def test_a_run_that_lasts_too_long_is_judged_by_what_it_left(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LATE_S", -13.0)  # it is ended 5 s after the start was reported
    code = run(parse_scenario(a_scenario(duration_s=8)), target, tmp_path / "out", quiet=True, report=False)
    found = Finished(tmp_path / "out")
    assert code == ExitCode.INVALID
    assert (found.manifest.state, len(found.rows) > 0) == ("interrupted", True)
    assert found.manifest.problems[-1] == "the generator did not end within 5 s of the start"


@pytest.mark.slow
def test_a_generator_whose_owner_is_killed_ends_too(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(lambda: command.workers_with_rows() == {0, 1})
    children = command.children()
    command.process.kill()
    command.end()
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []
    assert read_manifest(command.out).state == "interrupted"


@pytest.mark.apart
def test_nothing_is_sent_when_the_owner_is_gone_before_the_start(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(workers=2, duration_s=60))
    command.until(lambda: len(command.children()) > 0)
    children = command.children()
    command.process.kill()
    command.end()
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []
    assert not command.has_rows()


def test_a_generator_that_stands_still_is_ended(target: Target, tmp_path: Path) -> None:
    prepare(parse_scenario(a_scenario(duration_s=2)), target, tmp_path / "out", command=())
    others = psutil.Process().children()
    with Generator(1, target, tmp_path / "out") as generator:
        (master,) = (child for child in psutil.Process().children() if child not in others)
        with pytest.raises(InvalidRun, match="did not end within"):
            generator.wait([], limit_s=3.0, on_start=[lambda _: master.suspend()], each=lambda: None)
    assert not master.is_running()


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


@pytest.mark.apart
def test_a_folder_that_is_removed_in_mid_run_ends_it_and_says_what_is_lost(target: Target, tmp_path: Path) -> None:
    command = Command(target, tmp_path, a_scenario(duration_s=60))
    command.until(command.has_rows)
    shutil.rmtree(command.out.rename(tmp_path / "removed"))  # in one step: the run makes files there meanwhile
    code, said = command.end()
    assert code == ExitCode.INVALID
    assert re.search(r"the run is invalid: the records are lost: .*out: holds no run: manifest.json", said), said
    assert re.search(r"may be lost: .*; [1-9]\d* rows of \d+ requests had arrived", said), said
    assert "Traceback" not in said


def test_a_folder_with_something_in_it_is_refused_before_anything_is_sent(target: Target, tmp_path: Path) -> None:
    claim(tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        run(parse_scenario(a_scenario()), target, tmp_path / "out", quiet=True)


def test_an_unreachable_target_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Connection refused"):
        run(parse_scenario(a_scenario()), Target("http://127.0.0.1:1"), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_manifest_says_what_is_left_out_of_a_trace(target: Target, tmp_path: Path) -> None:
    lines = [
        {"timestamp": t, "input_length": 8, "output_length": tokens} for t, tokens in ((0, 4), (500, 0), (1000, 4), (9000, 4))
    ]
    (tmp_path / "trace.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    arrival = {"law": "trace", "file": str(tmp_path / "trace.jsonl")}
    prepare(parse_scenario(a_scenario(arrival=arrival, warmup_s=0)), target, tmp_path / "out", command=())
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.num_scheduled, manifest.num_left_out, manifest.num_after_end) == (2, 1, 1)


def test_answers_are_counted_with_the_tokenizer_where_there_is_a_text(tmp_path: Path) -> None:
    """In a file beside the rows, so that a count that comes to no end leaves the run as it is."""
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    recorder = Recorder(tmp_path)
    texts = ["one two", "", "two two three one"] * 4
    rows = as_lines([Row(k, 0, 0.0, "ok", text=text) for k, text in enumerate(texts)])
    recorder.add(Batch(0, 0, len(texts), rows, b""))
    sealed = recorder.sealed()
    recorder.close()
    write_manifest(tmp_path, Manifest("finished", {}, "", 0, "", "", 0.0, [], sealed=sealed))
    with pytest.raises(OSError, match="too large"), small_disk():
        count_tokens(tmp_path, str(tmp_path / "tokenizer.json"))
    assert [row.retokenized for row in read_rows(tmp_path)] == [None] * len(texts)
    count_tokens(tmp_path, str(tmp_path / "tokenizer.json"))
    assert [row.retokenized for row in read_rows(tmp_path)] == [2, None, 4] * 4
    assert broken_seals(tmp_path, read_manifest(tmp_path)) == []


@pytest.mark.parametrize(("state", "problems"), [("finished", ["worker", "kill at 600 s"]), ("interrupted", ["worker"])])
def test_a_fault_that_was_never_begun_is_a_problem_of_a_run_that_came_to_its_end(
    state: Literal["finished", "interrupted"], problems: list[str], tmp_path: Path
) -> None:
    write_manifest(tmp_path, Manifest(state, {}, "", 0, "", "", 0.0, []))
    settle(tmp_path, ["worker"], ["kill at 600 s"])
    assert (read_manifest(tmp_path).state, read_manifest(tmp_path).problems) == (state, problems)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tokenizer": "absent.json"}, "absent.json is no file"),
        ({"tokenizer": __file__}, "tokenizer: .*test_runner.py"),
        ({"tokenizer": __file__, "keep_text": False}, "keep_text: false leaves nothing"),
    ],
)
def test_a_tokenizer_that_could_count_nothing_is_refused_before_the_run(
    values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=problem):
        prepare(parse_scenario(a_scenario(**values)), Target("http://127.0.0.1:1"), tmp_path / "out", command=())
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_before_the_start_is_said_in_one_line(target: Target, tmp_path: Path) -> None:
    def tiny_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    code, said = Command(target, tmp_path, a_scenario(), preexec_fn=tiny_files).end()
    assert (code, said.count("\n")) == (ExitCode.USAGE, 1)
    assert "cannot be written: File too large; free space there, or take another --out" in said


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_before_the_start_keeps_nothing_of_the_run(there: bool, target: Target, tmp_path: Path) -> None:
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="free space there"), small_disk():
        prepare(parse_scenario(a_scenario()), target, tmp_path / "out", command=())
    assert [path.name for path in tmp_path.rglob("*")] == ["out"] * there


def test_a_worker_that_never_connects_ends_the_run_with_a_reason(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CONNECT_S", 1)
    scenario = parse_scenario(a_scenario(workers=2))
    prepare(scenario, target, tmp_path / "out", command=())
    with Generator(2, target, tmp_path / "out") as generator:
        worker = next(p for p in psutil.Process().children() if "--worker" in p.cmdline())
        worker.suspend()
        generator.wait([], limit_s=WITHIN_S, on_start=[], each=lambda: None)
    settle(tmp_path / "out", words := generator.last_words())
    assert "Gave up waiting for workers to connect" in words[0]
    assert conclude(tmp_path / "out", quiet=True, report=False) == ExitCode.INVALID


@pytest.mark.apart
def test_a_strict_server_is_asked_without_the_fields_that_it_refuses(tmp_path: Path) -> None:
    """The law server refuses what OpenAI's own API does not know; with `usage: final` and `ignore_eos: false` it answers."""
    law = Law.model_validate(
        {"gap": {"law": "constant", "s": 0.002}, "refuses": ["continuous_usage_stats", "ignore_eos", "min_tokens"]}
    )
    lengths = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": 8}}
    lenient = {**lengths, "usage": "final", "ignore_eos": False}
    with serving(law, log=tmp_path / "log.jsonl") as url:
        for name, cls in (("refused", lengths), ("answered", lenient)):
            scenario = parse_scenario(a_scenario(requests=[cls], duration_s=1, warmup_s=0))
            run(scenario, Target(url), tmp_path / name, quiet=True, report=False)
    refused, answered = (Finished(tmp_path / name) for name in ("refused", "answered"))
    assert {row.state for row in refused.rows} == {"http_error"}
    assert all("`usage: final`" in row.reason for row in refused.rows)
    assert any("`usage: final`" in threat for threat in refused.summary.threats)
    assert {row.state for row in answered.rows} == {"ok"}
    assert all(row.output_tokens == 8 == sum(n for _, n in row.chunks) for row in answered.rows)
