"""These tests run the auditor on runs that are written record by record, with each fault at known ids."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.audit.audit import FINALS, AuditResult, audit
from loadtest.audit.findings import KINDS
from loadtest.audit.server_log import ServerLog
from loadtest.control.runner import run as execute
from loadtest.errors import UsageError
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.proof.truth.server import running
from loadtest.proof.truth.settings import Law
from loadtest.records import Manifest, Row, ScheduledRequest, ServerSample
from loadtest.wire.target import Target

NUM = 1000
EPOCH_UNIX_S = 1.7e9
SCENARIO: dict[str, Any] = {
    "name": "audited",
    "arrival": {"law": "burst", "max_requests": NUM},
    "requests": [{"input_tokens": {"mean": 20}, "output_tokens": {"dist": "exponential", "mean": 20, "max": 60}}],
}


def good(request: ScheduledRequest) -> Row:
    """Return the row of a request that all went well with: due at 0, sent at 1 ms, one token each 10 ms."""
    tokens = request.output_tokens
    row = Row(request.id, 0, 0.0, "ok", sent_s=0.001, end_s=0.01 * tokens, status=200, prompt_tokens=20, output_tokens=tokens)
    row.chunks = [(10.0 * k, 1) for k in range(tokens)]
    row.first_s, row.last_s = 0.001, 0.001 + 0.01 * (tokens - 1)
    row.text = f"text {request.id}"
    row.text_sha256 = hashlib.sha256(row.text.encode()).hexdigest()
    return row


def line(row: Row, schedule: Schedule, **others: Any) -> dict[str, Any]:
    """Return what the law server logs of an answer."""
    request_id = f"lt-{schedule.sha256[:8]}-{row.id}"
    entry = {"request_id": request_id, "arrival_unix_s": EPOCH_UNIX_S + 0.001, "tokens_sent": row.output_tokens}
    return {"kind": "request", **entry, "text_sha256": row.text_sha256, **others}


class Run:
    """The records of a run, to be changed and then written."""

    def __init__(self, folder: Path, scenario: dict[str, Any] | None = None, **manifest: Any) -> None:
        values = parse_scenario(SCENARIO | (scenario or {}))
        self.folder = folder
        self.schedule = make_schedule(values)
        self.rows = {request.id: good(request) for request in self.schedule.requests}
        self.more_rows: list[Row] = []
        self.log: list[dict[str, Any]] | None = None
        self.samples: list[ServerSample] = []
        fields: dict[str, Any] = {"state": "finished", "schedule_sha256": self.schedule.sha256, "ended_s": 60.0, "model": "m"}
        fields |= {"num_scheduled": NUM, "target": "http://t", "epoch_unix_s": EPOCH_UNIX_S, "command": []}
        self.manifest = Manifest(**fields | {"scenario": values.model_dump(mode="json")} | manifest)

    def change(self, ids: Iterable[int], state: Any, **fields: Any) -> None:
        """Replace the rows by ones that ended otherwise, without an answer's fields unless given."""
        for request_id in ids:
            common: dict[str, Any] = {"sent_s": 0.001, "end_s": 0.5}
            self.rows[request_id] = Row(request_id, 0, 0.0, state, **common | fields)

    def logged(self) -> list[dict[str, Any]]:
        return [line(row, self.schedule) for row in self.rows.values() if row.sent_s is not None]

    def write(self) -> Path:
        self.folder.mkdir()
        (self.folder / "manifest.json").write_bytes(msgspec.json.encode(self.manifest))
        self.schedule.write(self.folder / "schedule.jsonl")
        encode = msgspec.json.Encoder().encode_lines
        (self.folder / "rows.jsonl").write_bytes(encode([*self.rows.values(), *self.more_rows]))
        if self.samples:
            (self.folder / "server.jsonl").write_bytes(encode(self.samples))
        return self.folder

    def audited(self, **options: Any) -> AuditResult:
        run = self.write()
        if self.log is not None:
            (run / "server.log").write_bytes(msgspec.json.Encoder().encode_lines(self.log))
            options["server_log"] = ServerLog([run / "server.log"])
        result = audit(run, **options)
        assert sum(result.states.values()) == NUM
        assert set(result.counts) <= set(KINDS)
        return result


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def states(**counts: int) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in FINALS}


