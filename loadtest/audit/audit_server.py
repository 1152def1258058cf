"""This module compares the server's side with the rows, for the audit: its log, line by line, or its counters, as sums."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from loadtest.audit.findings import Findings
from loadtest.audit.server_log import LogLine, ServerLog, read_server_log
from loadtest.errors import UsageError
from loadtest.records import Manifest, Row, ScheduledRequest, ServerSample, id_prefix, read_lines

CLOCKS_S = 1.0
"""Largest difference between the server's wall clock and ours."""
COUNTER_DELAY_S = 1.0
"""Largest delay between the end of an answer and its count by the server."""
_NOT_COMPLETE = ("http_error", "stream_error", "truncated")
"""States of a row that a server cannot take for a complete answer. To a client that cancelled or timed out it may have sent all."""
COMPARED = ("status", "output_tokens", "text_sha256")
"""Fields of a line of the server's log that are compared if they are there."""


def check_log(
    manifest: Manifest,
    rows: Mapping[int, Row],
    planned: Mapping[int, ScheduledRequest],
    log: ServerLog,
    found: Findings,
    expected: set[int],
) -> str:
    seen = _log_lines(manifest, log)
    if not seen and any(row.status for row in rows.values()):
        words = f"{log.id_key} of {log.paths[0]}" if log.id_key else str(log.paths[0])
        raise UsageError(
            words, f"holds no id like {id_prefix(manifest)}7; is it the log of this run, and does it name X-Request-Id?"
        )
    for request_id in planned.keys() | seen.keys():
        row, lines = rows.get(request_id), seen.get(request_id, [])
        if row is None or row.state == "never_sent":
            if lines:  # an id that is not in the schedule is no request of this run
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
        elif row.state in _NOT_COMPLETE and lines[0].complete and request_id not in expected:
            found.add("server-differs", request_id, f"{lines[0].outcome} in the server's log, {row.state} for the client")
    return f"log of {sum(map(len, seen.values()))} requests of this schedule"


def _log_lines(manifest: Manifest, log: ServerLog) -> dict[int, list[LogLine]]:
    begin_s = manifest.epoch_unix_s - CLOCKS_S
    end_s = math.inf if manifest.ended_s is None else manifest.epoch_unix_s + manifest.ended_s + CLOCKS_S
    seen: dict[int, list[LogLine]] = defaultdict(list)
    for path in log.files():
        for line in read_server_log(path, id_prefix=id_prefix(manifest), id_key=log.id_key, containing=log.containing):
            if line.at_unix_s is None or begin_s <= line.at_unix_s <= end_s:
                seen[line.id].append(line)
    return seen


def _check_answer(row: Row, line: LogLine, found: Findings) -> None:
    if line.complete is False:
        found.add("server-differs", row.id, f"{line.outcome} in the server's log, complete for the client")
    for name in COMPARED:
        told, got = getattr(line, name), getattr(row, name)
        if told not in (None, "") and got not in (None, "") and told != got:
            found.add("server-differs", row.id, f"{name} {told} in the server's log, {got} received")


def check_counters(run: Path, rows: Sequence[Row], planned: Mapping[int, ScheduledRequest], found: Findings) -> str:
    """Compare the increase of the counters with the rows; requests that the server may or may not count are the tolerance."""
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
            return f"not checked: {name} fell: the target was started again, a replica left, or several ingresses answer in turn"
        asked = [1] if name == "requests_ok" else [getattr(planned[row.id], name.replace("prompt", "input")) for row in sent]
        low, most = sum(told), max([*told, *asked])
        checked.append(f"{name} +{values[-1] - values[0]:.0f} (the rows say {low} to {low + num_unsure * most})")
        if not low <= values[-1] - values[0] <= low + num_unsure * most:
            found.add("counters", None, checked[-1])
    return "counters: " + (", ".join(checked) or "none of those needed")
