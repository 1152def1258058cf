"""These tests check the server's side of the audit: logs of many forms, and counters, of runs written record by record."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.audit.audit import audit
from loadtest.audit.server_log import ServerLog
from loadtest.errors import UsageError
from loadtest.records import ServerSample
from serve_app.books.ledger_lines import Head, LedgerCounts, LedgerLine
from tests.loadtest.audit.test_audit import EPOCH_UNIX_S, NUM, Run, line


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_log_lines_of_another_run_of_the_schedule_are_left_out(run: Run) -> None:
    earlier = [line(row, run.schedule, arrival_unix_s=EPOCH_UNIX_S - 500) for row in run.rows.values()]
    later = [line(row, run.schedule, arrival_unix_s=EPOCH_UNIX_S + 500) for row in run.rows.values()]
    foreign = [{"request_id": "cmpl-1"}, {"request_id": "lt-00000000-4"}]
    run.log = [*earlier, *foreign, *run.logged(), *later]
    assert run.audited().ok


def test_the_log_may_have_another_text_or_prefix(run: Run) -> None:
    run.log = run.logged()
    run.log[7]["text_sha256"] = "0" * 64
    run.log[8]["tokens_sent"] += 1
    for entry in run.log:
        entry["request_id"] = f"cmpl-{entry['request_id']}"
    assert run.audited().counts == {"server-differs": 2}


def totals(t_s: float, ok: float, prompts: float, outputs: float) -> ServerSample:
    return ServerSample(t_s, "metrics", {"requests_ok": 7 + ok, "prompt_tokens": 5 + prompts, "output_tokens": 3 + outputs})


def test_counters_that_rose_by_what_the_rows_say_are_no_finding(run: Run) -> None:
    outputs = sum(request.output_tokens for request in run.schedule.requests)
    run.samples = [totals(-1, 0, 0, 0), ServerSample(0.5, "metrics", error="timeout"), totals(9, NUM, NUM * 20, outputs)]
    result = run.audited()
    assert result.ok
    assert result.server.startswith(f"counters: requests_ok +{NUM} (the rows say {NUM} to {NUM})")


@pytest.mark.parametrize(("extra", "num_found"), [(-1, 1), (0, 0), (3, 0), (4, 1)])
def test_an_answer_whose_end_we_did_not_see_may_be_counted_or_not(run: Run, extra: int, num_found: int) -> None:
    run.change([0, 1, 2], "cancelled", reason="went away")
    run.samples = [totals(-1, 0, 0, 0), totals(9, NUM - 3 + extra, 0, 0)]
    for sample in run.samples:
        del sample.values["prompt_tokens"], sample.values["output_tokens"]
    assert run.audited().counts.get("counters", 0) == num_found


def test_counters_that_cannot_be_compared_are_said_to_be_unchecked(tmp_path: Path) -> None:
    cases = {
        "late": [totals(0.5, 0, 0, 0), totals(9, 0, 0, 0)],
        "once": [totals(-1, 0, 0, 0)],
        "restarted": [totals(-1, 9, 0, 0), totals(5, 2, 0, 0), totals(9, NUM, 0, 0)],
    }
    for name, samples in cases.items():
        run = Run(tmp_path / name)
        run.samples = samples
        result = run.audited()
        assert (result.ok, result.server.partition(":")[0]) == (True, "not checked")
    assert "requests_ok fell: the target was started again, a replica left" in result.server


ACCESS = {
    "nginx": '{{"time":"2023-11-14T22:13:21+00:00","status":"200","id":"{id}"}}\n',
    "envoy": '{{"start_time":"2023-11-14T22:13:21.5Z","response_code":200,"headers":{{"x-request-id":"{id}"}}}}\n',
    "ours": '{{"timestamp":1700000001500,"usage":{{"completion_tokens":{tokens}}},"request_id":"cmpl-{id}-0"}}\n',
    "vllm": "INFO 11-14 22:13:21 [logger.py:39] Received request cmpl-{id}-0: params: SamplingParams(n=1)\n",
    "text": '127.0.0.1 - [14/Nov/2023:22:13:21] "POST /v1/completions" 200 {id}\n',
}


@pytest.mark.parametrize("form", list(ACCESS))
@pytest.mark.parametrize(("lost", "counts"), [((), {}), ((3, 30), {"server-missing": 2})])
def test_any_log_that_names_the_ids_is_understood(run: Run, form: str, lost: tuple[int, ...], counts: dict[str, int]) -> None:
    folder, log = run.write(), run.folder.parent / "access.log"
    ids = {row.id: f"lt-{run.schedule.sha256[:8]}-{row.id}" for row in run.rows.values() if row.id not in lost}
    lines = [ACCESS[form].format(id=name, tokens=run.rows[number].output_tokens) for number, name in ids.items()]
    log.write_text("".join(["something else\n", *lines]))
    result = audit(folder, server_log=ServerLog([log]))
    assert (result.counts, result.server) == (counts, f"log of {NUM - len(lost)} requests of this schedule")


def test_what_an_access_log_says_of_an_answer_is_compared(run: Run) -> None:
    run.log = [{"x": {"id": entry["request_id"]}, "status": 200, "output_tokens": entry["tokens_sent"]} for entry in run.logged()]
    run.log[7]["status"] = "502"
    run.log[8]["output_tokens"] += 1
    result = run.audited()
    assert [finding.text for finding in result.findings] == [
        "status 502 in the server's log, 200 received",
        f"output_tokens {run.log[8]['output_tokens']} in the server's log, {run.rows[8].output_tokens} received",
    ]


def ledger(run: Run, **changes: dict[str, Any]) -> Path:
    """Write the lines that serve-app's ingress writes of the run, changed by id; return their folder."""
    folder = run.folder.parent / "ledger"
    folder.mkdir()
    counts = LedgerCounts(seq=0, begun=0, open=[], outcomes={})
    lines: list[msgspec.Struct] = [Head(ingress="i", started=1.0, time=1.0, file=0, counts=counts)]
    for row in run.rows.values():
        told = {
            "seq": row.id, "number": row.id, "time": EPOCH_UNIX_S, "id": f"lt-{run.schedule.sha256[:8]}-{row.id}", "key": None,
            "model": "m", "path": "/v1/completions", "stream": True, "outcome": "complete", "status": 200, "reason": "length",
            "engine_requests": 1, "attempts": 1, "replicas": ["a"], "ends": ["length"], "prompt_tokens": 20,
            "output_tokens": row.output_tokens or 0, "queued_s": 0.0, "first_token_s": 0.1, "total_s": 1.0, "gaps_s": [],
        }  # fmt: skip
        lines.append(msgspec.convert(told | changes.get(f"id{row.id}", {}), LedgerLine))
    (folder / "ledger-1-i-000000.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    return folder


def test_the_folder_of_a_ledger_that_agrees_with_the_rows_is_no_finding(run: Run) -> None:
    run.change([1], "http_error", status=503, retry_after_s=1.0, reason="queue_full")
    run.change([2], "stream_error", status=200, reason="replica_lost")
    run.change([3], "cancelled", status=200, reason="went away")
    folder = ledger(
        run,
        id1={"outcome": "rejected", "status": 503},
        id2={"outcome": "failed"},
        id3={"outcome": "aborted", "reason": "client_gone"},
    )
    result = audit(run.write(), server_log=ServerLog([folder]))
    assert (result.counts, result.server) == ({}, f"log of {NUM} requests of this schedule")


def test_an_answer_that_is_whole_on_one_side_only_is_found(run: Run) -> None:
    run.change([1], "truncated", status=200, reason="no [DONE]", end_s=0.5)
    run.change([2], "stream_error", status=200, reason="replica_lost")
    run.change([3], "cancelled", status=200, reason="went away")  # when the server had sent all
    more = run.rows[5].output_tokens + 1  # type: ignore[operator]  # it is complete
    folder = ledger(run, id4={"outcome": "aborted", "status": 200}, id5={"output_tokens": more})
    result = audit(run.write(), server_log=ServerLog([folder]))
    assert result.counts == {"truncated": 1, "server-differs": 4}
    assert [finding.text for finding in result.findings if finding.kind == "server-differs"] == [
        "complete in the server's log, truncated for the client",
        "complete in the server's log, stream_error for the client",
        "aborted in the server's log, complete for the client",
        f"output_tokens {more} in the server's log, {more - 1} received",
    ]


def test_an_answer_that_the_ledger_does_not_know_is_found(run: Run) -> None:
    folder = ledger(run)
    (file,) = folder.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:8], *lines[9:-1], lines[-1][:-30]]))  # a line is missing, and the last one is cut off
    result = audit(run.write(), server_log=ServerLog([folder]))
    assert [(finding.kind, finding.id) for finding in result.findings] == [("server-missing", 7), ("server-missing", NUM - 1)]