def test_a_run_without_faults_has_no_findings(run: Run, tmp_path: Path) -> None:
    reference = Run(tmp_path / "reference").write()
    run.log = [*run.logged(), {"kind": "totals", "ok": NUM}]
    result = run.audited(reference=reference)
    assert (result.ok, result.counts, result.states) == (True, {}, states(complete=NUM))
    assert (result.num_texts_compared, result.server) == (NUM, f"log of {NUM} requests of this schedule")


def test_every_injected_fault_is_found_and_counted(run: Run, tmp_path: Path) -> None:
    reference = Run(tmp_path / "reference").write()
    run.change(range(0, 10), "truncated", reason="the connection ended without an answer")  # dropped: 1 %
    run.change(range(10, 25), "truncated", reason="no [DONE]", output_tokens=3)  # killed streams
    run.change(range(25, 30), "timeout", reason="no complete answer")
    run.change(range(30, 33), "connect_error", reason="refused", end_s=None)
    run.change(range(33, 37), "http_error", status=200, reason="text/html")
    for request_id in range(40, 46):
        run.rows[request_id].text, run.rows[request_id].text_sha256 = "other", hashlib.sha256(b"other").hexdigest()
    for request_id in range(50, 57):
        run.rows[request_id].output_tokens = run.schedule.requests[request_id].output_tokens + 1
    run.log = run.logged()
    run.log += [line(run.rows[request_id], run.schedule) for request_id in range(60, 70)]  # duplicated: 1 %
    run.log = [entry for entry in run.log if int(entry["request_id"].rpartition("-")[2]) not in (70, 71, 30)]
    run.change([72, 73], "never_sent", sent_s=None, reason="gave up")  # but the server has them
    run.more_rows = [run.rows[80], run.rows[81], Row(NUM + 5, 0, 0.0, "ok")]
    for request_id in (90, 91, 92, 93):
        del run.rows[request_id]
    run.log.append(line(Row(NUM + 7, 0, 0.0, "ok"), run.schedule))
    result = run.audited(reference=reference)
    assert result.counts == {
        "truncated": 25,
        "timeout": 5,
        "connect-error": 3,
        "bad-answer": 4,
        "text-differs": 6,
        "wrong-length": 7,
        "server-duplicate": 10,
        "server-missing": 2,
        "server-unsent": 2 + 4 + 1,  # never sent, without a row, never scheduled
        "duplicate-row": 2,
        "unknown-id": 1,
        "missing": 4,
    }
    mismatches = 25 + 5 + 3 + 4 + 6 + 7 + 10 + 2 + 2 + 2 + 4
    assert result.states == states(complete=NUM - mismatches, mismatch=mismatches)
    assert not result.ok


def test_each_final_state_is_told_apart(run: Run) -> None:
    run.change(range(0, 5), "http_error", status=429, retry_after_s=1.0, reason="429: full")
    run.change(range(5, 8), "http_error", status=503, reason="503: full")
    run.change(range(8, 12), "http_error", status=500, reason="500: broken")
    run.change(range(12, 14), "stream_error", status=200, reason="engine died")
    run.change(range(14, 17), "cancelled", reason="the client disconnected after 1 s")
    run.change(range(17, 19), "never_sent", sent_s=None, reason="the generator was late")
    run.change(range(19, 20), "never_sent", sent_s=None)
    result = run.audited()
    assert result.states == states(complete=NUM - 20, rejected=5, error=6, cancelled=3, never_sent=2, mismatch=4)
    assert result.counts == {"no-retry-after": 3, "no-reason": 1}


def test_expected_states_are_no_findings(run: Run) -> None:
    run.change(range(0, 5), "truncated", reason="our own fault cut it")
    result = run.audited(allow=frozenset({"truncated"}))
    assert (result.ok, result.states) == (True, states(complete=NUM - 5, allowed=5))


