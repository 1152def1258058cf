"""These tests check the command line: what reaches the scenario, and one clear line for each mistake."""

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from loadtest.cli import api_key, app, audit
from loadtest.errors import AuditMismatch, ExitCode, LoadtestError, UsageError
from loadtest.judge.analysis import analyse
from loadtest.judge.summary import read_summary
from loadtest.plan.laws import Poisson
from loadtest.plan.overrides import overrides, scenario_of
from loadtest.recorder import as_lines, write_json, write_manifest
from loadtest.records import Row, ServerSample, read_manifest
from tests.loadtest.judge.written_runs import ended, write_run
from tests.loadtest.scripted import Server

SCENARIO = """
name: tiny
arrival: {law: poisson, rate: 4}
requests: [{name: a, output_tokens: {mean: 8}}, {name: b}]
duration_s: 20
"""
COMMANDS = ["plan", "run", "compare", "saturate", "replay", "audit", "report", "selftest", "verdict", "locust"]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


def failure(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert isinstance(result.exception, LoadtestError), result.output
    return str(result.exception)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: serve-app-loadtest {command}" in " ".join(result.output.split())


def test_options_and_settings_replace_what_the_file_says(scenario: Path) -> None:
    sets = ["arrival.rate=9", "requests.0.output_tokens.mean=16", "slo=ttft_p99=500ms"]
    loaded = scenario_of(scenario, sets, workers=3, seed=7, model=None)
    assert isinstance(loaded.arrival, Poisson)
    assert (loaded.arrival.rate, loaded.workers, loaded.seed, loaded.model) == (9.0, 3, 7, "")
    assert [cls.output_tokens.mean for cls in loaded.requests] == [16, 64]
    assert [str(limit) for limit in loaded.slo.limits] == ["ttft_p99=500ms"]


def test_a_scenario_that_comes_with_the_package_goes_by_its_name() -> None:
    assert scenario_of(Path("chat-qps-4"), None).name == "chat-qps-4"


def test_settings_leave_the_values_they_were_read_from_alone() -> None:
    values: dict[str, Any] = {"arrival": {"law": "poisson", "rate": 4}}
    assert overrides(values, ["arrival.rate=8", "arrival.law=gamma"]) == {"arrival": {"law": "gamma", "rate": 8}}
    assert values == {"arrival": {"law": "poisson", "rate": 4}}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("rate", "'rate' is not like duration_s=60"),
        ("arrival.rat=3", "arrival.rat: unknown key; did you mean rate?"),
        ("requests.x.name=3", "'requests.x.name=3': requests is a list of 2, counted from 0; 'x' is none of its numbers"),
        ("requests.7.name=z", "'requests.7.name=z': requests is a list of 2, counted from 0; '7' is none of its numbers"),
        ("seed.x=3", "'seed.x=3': seed is 4, which has no keys; set it as a whole, like seed=VALUE"),
        ("=3", "'=3' has no key"),
        ("arrival..rate=3", "'arrival..rate=3' has no key, or an empty part in it"),
        ("duration_s=0x" + "f" * 5000, "fff':1: the number 0xffffffffffffffffff... has 5,002 characters, at most 300"),
        ('arrival={law: trace, file: "a\\0b"}', "arrival.file: no path has a NUL byte; name another file (got 'a\\x00b')"),
        ('requests.0.prompts="a\\0b"', "requests.0.prompts: no path has a NUL byte"),
        ("seed=[", "'seed=['"),
    ],
)
def test_a_wrong_setting_is_named(scenario: Path, setting: str, problem: str) -> None:
    scenario.write_text(SCENARIO + "seed: 4\n")
    said = failure("plan", str(scenario), "--set", setting)
    assert problem in said
    assert len(said) < 600


def test_a_name_that_is_too_long_for_a_file_is_no_scenario() -> None:
    assert "aaa: is no file, and no scenario of the package: agents" in failure("plan", "a" * 300)


def test_a_problem_in_a_manifest_is_cut_and_commands_no_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20, manifest={"problems": ["\x1b[2J" + "z" * 100_000]})
    for command in ("verdict", "audit"):
        said = CliRunner().invoke(app, [command, str(run)]).output
        assert "\\x1b[2Jzzz" in said.replace("\n", "")
        assert "\x1b" not in said
        assert len(said) < 4000