def test_words_for_an_outcome_that_are_not_known_say_nothing(run: Run) -> None:
    run.log = [{**entry, "outcome": "success"} for entry in run.logged()]
    assert run.audited().ok


def test_a_folder_without_a_log_is_refused(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="is a folder without a file"):
        audit(run.write(), server_log=ServerLog([empty]))


def test_only_the_lines_and_the_key_that_were_named_count(run: Run) -> None:
    folder, log = run.write(), run.folder.parent / "vllm.log"
    prefix = f"cmpl-lt-{run.schedule.sha256[:8]}"
    log.write_text("".join(f"Received request {prefix}-{k}-0: x\nAdded request {prefix}-{k}-0-ab1.\n" for k in range(NUM)))
    assert audit(folder, server_log=ServerLog([log])).counts == {"server-duplicate": NUM}
    assert audit(folder, server_log=ServerLog([log], containing="Received request")).ok
    keyed = [{"a": {"id": f"{prefix}-{k}"}, "echo": f"{prefix}-{k + 1}"} for k in range(NUM)]
    log.write_bytes(msgspec.json.Encoder().encode_lines(keyed))
    assert audit(folder, server_log=ServerLog([log], id_key="a.id")).ok


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("GET /health 200\n", "holds no id like lt-.*-7; is it the log of this run"),
        ('{"request_id": 1\n', "access.log:1"),
        ("x" * (1 << 25), "has a line of more than"),
    ],
)
def test_a_log_that_cannot_be_the_servers_is_refused(run: Run, content: str, said: str) -> None:
    folder, log = run.write(), run.folder.parent / "access.log"
    log.write_text(content)
    with pytest.raises(UsageError, match=said):
        audit(folder, server_log=ServerLog([log]))