def test_connections_that_our_own_fault_cut_are_expected_and_others_are_not(tmp_path: Path) -> None:
    cut = {"at_s": 10, "action": "cut-link", "for_s": 3}
    run = Run(tmp_path / "run", {"faults": [cut, {"at_s": 30, "action": "kill", "process": "x"}]})
    run.change([0, 1], "truncated", end_s=10.001)
    run.change([2], "connect_error", end_s=12.9)
    run.change([3], "timeout", end_s=11.0)  # a cut is noticed
    run.change([4], "truncated", end_s=9.9)
    run.change([5], "truncated", end_s=30.1)
    run.log = [entry for entry in run.logged() if int(entry["request_id"].rpartition("-")[2]) not in (1, 2)]
    result = run.audited()
    assert result.counts == {"timeout": 1, "truncated": 2}
    assert result.states == states(complete=NUM - 6, allowed=3, mismatch=3)


def test_lengths_are_compared_with_what_was_asked_only_if_eos_is_ignored(tmp_path: Path) -> None:
    def short(folder: str, ignore_eos: bool) -> dict[str, int]:
        run = Run(tmp_path / folder, {"requests": [{"ignore_eos": ignore_eos, "output_tokens": {"mean": 20}}]})
        run.rows[3].output_tokens = 19
        run.rows[3].chunks = run.rows[3].chunks[:-1]
        run.rows[3].last_s = 0.001 + run.rows[3].chunks[-1][0] / 1e3
        for row in run.rows.values():
            row.prompt_tokens = 64
        return run.audited().counts

    assert short("ignored", True) == {"wrong-length": 1}
    assert short("kept", False) == {}


def test_tokens_in_few_events_are_no_finding_and_more_tokens_than_the_usage_says_are(run: Run) -> None:
    run.rows[3].chunks, run.rows[3].last_s = [(0.0, 1)], 0.001  # the server batched its output
    run.rows[4].chunks = [*run.rows[4].chunks, (999.0, 1)]
    run.rows[4].last_s = run.rows[4].end_s = 1.0
    run.rows[5].prompt_tokens = 19
    assert run.audited().counts == {"usage-differs": 1, "wrong-length": 1}


@pytest.mark.parametrize("change", [{"model": "other"}, {"schedule_sha256": "0" * 64}])
def test_a_reference_of_another_run_is_refused(run: Run, tmp_path: Path, change: dict[str, Any]) -> None:
    other = Run(tmp_path / "reference", **change)
    with pytest.raises(UsageError, match=next(iter(change))):
        run.audited(reference=other.write())


def test_sampled_answers_and_answers_without_a_twin_are_not_compared(tmp_path: Path) -> None:
    sampled = {"requests": [{"temperature": 0.7, "input_tokens": {"mean": 20}, "output_tokens": {"mean": 20}}]}
    reference = Run(tmp_path / "reference", sampled)
    for row in reference.rows.values():
        row.text_sha256 = "0" * 64
    result = Run(tmp_path / "run", sampled).audited(reference=reference.write())
    assert (result.ok, result.num_texts_compared) == (True, 0)

    reference = Run(tmp_path / "greedy reference")
    reference.change(range(100), "http_error", status=500, reason="500: broken")
    assert Run(tmp_path / "greedy run").audited(reference=reference.write()).num_texts_compared == NUM - 100


def test_an_unfinished_run_is_audited(run: Run) -> None:
    run.manifest.state, run.manifest.ended_s = "running", None
    run.manifest.problems = ["worker 1 was lost"]
    for request_id in range(600, NUM):
        del run.rows[request_id]
    folder = run.write()
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(b'{"id":600,"worker":0,"due')
    result = audit(folder)
    assert (result.states, result.counts) == (states(complete=600, mismatch=400), {"missing": 400})
    assert result.notes[0] == "the generator reports: worker 1 was lost"
    assert "state running" in result.notes[1]


def test_a_run_killed_before_its_first_row_is_audited(run: Run) -> None:
    folder = run.write()
    (folder / "rows.jsonl").unlink()
    assert audit(folder).counts == {"missing": NUM}


def test_findings_are_listed_up_to_the_limit_and_printed(run: Run) -> None:
    run.change(range(50), "timeout", reason="no complete answer [within] 5 s")
    result = run.audited()
    assert (len(result.findings), result.counts) == (20, {"timeout": 50})
    assert result.lines()[0] == "timeout: request 0: no complete answer [within] 5 s"
    assert "no complete answer [within] 5 s" in result.table()
    assert "950" in result.table()


