"""Exactly-once audit: schedule, client rows and the server's own log (or counters) must agree about every request.

A scheduled id ends in exactly one final state: complete, with the text that an undisturbed run of the same schedule got; an
explicit error; rejected with Retry-After; cancelled by us; never sent, with a reason. Whatever else happened is a finding, and
its id counts as a mismatch. An unfinished run is audited like any other: what has no row is a finding.
"""

import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.errors import UsageError
from loadtest.records import (
    REJECTIONS,
    TEXT_SHOWN,
    Manifest,
    Row,
    ScheduledRequest,
    ServerSample,
    State,
    read_lines,
    read_manifest,
    read_rows,
)
from loadtest.scenario import RequestClass, Scenario, parse_scenario
from loadtest.schedule import read_schedule

Final = Literal["complete", "error", "rejected", "cancelled", "never_sent", "allowed", "mismatch"]
FINALS: tuple[Final, ...] = ("complete", "error", "rejected", "cancelled", "never_sent", "allowed", "mismatch")
CLOCKS_S = 1.0
"""The server's wall clock may differ that much from ours."""
CUT_S = 1.0
"""A cut is noticed at most that long after its end."""
COUNTER_DELAY_S = 1.0
"""A server counts an answer at most that long after its end."""

_BY_STATE: dict[State, Final] = {
    "ok": "complete", "http_error": "error", "stream_error": "error", "cancelled": "cancelled", "never_sent": "never_sent",
}  # fmt: skip

KINDS = {
    "schedule": "the schedule's file is not the one that the manifest names",
    "missing": "scheduled, no row",
    "duplicate-row": "several rows of one id",
    "unknown-id": "a row of an id that was not scheduled",
    "timeout": "neither answered nor refused in time",
    "truncated": "the answer ended without its end mark",
    "connect-error": "no connection",
    "bad-answer": "neither an answer nor an error status or event",
    "no-reason": "never sent, and no reason given",
    "no-retry-after": "429 or 503 without Retry-After",
    "text-differs": "complete, with another text than the reference's",
    "wrong-length": "complete, with another number of tokens than asked",
    "usage-differs": "more tokens received than the server's usage says",
    "server-missing": "sent, not in the server's log",
    "server-duplicate": "several times in the server's log",
    "server-unsent": "in the server's log, never sent",
    "server-differs": "the server's log has another number of tokens, or another text",
    "counters": "the server's counters do not fit the rows",
}


LOG_TIME, LOG_FIELDS = "arrival_unix_s", {"output_tokens": "tokens_sent", "text_sha256": "text_sha256"}
"""Keys of a line of the server's log that need not be there, as `loadtest.truth` writes them."""
MAX_LISTED = 20
"""Findings listed per kind."""


class Finding(msgspec.Struct, frozen=True):
    kind: str
    """A key of `KINDS`."""
    id: int | None
    text: str


class AuditResult(msgspec.Struct, frozen=True):
    """``states`` has every key of `FINALS` and sums up to ``num_scheduled``."""

    num_scheduled: int
    states: dict[str, int]
    counts: dict[str, int]
    """Findings per kind; a request can have several."""
    findings: list[Finding]
    """The first ones of each kind."""
    num_texts_compared: int
    server: str
    """What the server's side was: its log, its counters, or why there was none."""
    notes: list[str]

    @property
    def ok(self) -> bool:
        return not self.counts

    def lines(self) -> list[str]:
        """Return the findings, one a line."""
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


