"""The exactly-once audit compares schedule, client rows and the server's own log (or counters): they must agree on each request.

A scheduled id ends in exactly one final state: complete, with the text of an undisturbed run of the same schedule; an explicit
error; rejected with Retry-After; cancelled by the load generator; never sent, with a reason. Anything else is a finding, and its id
counts as a mismatch. A file that is not as recorded, and a row that no run can have recorded, are findings too. An unfinished run is
audited like any other: a request without a row is a finding.
"""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.audit.audit_server import check_counters, check_log
from loadtest.audit.findings import KINDS, Finding, Findings
from loadtest.audit.plausible import implausible
from loadtest.audit.server_log import ServerLog
from loadtest.errors import UsageError
from loadtest.plan.recorded import recorded_scenario
from loadtest.plan.request_class import RequestClass
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import read_schedule
from loadtest.records import REJECTIONS, TEXT_SHOWN, Manifest, Row, ScheduledRequest, State, read_lines, read_manifest, read_rows
from loadtest.seal import broken_seals, without_digest
from loadtest.wording import MAX_PROBLEM, shown

Final = Literal["complete", "error", "rejected", "cancelled", "never_sent", "allowed", "mismatch"]
FINALS: tuple[Final, ...] = get_args(Final)
CUT_S = 1.0
"""Largest delay between the end of a cut and the client's error."""
_BY_STATE: dict[State, Final] = {
    "ok": "complete", "http_error": "error", "stream_error": "error", "cancelled": "cancelled", "never_sent": "never_sent",
}  # fmt: skip


class _Text(msgspec.Struct):
    """The fields of a `Row` that are read in full."""

    id: int
    text: str = ""
    text_sha256: str = ""


class AuditResult(msgspec.Struct, frozen=True):
    """The result of an audit. ``states`` has every key of `FINALS`, and its sum is ``num_scheduled``."""

    num_scheduled: int
    states: dict[str, int]
    counts: dict[str, int]
    """Number of findings per kind; a request can have several."""
    findings: list[Finding]
    """The first findings of each kind."""
    num_texts_compared: int
    server: str
    """Description of the server's side: its log, its counters, or why there was none."""
    notes: list[str]

    @property
    def ok(self) -> bool:
        return not self.counts

    def lines(self) -> list[str]:
        """Return the findings, one per line."""
        return [f"{f.kind}: {'' if f.id is None else f'request {f.id}: '}{f.text}" for f in self.findings]

    def table(self) -> str:
        """Return the result as text for a terminal."""
        table = Table("final state", "requests", title=f"audit of {self.num_scheduled} scheduled requests")
        for name, count in self.states.items():
            table.add_row(name, str(count))
        for kind, count in self.counts.items():
            table.add_row(f"[red]{kind}[/red]: {KINDS[kind]}", str(count))
        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False)
        console.print(table)
        for line in (f"texts compared: {self.num_texts_compared}", f"server: {self.server}", *self.notes, *self.lines()):
            console.print(line, markup=False, soft_wrap=True)
        return out.getvalue()


def audit(
    run: Path,
    *,
    reference: Path | None = None,
    server_log: ServerLog | None = None,
    rows: Sequence[Row] | None = None,
    allow: frozenset[State] = frozenset(),
) -> AuditResult:
    """Audit the run in the folder.

    Args:
        reference: Folder of an undisturbed run of the same schedule on the same model; texts of requests with temperature 0
            must be equal. Without a reference, texts are not compared.
        server_log: A log with a line per request that the server read; without it the counters in server.jsonl are used. Lines with a
            time before or after the run belong to another run of the schedule.
        rows: The run's rows as `read_rows` returns them, if they have been read already.
        allow: States that are expected in this run and are no finding, such as timeout far above the capacity. Connections that a fault
            ``cut-link`` of the scenario ended are always expected.
    Raises:
        UsageError: A folder or file cannot be read, or the reference ran another schedule or model.
    """
    manifest, found = read_manifest(run), Findings()
    scenario = recorded_scenario(run, manifest)
    planned = _planned(run, manifest, found)
    by_id = _rows_by_id(read_rows(run) if rows is None else rows, planned, found)
    expected = {row.id for row in by_id.values() if row.state in allow or _cut_by_us(row, scenario)}
    _check_rows(by_id.values(), planned, scenario, expected, found)
    _check_texts(run, planned, found)
    num_compared = 0 if reference is None else _compare_texts(manifest, by_id, reference, scenario, planned, found)
    if server_log is not None:
        server = check_log(manifest, by_id, planned, server_log, found, expected)
    else:
        server = check_counters(run, list(by_id.values()), planned, found)
    finals = _finals(planned, by_id, found, expected)
    notes = _notes(run, manifest, by_id.values())
    return AuditResult(len(planned), finals, dict(found.counts), found.findings, num_compared, server, notes)


