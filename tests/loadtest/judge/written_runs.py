"""This module makes runs whose rows are written by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.judge.summary import Quantile, Summary
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import Schedule
from loadtest.records import HealthSample, Manifest, Row, ScheduledRequest

Change = Callable[[Row], Row | None]


def answered(request: ScheduledRequest, due_s: float, took_s: float = 1.0, *, slower: float = 1.0) -> Row:
    """First token after ``took_s``, three more tokens in two chunks, 100 and 300 ms later each; all times ``slower``."""
    sent = due_s + 0.001
    first_s, last_s, end_s = (due_s + slower * (took_s + more_s) for more_s in (0.0, 0.4, 0.5))
    first_ms = slower * took_s * 1000 - 1  # from sending
    return Row(
        id=request.id, worker=0, due_s=due_s, state="ok", sent_s=sent, first_s=first_s, last_s=last_s, end_s=end_s, status=200,
        chunks=[(first_ms, 1), (first_ms + slower * 100, 1), (first_ms + slower * 400, 2)],
        prompt_tokens=10, output_tokens=4,
    )  # fmt: skip


def ended(row: Row, state: Any, end_s: float) -> Row:
    """The same request without an answer."""
    return Row(id=row.id, worker=0, due_s=row.due_s, state=state, reason="as asked", sent_s=row.sent_s, end_s=end_s)


def every_fourth(num: int) -> Change:
    """Return the change by which every fourth request is answered until ``num`` are, and no other."""
    return lambda row: row if row.id % 4 == 0 and row.id < 4 * num else ended(row, "http_error", row.due_s)


def lasting(took_s: Sequence[float]) -> Change:
    """Return the change by which the first token of request i takes ``took_s[i]``."""
    return lambda row: answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, took_s[row.id])


def slow_at_first(row: Row) -> Row:
    """A change: first tokens of requests due in the first 20 s take 4 s."""
    return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, 4.0 if row.due_s < 20 else 1.0)


def write_run(
    folder: Path,
    num: int,
    change: Change = lambda row: row,
    *,
    manifest: dict[str, Any] | None = None,
    session: str = "",
    **scenario: Any,
) -> Path:
    """Write a run of ten requests a second; ``change`` makes each row what it shall be, or None for no row."""
    values = {"name": "by-hand", "arrival": {"law": "constant", "rate": 10}, "duration_s": num / 10, "warmup_s": 0, **scenario}
    closed = values["arrival"]["law"] == "closed"
    due = [k / 10 for k in range(num)]
    schedule = [ScheduledRequest(k, None if closed else at, "default", 10, 4, session) for k, at in enumerate(due)]
    rows = [row for request, at in zip(schedule, due, strict=True) if (row := change(answered(request, at))) is not None]
    write_records(folder, schedule, rows, values, {"ended_s": num / 10 + 1} | (manifest or {}))
    return folder


def write_conversations(
    folder: Path,
    took_s: Sequence[float],
    *,
    slower: float = 1.0,
    fails: Callable[[int], bool] = lambda number: False,
    **scenario: Any,
) -> Path:
    """Write conversations of three turns, ten a second. The user thinks for a second, and leaves where an answer fails.

    Args:
        took_s: Of request k until its first token, in a run whose answers are not ``slower``.
        fails: Whether request k is refused at once.
    """
    num = len(took_s) // 3
    conversation = {"turns": {"mean": 3}, "think_s": {"mean": 1}}
    cls = {"endpoint": "chat", "prompt": "text", "conversation": conversation}
    values = {"name": "by-hand", "arrival": {"law": "constant", "rate": 10}, "duration_s": num / 10, "warmup_s": 0, **scenario}
    values |= {"requests": [cls]}
    schedule, rows, due_s = [], [], 0.0
    for number in range(3 * num):
        first = number % 3 == 0
        due_s = number / 30 if first else due_s
        failed = fails(number)
        after = None if first else number - 1
        request = ScheduledRequest(number, due_s if first else None, "default", 10, 4, f"s{number // 3}", after=after)
        row = answered(request, due_s, took_s[number], slower=slower)
        unsent = Row(number, 0, due_s, "never_sent", reason="due after the end of the arrivals")
        schedule.append(request)
        rows.append(unsent if due_s >= num / 10 else ended(row, "http_error", due_s + 0.002) if failed else row)
        due_s = num / 10 if failed else due_s + slower * (took_s[number] + 0.5) + 1
    write_records(folder, schedule, rows, values, {"ended_s": num / 10 + 1})
    return folder


def write_records(
    folder: Path, schedule: list[ScheduledRequest], rows: list[Row], scenario: dict[str, Any], manifest: dict[str, Any]
) -> None:
    """Write the folder of a run whose generator was well."""
    health = [HealthSample(float(t), 0, 0.1, 0.001, 0.0, 0, 0, 0) for t in range(int(scenario["duration_s"]) + 200)]
    fields: dict[str, Any] = {"state": "finished", "model": ""} | manifest
    fields = {"schedule_sha256": Schedule(schedule).sha256} | fields
    ran = Manifest(
        scenario=parse_scenario(scenario).model_dump(mode="json"), num_scheduled=len(schedule), target="",
        epoch_unix_s=0.0, command=[], **fields,
    )  # fmt: skip
    folder.mkdir()
    (folder / "manifest.json").write_bytes(msgspec.json.encode(ran))
    for name, lines in (("schedule", schedule), ("rows", rows), ("health", health)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def quantile(summary: Summary, metric: str, q: float) -> Quantile:
    return next(found for found in summary.distributions[metric].quantiles if found.q == q)