def refused_with_a_command(row: Row) -> Row:
    row = ended(row, "http_error", row.due_s + 0.01)
    row.status, row.reason = 200, "200: asked for a stream, got text/plain: \x1b]0;PWNED\x07\x1b[32mPASS"
    return row


@pytest.mark.parametrize("command", ["verdict", "audit", "report"])
def test_a_target_commands_no_terminal(command: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20, refused_with_a_command)
    errors = [ServerSample(float(t), "metrics", error="RuntimeError: \x1b[32mready") for t in range(5)]
    (run / "server.jsonl").write_bytes(as_lines(errors))
    called = CliRunner().invoke(app, [command, str(run)])
    said = called.output + (run / "report.html").read_text() if command == "report" else called.output
    assert "\\x1b]0;PWNED\\x07\\x1b[32mPASS" in said
    assert command == "audit" or "\\x1b[32mready" in said
    assert "\x1b" not in said


def test_the_error_of_a_target_commands_no_terminal() -> None:
    body = b'{"error": "\\u001b[32mPASS"}'
    server = Server(lambda peer: peer.answer(f"HTTP/1.1 401 Unauthorized\nContent-Length: {len(body)}\n", body))
    command = [sys.executable, "-m", "loadtest.cli", "run", "laptop", "--target", server.url]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    server.join()
    assert said == f"error: --api-key: {server.url}/v1/models answers 401: \\x1b[32mPASS; give the target's key\n"


def test_plan_names_what_will_happen(scenario: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(scenario), "--set", "arrival.law=constant"])
    assert result.exit_code == 0
    assert "requests    80" in result.output
    assert "sha256" in result.output


def test_plan_writes_the_requests_for_others_to_plan_with(scenario: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(scenario), "--schedule", str(tmp_path / "trace.jsonl")])
    assert result.exit_code == 0
    content = (tmp_path / "trace.jsonl").read_bytes()
    assert f"sha256 {hashlib.sha256(content).hexdigest()}" in result.output
    said = failure("plan", str(scenario), "--schedule", str(tmp_path / "none" / "trace.jsonl"))
    assert said == f"--schedule: {tmp_path}/none/trace.jsonl cannot be written: No such file or directory"


def test_a_capacity_needs_limits_and_a_law_with_one_rate(scenario: Path, tmp_path: Path) -> None:
    common = ["--target", "http://127.0.0.1:1", "--out", str(tmp_path / "out")]
    assert failure("saturate", str(scenario), *common).startswith("--slo: needs at least one limit")
    sets = ["--set", "arrival={law: burst, max_requests: 3}", "--slo", "ttft_p90=1s"]
    assert failure("saturate", str(scenario), *common, *sets).startswith("arrival.law: 'burst' has no one rate")
    assert not (tmp_path / "out").exists()


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = failure("replay", str(tmp_path / "no.csv"), "--target", "http://127.0.0.1:1", "--out", str(tmp_path / "out"))
    assert f"{tmp_path / 'no.csv'}" in said


def test_the_key_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("LOADTEST_API_KEY", "other")
    assert api_key(tmp_path / "key") == "secret"
    assert api_key(None) == "other"
    with pytest.raises(UsageError, match="No such file"):
        api_key(tmp_path / "none")


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["run", "none.yaml", "--target", "http://127.0.0.1:1"], 2, "error: none.yaml: [Errno 2]"),
        (["audit", "nowhere"], 2, "error: nowhere: holds no run"),
        (["audit", "nowhere", "--allow", "late"], 2, "error: --allow: 'late' is not one of ok, http_error"),
        (["saturate", "chat-qps-1", "--target", "http://127.0.0.1:1", "--step", "0"], 2, "Invalid value for '--step'"),
        (["plan"], 2, "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(args: list[str], code: int, line: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", "loadtest.cli", *args], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert line in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_audit_says_how_many_findings_there_are_not_how_many_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 50, lambda row: ended(row, "timeout", row.due_s + 1))
    with pytest.raises(AuditMismatch, match="audit findings, first: ") as caught:
        audit(run)
    assert caught.value.num_findings == 50
    audit(run, allow=["timeout"])


