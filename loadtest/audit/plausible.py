"""These checks of the audit find rows that no run can have recorded: each needs a row and its line of the schedule. Pure."""

from collections.abc import Iterator
from itertools import pairwise

from loadtest.records import Row, ScheduledRequest

EARLY_S = 0.01
"""Largest time by which a timer may fire early: libev rounds to its loop's clock."""
ROUNDING_S = 5e-6
"""Tolerance: a row's times are rounded to the microsecond, and chunks to microseconds after ``sent_s``."""
_TIMES = ("sent_s", "connected_s", "headers_s", "first_s", "last_s", "end_s")


def implausible(row: Row, request: ScheduledRequest, *, timeout_s: float) -> Iterator[str]:
    """Yield the row's errors, a sentence each."""
    if request.due_s is not None and row.due_s != request.due_s:
        yield f"due at {row.due_s} s, by the schedule at {request.due_s} s"
    if row.sent_s is not None and row.sent_s < row.due_s - EARLY_S:
        yield f"sent {row.due_s - row.sent_s:.3f} s before it was due"
    times = [(name, value) for name in _TIMES if (value := getattr(row, name)) is not None]
    for (earlier, low), (later, high) in pairwise(times):
        if high < low - ROUNDING_S:
            yield f"{later} {high} is before {earlier} {low}"
    yield from _chunks(row)
    if row.state == "ok":
        yield from _answered(row, timeout_s)
    elif row.state == "never_sent" and (row.sent_s is not None or row.chunks or row.status):
        yield "never sent, but with a time of sending, chunks or a status"
    elif row.state in ("connect_error", "http_error") and (row.chunks or row.output_tokens):
        yield f"{row.state}, but with tokens"


def _chunks(row: Row) -> Iterator[str]:
    if not row.chunks or (sent_s := row.sent_s) is None:
        return
    ms = [at for at, _ in row.chunks]
    if any(later < earlier for earlier, later in pairwise(ms)):
        yield "chunks are not in the order of time"
    ends = (("first_s", row.first_s, ms[0]), ("last_s", row.last_s, ms[-1]))
    for name, at_s, after_ms in ends:
        if at_s is None or abs(sent_s + after_ms / 1e3 - at_s) > ROUNDING_S:
            yield f"{name} {at_s} does not fit the chunks, whose own is at {sent_s + after_ms / 1e3:.6f}"


def _answered(row: Row, timeout_s: float) -> Iterator[str]:
    if row.sent_s is None or row.end_s is None:
        yield "complete, without the times of sending and end"
    elif row.end_s - row.due_s > timeout_s + ROUNDING_S:
        yield f"complete after {row.end_s - row.due_s:.3f} s, the timeout was {timeout_s:g} s"
    if not 200 <= row.status < 300:
        yield f"complete, with status {row.status}"
    if not row.chunks and not row.output_tokens:
        yield "complete, without a token"