class _Audit:
    """The findings so far. ``touched`` ids are mismatches."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.touched: set[int] = set()

    def add(self, kind: str, request_id: int | None, text: str) -> None:
        self.counts[kind] += 1
        if request_id is not None:
            self.touched.add(request_id)
        if self.counts[kind] <= MAX_LISTED:
            self.findings.append(Finding(kind, request_id, text))


def audit(
    run: Path,
    *,
    reference: Path | None = None,
    server_log: Path | None = None,
    rows: Sequence[Row] | None = None,
    id_key: str = "request_id",
    allow: frozenset[State] = frozenset(),
) -> AuditResult:
    """Audit the run in the folder.

    Args:
        reference: Folder of an undisturbed run of the same schedule on the same model; texts of requests with temperature 0
            must be equal. Without it texts are not compared.
        server_log: JSONL file with a line per request that the server read; without it the counters in server.jsonl are used.
        rows: Those of the run as `read_rows` gives them, where they are read already.
        id_key: Key in a line of the log whose value is the X-Request-Id that the client sent, or ends with it (vLLM puts ``cmpl-``
            before it). Lines from before and after the run are of another run of the schedule.
        allow: States that are expected in this run and no finding, such as timeout far above the capacity. Connections that a fault
            ``cut-link`` of the scenario ended are always expected.
    Raises:
        UsageError: A folder or file cannot be read, or the reference ran another schedule or model.
    """
    manifest = read_manifest(run)
    scenario = parse_scenario(manifest.scenario)
    classes = {cls.name: cls for cls in scenario.requests}
    schedule = read_schedule(run / "schedule.jsonl")
    found = _Audit()
    if (schedule.sha256, len(schedule.requests)) != (manifest.schedule_sha256, manifest.num_scheduled):
        found.add(
            "schedule",
            None,
            f"{len(schedule.requests)} requests, {schedule.sha256[:8]}; manifest: "
            f"{manifest.num_scheduled}, {manifest.schedule_sha256[:8]}",
        )
    planned = {request.id: request for request in schedule.requests}
    by_id = _rows_by_id(read_rows(run) if rows is None else rows, planned, found)
    expected = {row.id for row in by_id.values() if row.state in allow or _cut_by_us(row, scenario)}
    for request_id, row in by_id.items():
        request = planned[request_id]
        if request_id not in expected:
            _check_end(row, found)
        if row.state == "ok":
            _check_tokens(row, request, classes[request.cls], found)
    num_compared = 0 if reference is None else _compare_texts(manifest, by_id, reference, classes, planned, found)
    if server_log is not None:
        server = _check_log(manifest, by_id, planned, server_log, id_key, found, expected)
    else:
        server = _check_counters(run, list(by_id.values()), planned, found)
    return AuditResult(
        len(planned),
        _finals(planned, by_id, found, expected),
        dict(found.counts),
        found.findings,
        num_compared,
        server,
        _notes(manifest, by_id.values()),
    )


def _rows_by_id(all_rows: Iterable[Row], planned: Mapping[int, ScheduledRequest], found: _Audit) -> dict[int, Row]:
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
            found.add("missing", request.id, "due in a closed loop" if request.due_s is None else f"due at {request.due_s:.3f} s")
    return rows


def _cut_by_us(row: Row, scenario: Scenario) -> bool:
    """Whether a fault of the scenario explains that the connection ended; one that kills a process does not: a fleet hides it."""
    cuts = [(fault.at_s, fault.at_s + fault.for_s + CUT_S) for fault in scenario.faults if fault.action == "cut-link"]
    ended = row.state in ("truncated", "connect_error")
    return ended and any(begin_s <= (row.end_s or 0.0) <= end_s for begin_s, end_s in cuts)


def _check_end(row: Row, found: _Audit) -> None:
    if row.state in ("timeout", "truncated", "connect_error"):
        found.add(row.state.replace("_", "-"), row.id, row.reason)
    elif row.status in REJECTIONS and row.state == "http_error" and row.retry_after_s is None:
        found.add("no-retry-after", row.id, f"status {row.status}: {row.reason}")
    elif row.state == "http_error" and row.status < 400:
        found.add("bad-answer", row.id, f"status {row.status}: {row.reason}")
    elif row.state == "never_sent" and not row.reason:
        found.add("no-reason", row.id, "")


def _check_tokens(row: Row, request: ScheduledRequest, cls: RequestClass, found: _Audit) -> None:
    """Fewer events than tokens are no finding: without continuous usage an event counts as one token, however many it holds."""
    received = sum(num_tokens for _, num_tokens in row.chunks)
    told = received if row.output_tokens is None else row.output_tokens
    if cls.ignore_eos and told != request.output_tokens and (row.output_tokens is not None or told > request.output_tokens):
        found.add("wrong-length", row.id, f"{told} tokens, asked {request.output_tokens}")
    if row.output_tokens is not None and received > row.output_tokens:
        found.add("usage-differs", row.id, f"{received} tokens received, usage {row.output_tokens}")
    if cls.prompt == "ids" and row.prompt_tokens not in (None, request.input_tokens):
        found.add("wrong-length", row.id, f"prompt of {row.prompt_tokens} tokens, sent {request.input_tokens}")


def _compare_texts(
    manifest: Manifest,
    rows: Mapping[int, Row],
    reference: Path,
    classes: Mapping[str, RequestClass],
    planned: Mapping[int, ScheduledRequest],
    found: _Audit,
) -> int:
    """Return how many texts could be compared."""
    other = read_manifest(reference)
    for name in ("schedule_sha256", "model"):
        if getattr(other, name) != getattr(manifest, name):
            raise UsageError(str(reference), f"its {name} is {getattr(other, name)!r}, the run's {getattr(manifest, name)!r}")
    num_compared = 0
    for expected in read_lines(reference / "rows.jsonl", Row):
        row = rows.get(expected.id)
        if row is None or row.state != "ok" or expected.state != "ok" or not (row.text_sha256 and expected.text_sha256):
            continue
        if classes[planned[row.id].cls].temperature == 0:
            num_compared += 1
            if row.text_sha256 != expected.text_sha256:
                found.add("text-differs", row.id, f"{row.text!r}, reference {expected.text[:TEXT_SHOWN]!r}")
    return num_compared


def _check_log(
    manifest: Manifest,
    rows: Mapping[int, Row],
    planned: Mapping[int, ScheduledRequest],
    path: Path,
    id_key: str,
    found: _Audit,
    expected: set[int],
) -> str:
    ours = f"lt-{manifest.schedule_sha256[:8]}-"
    begin_s = manifest.epoch_unix_s - CLOCKS_S
    end_s = math.inf if manifest.ended_s is None else manifest.epoch_unix_s + manifest.ended_s + CLOCKS_S
    seen: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in read_lines(path, dict[str, Any]):
        _, mine, number = str(line.get(id_key, "")).rpartition(ours)
        unix_s = line.get(LOG_TIME, manifest.epoch_unix_s)
        if mine and number.isdecimal() and begin_s <= unix_s <= end_s:
            seen[int(number)].append(line)
    for request_id in planned.keys() | seen.keys():
        row, lines = rows.get(request_id), seen.get(request_id, [])
        if row is None or row.state == "never_sent":
            if lines:  # an id that nobody scheduled is no request of ours
                found.add(
                    "server-unsent", request_id if row else None, f"request {request_id}: {row.reason if row else 'no row'}"
                )
        elif len(lines) > 1:
            found.add("server-duplicate", request_id, f"{len(lines)} times, {row.state} for the client {row.reason}".rstrip())
        elif not lines:
            if row.state != "connect_error" and request_id not in expected:
                found.add("server-missing", request_id, f"{row.state} for the client")
        elif row.state == "ok":
            _check_answer(row, lines[0], found)
    return f"log of {sum(map(len, seen.values()))} requests of this schedule"


def _check_answer(row: Row, line: Mapping[str, Any], found: _Audit) -> None:
    for name, key in LOG_FIELDS.items():
        told, got = line.get(key), getattr(row, name)
        if told not in (None, "") and got not in (None, "") and told != got:
            found.add("server-differs", row.id, f"{name} {told} in the server's log, {got} received")


def _check_counters(run: Path, rows: Sequence[Row], planned: Mapping[int, ScheduledRequest], found: _Audit) -> str:
    """Compare what the counters rose by with the rows; those that may be counted or not make the tolerance."""
    path = run / "server.jsonl"
    samples = [s for s in read_lines(path, ServerSample) if s.source == "metrics" and not s.error] if path.exists() else []
    sent = [row for row in rows if row.sent_s is not None]
    before = [s for s in samples if sent and s.t_s <= min(row.sent_s or 0.0 for row in sent)]
    if not before or before[-1] is samples[-1]:
        return "not checked: no log, and no scrapes both before the first request and after it"
    window = samples[samples.index(before[-1]) :]
    counted = [row for row in sent if row.state == "ok" and (row.end_s or 0.0) <= window[-1].t_s - COUNTER_DELAY_S]
    num_unsure = len(sent) - len(counted) - sum(400 <= row.status < 500 or row.status == 503 for row in sent)
    checked = []
    for name in ("requests_ok", "prompt_tokens", "output_tokens"):
        values = [s.values[name] for s in window if name in s.values]
        told = [1 if name == "requests_ok" else getattr(row, name) for row in counted]
        if len(values) < 2 or None in told:
            continue
        if any(later < earlier for earlier, later in pairwise(values)):
            return f"not checked: {name} fell, the target was started again"
        asked = [1] if name == "requests_ok" else [getattr(planned[row.id], name.replace("prompt", "input")) for row in sent]
        low, most = sum(told), max([*told, *asked])
        checked.append(f"{name} +{values[-1] - values[0]:.0f} (the rows say {low} to {low + num_unsure * most})")
        if not low <= values[-1] - values[0] <= low + num_unsure * most:
            found.add("counters", None, checked[-1])
    return "counters: " + (", ".join(checked) or "none of those needed")


def _finals(planned: Iterable[int], rows: Mapping[int, Row], found: _Audit, expected: set[int]) -> dict[str, int]:
    """Return how many ids ended how; a finding makes a mismatch of whatever it was."""
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


def _notes(manifest: Manifest, rows: Iterable[Row]) -> list[str]:
    notes = [f"the generator says: {problem}" for problem in manifest.problems]
    if manifest.state != "finished":
        last_s = max((row.end_s or row.due_s for row in rows), default=0.0)
        notes.append(f"the run did not finish (state {manifest.state}), its last row is of {last_s:.1f} s")
    return notes