@pytest.mark.parametrize(
    ("num", "slo", "manifest", "word", "code"),
    [
        (1000, {"slo": "ttft_p90=2s"}, {}, "PASS  by-hand", 0),
        (1000, {}, {}, "PASS (there is no SLO to judge by)  by-hand", 0),
        (1000, {"slo": "ttft_p90=500ms"}, {}, "SLO MISSED  by-hand", 1),
        (1000, {}, {"problems": ["worker 1 was lost"]}, "INVALID  by-hand", 3),
        (20, {"slo": "ttft_p90=2s"}, {}, "UNDECIDED  by-hand", 5),
        (1000, {"slo": "ttft_p90=2s"}, {"state": "interrupted"}, "UNDECIDED (interrupted)  by-hand", 5),
        (1000, {}, {"state": "interrupted"}, "UNDECIDED (interrupted)  by-hand", 5),
        (1000, {"slo": "ttft_p90=500ms"}, {"state": "interrupted"}, "SLO MISSED (interrupted)  by-hand", 1),
    ],
)
def test_words_and_exit_status_of_a_verdict_agree(
    num: int, slo: dict[str, Any], manifest: dict[str, Any], word: str, code: int, tmp_path: Path
) -> None:
    """An interrupted run passes nothing: part of its schedule was never asked."""
    run = write_run(tmp_path / "run", num, manifest=manifest, **slo)
    said = CliRunner().invoke(app, ["verdict", str(run)])
    assert (said.exit_code, said.output.startswith(word)) == (code, True), said.output