def _planned(run: Path, manifest: Manifest, found: Findings) -> dict[int, ScheduledRequest]:
    """Check the schedule and the seals; return the schedule by id."""
    schedule = read_schedule(run / "schedule.jsonl")
    here, ran = (len(schedule.requests), schedule.sha256), (manifest.num_scheduled, manifest.schedule_sha256)
    if here != ran:
        found.add("schedule", None, f"{here[0]} requests, {here[1][:8]}; manifest: {ran[0]}, {ran[1][:8]}")
    for problem in broken_seals(run, manifest):
        found.add("edited", None, problem)
    return {request.id: request for request in schedule.requests}


def _check_rows(
    rows: Iterable[Row], planned: Mapping[int, ScheduledRequest], scenario: Scenario, expected: set[int], found: Findings
) -> None:
    classes = {cls.name: cls for cls in scenario.requests}
    for row in rows:
        request = planned[row.id]
        if row.id not in expected:
            _check_end(row, found)
        if (cls := classes.get(request.cls)) is None:
            found.add("schedule", row.id, f"its class {request.cls!r} is none of the scenario's: {', '.join(classes)}")
        elif row.state == "ok":
            _check_tokens(row, request, cls, found)
        for problem in implausible(row, request, timeout_s=scenario.timeout_s):
            found.add("implausible", row.id, problem)


def _rows_by_id(all_rows: Iterable[Row], planned: Mapping[int, ScheduledRequest], found: Findings) -> dict[int, Row]:
    """Return the first row of each scheduled id."""
    rows: dict[int, Row] = {}
    for row in all_rows:
        if row.id not in planned:
            found.add("unknown-id", None, f"{row.id}, {row.state}, of worker {row.worker}")
        elif row.id in rows:
            found.add(
                "duplicate-row", row.id, f"{rows[row.id].state} of worker {rows[row.id].worker}, {row.state} of {row.worker}"
            )
        else:
            rows[row.id] = row
    for request in planned.values():
        if request.id not in rows:
            found.add("missing", request.id, _due(request))
    return rows


def _due(request: ScheduledRequest) -> str:
    if request.after is not None:
        return f"due after the answer to {request.after}"
    return "due in a closed loop" if request.due_s is None else f"due at {request.due_s:.3f} s"


def _cut_by_us(row: Row, scenario: Scenario) -> bool:
    """Whether a fault of the scenario explains the end of the connection. Killing a process does not: a fleet hides that."""
    cuts = [(fault.at_s, fault.at_s + fault.for_s + CUT_S) for fault in scenario.faults if fault.action == "cut-link"]
    ended = row.state in ("truncated", "connect_error")
    return ended and any(begin_s <= (row.end_s or 0.0) <= end_s for begin_s, end_s in cuts)


def _check_end(row: Row, found: Findings) -> None:
    if row.state in ("timeout", "truncated", "connect_error"):
        found.add(row.state.replace("_", "-"), row.id, row.reason)
    elif row.status in REJECTIONS and row.state == "http_error" and row.retry_after_s is None:
        found.add("no-retry-after", row.id, f"status {row.status}: {row.reason}")
    elif row.state == "http_error" and row.status < 400:
        found.add("bad-answer", row.id, f"status {row.status}: {row.reason}")
    elif row.state == "never_sent" and not row.reason:
        found.add("no-reason", row.id, "")