def test_another_schedule_than_the_manifests_is_a_finding(run: Run) -> None:
    run.manifest.num_scheduled = NUM + 1
    assert run.audited().counts == {"schedule": 1}


def edited_text(row: Row) -> None:
    row.text = "another"


def edited_state(row: Row) -> None:
    row.state, row.reason = "http_error", "500: broken"


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (edited_text, "text-edited", "'another' is not of"),
        (edited_state, "implausible", "http_error, but with tokens"),
        (lambda row: setattr(row, "status", 500), "implausible", "complete, with status 500"),
        (lambda row: setattr(row, "status", 0), "implausible", "complete, with status 0"),
        (lambda row: setattr(row, "due_s", 0.2), "implausible", "due at 0.2 s, by the schedule at 0.0 s"),
        (lambda row: setattr(row, "sent_s", None), "implausible", "complete, without the times of sending"),
        (lambda row: setattr(row, "first_s", 0.0005), "implausible", "first_s 0.0005 is before sent_s 0.001"),
        (lambda row: setattr(row, "first_s", 0.002), "implausible", "first_s 0.002 does not fit the chunks"),
        (lambda row: setattr(row, "last_s", 99.0), "implausible", "is before last_s 99.0"),
        (lambda row: setattr(row, "end_s", 121.0), "implausible", "complete after 121.000 s, the timeout was 120 s"),
        (lambda row: setattr(row, "chunks", [(0.0, 1), (-1.0, 1), (0.0, 1)]), "implausible", "the order of time"),
    ],
)
def test_a_row_that_no_run_can_have_recorded_is_found(run: Run, edit: Callable[[Row], None], kind: str, said: str) -> None:
    edit(run.rows[7])
    result = run.audited()
    assert result.counts[kind] >= 1
    assert (result.states["mismatch"], result.findings[0].id) == (1, 7)
    assert any(said in finding.text for finding in result.findings)


@pytest.mark.slow
def test_what_the_law_server_breaks_is_found_in_a_real_run(tmp_path: Path) -> None:
    kinds = {"drop": 50, "duplicate": 23, "truncate": 29, "error-event": 31, "html": 43}
    failures: list[dict[str, Any]] = [{"kind": kind, "every": every} for kind, every in kinds.items()]
    failures += [{"kind": "status", "every": 37}, {"kind": "status", "every": 41, "status": 429, "retry_after_s": None}]
    # A fresh connection for each request: one that the server drops on a used connection would be sent again.
    law = Law.model_validate({"ttft": {"law": "constant", "s": 0.05}, "answers_per_connection": 1, "failures": failures})
    asked = {"input_tokens": {"mean": 10}, "output_tokens": {"dist": "uniform", "min": 5, "max": 15}}
    scenario = {
        "name": "broken",
        "arrival": {"law": "constant", "rate": 40},
        "requests": [asked],
        "duration_s": 10,
        "warmup_s": 1,
    }
    folder, log = tmp_path / "run", tmp_path / "truth.jsonl"
    with running(law, log=log) as url:
        execute(parse_scenario(scenario), Target(url), folder, quiet=True, report=False)
    told = [entry for entry in map(msgspec.json.decode, log.read_bytes().splitlines()) if entry["kind"] == "request"]
    injected = Counter((entry["injected"], entry["status"]) for entry in told)
    result = audit(folder, server_log=ServerLog([log]))
    assert result.num_scheduled == 400
    assert injected["drop", 0] == 400 // 50  # the law counts arrivals, the first failure that hits is taken
    assert result.counts == {
        "truncated": injected["drop", 0] + injected["truncate", 200],
        "bad-answer": injected["html", 200],
        "no-retry-after": injected["status", 429],
        "server-duplicate": injected["duplicate", 200] // 2,
    }
    assert (result.states["rejected"], result.states["error"]) == (injected["status", 503], injected["error-event", 200])
    assert result.states["complete"] == injected["", 200]
    assert audit(folder).server.startswith("counters: requests_ok")