@pytest.mark.parametrize(
    ("command", "redirected", "status", "said"),
    [
        ("verdict", "> >(true)", ExitCode.PASS, ""),
        ("verdict", "2>&1 > >(true)", ExitCode.PASS, ""),
        ("verdict", ">&-", ExitCode.PASS, ""),
        ("verdict", ">/dev/null 2>&-", ExitCode.PASS, ""),
        ("nothing", "2> >(true)", ExitCode.USAGE, ""),
        ("verdict", ">/dev/full", ExitCode.USAGE, "error: not all could be printed: No space left on device\n"),
    ],
)
def test_the_status_is_that_of_the_command_wherever_its_output_goes(
    command: str, redirected: str, status: int, said: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", 1000)
    script = f"exec {sys.executable} -m loadtest.cli {command} {run} {redirected}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ended.returncode == status
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_summary_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no summary: No such file or directory; `report` makes it from the records"):
        read_summary(tmp_path)
    for content in ("{", '{"scenario": "by-hand", "verdict": "pass"}'):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(UsageError, match=r"summary.json: .*; `report` makes it again from the records"):
            read_summary(tmp_path)


def test_a_verdict_is_of_the_records_whatever_summary_json_says(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, slo="ttft_p90=500ms")  # first tokens take a second
    write_json(run / "summary.json", msgspec.structs.replace(analyse(run), verdict="pass", slo=[]))
    said = CliRunner().invoke(app, ["verdict", str(run)])
    assert (said.exit_code, said.output[:10]) == (ExitCode.SLO_MISSED, "SLO MISSED")


def test_a_run_whose_records_were_changed_is_invalid(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    digest = hashlib.sha256((run / "rows.jsonl").read_bytes()).hexdigest()
    write_manifest(run, msgspec.structs.replace(read_manifest(run), sealed={"rows.jsonl": digest}))
    said = CliRunner().invoke(app, ["verdict", str(run)])
    assert said.exit_code == ExitCode.PASS
    assert "note: the run has no digest of health.jsonl, scenario: later changes there cannot be detected" in said.output
    rows = (run / "rows.jsonl").read_text()
    (run / "rows.jsonl").write_text(rows.replace('"status":200', '"status":201', 1))
    said = CliRunner().invoke(app, ["verdict", str(run)])
    assert said.exit_code == ExitCode.INVALID
    assert "rows.jsonl was changed" in said.output


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"epoch_unix_s": 1e300}, "$.epoch_unix_s` (got 1e+300)"),
        ({"ended_s": -1e300}, "$.ended_s` (got -1e+300)"),
        ({"clock_drift_s": 1e300}, "$.clock_drift_s` (got 1e+300)"),
        ({"workers": 0}, "$.workers` (got 0)"),
        ({"workers": 10**18}, "$.workers` (got 1000000000000000000)"),
        ({"num_scheduled": -1}, "$.num_scheduled` (got -1)"),
        ({"machine": {"memory_bytes": "much"}}, "$.machine.memory_bytes` (got 'much')"),
        ({"machine": [2]}, "$.machine` (got [2])"),
    ],
)
def test_a_value_of_a_manifest_that_cannot_be_is_named_with_the_way_out(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / "manifest.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))
    for command in ("report", "verdict"):
        said = failure(command, str(path.parent))
        assert said.startswith(f"{path}: Expected")
        assert said.endswith(f"`{key}; put back the file as the run wrote it, or run the scenario again")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_scheduled": 5}, "manifest.json: num_scheduled is 5, and schedule.jsonl has 20 requests; put back the file"),
        ({"scenario": {}}, "manifest.json: scenario.name: Field required; put back the file as the run wrote it"),
        ({"scenario": {"name": "x", "requests": [{"weight": -1}]}}, "manifest.json: scenario.arrival: Field required; put"),
        (
            {"scenario": {"name": "..", "arrival": {"law": "poisson", "rate": 1}}},
            "manifest.json: scenario: name '..' is a folder's",
        ),
    ],
)
def test_an_error_in_a_manifest_names_the_run_and_the_way_out(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / "manifest.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))
    for args in (["verdict", str(path.parent)], ["compare", str(path.parent), str(path.parent)]):
        assert f"{path.parent}/{problem}" in failure(*args)


def test_a_schedule_that_is_cut_or_missing_is_to_be_put_back(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / "schedule.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert "its last line is cut off; put back the file as the run wrote it" in failure("verdict", str(path.parent))
    path.unlink()
    for command in ("verdict", "audit"):
        said = failure(command, str(path.parent))
        assert said.startswith(f"{path}: the schedule ")
        assert said.endswith("put back the file as the run wrote it, or run the scenario again")


def test_a_report_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    (run / "summary.json").mkdir()
    assert "the report cannot be written" in failure("report", str(run))
    assert not list(run.rglob("*.part"))


@pytest.mark.parametrize(
    ("command", "name"),
    [("audit", "schedule.jsonl")]
    + [("verdict", f"{name}.jsonl") for name in ("schedule", "rows", "health", "server", "events", "seal", "tokens")]
    + [("verdict", "manifest.json")],
)
def test_a_pipe_in_place_of_a_record_is_refused_at_once(command: str, name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert f"{run / name}: is a pipe, a socket or a device" in failure(command, str(run))


def test_a_run_that_goes_on_has_no_verdict_yet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20, manifest={"state": "running"})
    reported = CliRunner().invoke(app, ["report", str(run)])
    assert "note: the run continues, or was killed with all its processes" in reported.output
    assert "the run continues, or was killed with all its processes: wait for its end" in failure("verdict", str(run))


def test_a_report_that_does_not_fit_on_the_disk_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    (run / "report.html").mkdir()  # as good as a full disk: it cannot be written
    assert "the report cannot be written: Is a directory; call `report` again when it can" in failure("report", str(run))


@pytest.mark.parametrize("command", ["verdict", "compare", "pool"])
def test_a_full_disk_is_one_line_and_leaves_no_temporary_folder(command: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"seed-{seed}", 100, seed=seed, session=str(seed)) for seed in (1, 2, 3)]
    asked = " ".join(map(str, runs[: {"verdict": 1, "compare": 2, "pool": 3}[command]]))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = f"ulimit -f 1; exec {sys.executable} -m loadtest.cli {command} {asked}"  # files of 1 KiB, and no more
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | {"TMPDIR": str(temporary)})
    said = "File too large; free space on its disk, or see that it can be read and written, and try again"
    assert (ended.returncode, ended.stderr) == (ExitCode.USAGE, f"error: {runs[0] / 'rows.parquet'}: {said}\n")
    assert list(temporary.iterdir()) == list(tmp_path.rglob("*.part")) == []


def test_an_address_that_is_in_use_is_refused_before_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = failure("run", "laptop", "--target", "http://127.0.0.1:1", "--bind", address, "--out", str(tmp_path / "out"))
    assert f"--bind: {address}: Address already in use; take another port" in said
    assert not (tmp_path / "out").exists()