def _check_tokens(row: Row, request: ScheduledRequest, cls: RequestClass, found: Findings) -> None:
    """Check token counts. Fewer events than tokens are no finding: without continuous usage an event counts as one token."""
    received = sum(num_tokens for _, num_tokens in row.chunks)
    told = received if row.output_tokens is None else row.output_tokens
    if cls.ignore_eos and told != request.output_tokens and (row.output_tokens is not None or told > request.output_tokens):
        found.add("wrong-length", row.id, f"{told} tokens, asked {request.output_tokens}")
    if row.output_tokens is not None and received > row.output_tokens:
        found.add("usage-differs", row.id, f"{received} tokens received, usage {row.output_tokens}")
    if cls.prompt == "ids" and row.prompt_tokens not in (None, request.input_tokens):
        found.add("wrong-length", row.id, f"prompt of {row.prompt_tokens} tokens, sent {request.input_tokens}")


def _check_texts(run: Path, planned: Mapping[int, ScheduledRequest], found: Findings) -> None:
    path = run / "rows.jsonl"
    for row in read_lines(path, _Text) if path.exists() else ():
        if row.text and row.id in planned and hashlib.sha256(row.text.encode()).hexdigest() != row.text_sha256:
            found.add("text-edited", row.id, f"{row.text[:TEXT_SHOWN]!r} is not of {row.text_sha256[:8] or 'any hash'}")


def _compare_texts(
    manifest: Manifest,
    rows: Mapping[int, Row],
    reference: Path,
    scenario: Scenario,
    planned: Mapping[int, ScheduledRequest],
    found: Findings,
) -> int:
    """Compare the texts with the reference; return the number of comparable texts."""
    other = read_manifest(reference)
    for name in ("schedule_sha256", "model"):
        if getattr(other, name) != getattr(manifest, name):
            raise UsageError(str(reference), f"its {name} is {getattr(other, name)!r}, the run's {getattr(manifest, name)!r}")
    greedy = {cls.name for cls in scenario.requests if cls.temperature == 0}
    num_compared = 0
    for expected in read_lines(reference / "rows.jsonl", Row):
        row = rows.get(expected.id)
        if row is None or row.state != "ok" or expected.state != "ok" or not (row.text_sha256 and expected.text_sha256):
            continue
        if planned[row.id].cls in greedy:
            num_compared += 1
            if row.text_sha256 != expected.text_sha256:
                found.add("text-differs", row.id, f"{row.text!r}, reference {expected.text[:TEXT_SHOWN]!r}")
    return num_compared


def _finals(planned: Iterable[int], rows: Mapping[int, Row], found: Findings, expected: set[int]) -> dict[str, int]:
    """Return the number of ids per final state; an id with a finding counts as a mismatch."""
    states: dict[str, int] = dict.fromkeys(FINALS, 0)
    for request_id in planned:
        if request_id in found.touched:
            states["mismatch"] += 1
        elif request_id in expected:
            states["allowed"] += 1
        else:
            states[_final(rows[request_id])] += 1
    return states


def _final(row: Row) -> Final:
    if row.state == "http_error" and row.status in REJECTIONS:
        return "rejected"
    return _BY_STATE[row.state]


def _notes(run: Path, manifest: Manifest, rows: Iterable[Row]) -> list[str]:
    notes = [f"the generator reports: {shown(problem, MAX_PROBLEM)}" for problem in manifest.problems]
    if manifest.state != "finished":
        last_s = max((row.end_s or row.due_s for row in rows), default=0.0)
        notes.append(f"the run did not finish (state {manifest.state}), its last row is of {last_s:.1f} s")
    return notes + without_digest(run, manifest)
