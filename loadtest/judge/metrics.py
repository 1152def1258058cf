"""This module reads the requests of a run from its records and computes the latencies of each.

`read_records` reads a run's files and rewrites its rows.parquet. `Records.schedule` and `Records.rows` read their files when they are
first asked for, and `Records.chunks` reads rows.parquet each time.

A value is a pair of bounds, in seconds, which are equal if the value was measured. A failed request has no latency and counts as
infinite. A request that timed out took at least as long as it was observed, and perhaps forever, even if its first token came: for
its user it failed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from loadtest.errors import UsageError
from loadtest.judge.columns import Chunked, RowColumns, ScheduleColumns
from loadtest.judge.read_columns import read_columns, read_schedule_columns
from loadtest.judge.stats import Floats, quantile
from loadtest.plan.class_times import changes_s
from loadtest.plan.laws import Closed, Constant, Gamma, Poisson
from loadtest.plan.recorded import recorded_scenario
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import read_schedule
from loadtest.plan.slo import Limit
from loadtest.records import (
    PUT_BACK,
    Chunks,
    HealthSample,
    Manifest,
    Row,
    RunEvent,
    ScheduledRequest,
    ServerSample,
    read_lines,
    read_manifest,
    read_rows,
)
from loadtest.seal import broken_seals

METRICS = ("ttft", "tpot", "max_itl", "e2e", "send_ttft", "send_e2e", "lag")
"""Metrics with one value per request. ITL is not among them: each gap between tokens counts (`metric_bounds`)."""
WITHIN = ("tpot", "itl", "max_itl")
"""Metrics of the times between the tokens of one answer."""
FAILED = (math.inf, math.inf)

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One request of the window; ``row`` is None if the request has no row."""

    request: ScheduledRequest
    row: Row | None
    due_s: float


@dataclass(frozen=True)
class Records:
    """The records of a run's folder; its rows as `columns`, or one by one as `rows`."""

    run: Path
    manifest: Manifest
    scenario: Scenario
    requests: ScheduleColumns
    columns: RowColumns
    chunks: Callable[[], Iterator[Chunked]]
    """A function that yields the chunks of all rows, in the order of ``columns``, in batches; each call begins a new pass."""
    health: list[HealthSample]
    server: list[ServerSample]
    events: list[RunEvent]

    @cached_property
    def schedule(self) -> list[ScheduledRequest]:
        """Return the whole schedule in memory: 200 bytes per request."""
        return read_schedule(self.run / "schedule.jsonl").requests

    @cached_property
    def rows(self) -> list[Row]:
        """Return all rows in memory, with their chunks: 2 kB per row of 128 tokens."""
        return read_rows(self.run)

    @property
    def closed(self) -> bool:
        return isinstance(self.scenario.arrival, Closed)

    @property
    def even(self) -> bool:
        """Whether the offered load is constant, so that the run can be checked for steadiness."""
        scenario = self.scenario
        even_arrivals = isinstance(scenario.arrival, Constant | Poisson | Gamma | Closed)
        classes_change = any(scenario.warmup_s < at_s < scenario.duration_s for at_s in changes_s(scenario.requests))
        # Later turns of conversations come in addition to the rate, more and more of them.
        return even_arrivals and not classes_change and not scenario.has_conversations

    @cached_property
    def streams(self) -> dict[str, bool]:
        return {c.name: c.stream for c in self.scenario.requests}

    def owed_tokens(self, request: ScheduledRequest) -> int:
        """Return the expected output tokens of the request: its max_tokens, or the mean of its class if EOS may end the answer."""
        mean = self.mean_tokens.get(request.cls)
        return request.output_tokens if mean is None else min(request.output_tokens, mean)

    @cached_property
    def mean_tokens(self) -> dict[str, int]:
        """Return the mean output tokens of complete answers, for each class whose answers the model may end early."""
        rows, requests, means = self.columns, self.requests, {}
        early = {c.name for c in self.scenario.requests if not c.ignore_eos}
        of_request = dict(zip(requests.id.tolist(), requests.cls.tolist(), strict=True)) if early else {}
        which = np.array([of_request.get(number, -1) for number in rows.id.tolist()] if early else [], dtype=np.int64)
        for number, name in enumerate(requests.classes):
            if name in early and (counted := (which == number) & rows.is_state("ok")).any():
                means[name] = max(1, round(float(rows.num_output_tokens[counted].mean())))
        return means

    def items(self) -> list[Item]:
        """Return all requests with a due time, in its order; in a closed loop, the requests for which a client became free."""
        by_id = {row.id: row for row in self.rows}
        items = []
        for request in self.schedule:
            row = by_id.get(request.id)
            due_s = request.due_s if request.due_s is not None else row.due_s if row else None
            if due_s is not None:
                items.append(Item(request, row, due_s))
        return sorted(items, key=lambda item: item.due_s)


def read_records(run: Path) -> Records:
    """Read the folder of a run, finished, interrupted or crashed.

    Raises:
        UsageError: The folder holds no run, or a record cannot be read.
        OSError: As `read_columns`.
    """
    manifest = read_manifest(run)
    requests, sha256 = read_schedule_columns(run / "schedule.jsonl")
    changed = broken_seals(run, manifest)
    if sha256 != manifest.schedule_sha256:
        changed.append(f"schedule.jsonl has the hash {sha256[:8]}, the run had {manifest.schedule_sha256[:8]}")
    elif requests.id.size != manifest.num_scheduled:
        wrong = f"num_scheduled is {manifest.num_scheduled:,}, and schedule.jsonl has {requests.id.size:,} requests; {PUT_BACK}"
        raise UsageError(str(run / "manifest.json"), wrong)
    manifest = msgspec.structs.replace(manifest, problems=[*manifest.problems, *changed])
    scenario = recorded_scenario(run, manifest)
    columns, chunks = read_columns(run, scenario)
    return Records(
        run=run,
        manifest=manifest,
        scenario=scenario,
        requests=requests,
        columns=columns,
        chunks=chunks,
        health=_optional(run / "health.jsonl", HealthSample),
        server=_optional(run / "server.jsonl", ServerSample),
        events=_optional(run / "events.jsonl", RunEvent),
    )


def _optional(path: Path, kind: type[T]) -> list[T]:
    return list(read_lines(path, kind)) if path.exists() else []


def metric_bounds(records: Records, items: Sequence[Item], metric: str) -> tuple[Floats, Floats]:
    """Return the lower and upper bounds of the metric, in the order of the items; those without the metric are left out.

    For ``itl``, return each gap of each request. A failed or timed-out request adds an infinite gap for each token that it did not
    deliver (`Records.owed_tokens`), and at least one: a server that refuses half of its requests must not keep a limit of ITL.
    """
    if metric == "itl":
        gaps = np.concatenate([np.empty(0), *(_itl_s(records, item) for item in items)])
        return gaps, gaps
    bounds = [pair for item in items if (pair := item_bounds(records, item, metric)) is not None]
    low, high = np.array(bounds, dtype=np.float64).reshape(-1, 2).T
    return low, high


def _itl_s(records: Records, item: Item) -> Floats:
    if not _has_gaps(item.request, records.streams.get(item.request.cls, True)):
        return np.empty(0)
    seen = np.empty(0) if item.row is None else gaps_s(item.row)
    if item.row is not None and item.row.state in ("ok", "cancelled"):
        return seen
    num_owed = max(1, records.owed_tokens(item.request) - 1 - seen.size)
    return np.concatenate([seen, np.full(num_owed, math.inf)])


def _has_gaps(request: ScheduledRequest, stream: bool) -> bool:
    return stream and request.output_tokens > 1


def item_bounds(records: Records, item: Item, metric: str, *, q: float = 1.0) -> tuple[float, float] | None:
    """Return `bounds_s` of the item."""
    stream = records.streams.get(item.request.cls, True)
    return bounds_s(item.request, item.row, metric, q=q, closed=records.closed, stream=stream)


def is_good(request: ScheduledRequest, row: Row | None, limits: Sequence[Limit], *, closed: bool, stream: bool) -> bool:
    """Return whether the request was answered inside all limits; a limit of a metric that it does not have is kept.

    A request keeps a limit of ITL at p99, for example, if the p99 of its own gaps is inside.
    """
    if row is None or row.state != "ok":
        return False
    found = ((limit, bounds_s(request, row, limit.metric, q=limit.quantile, closed=closed, stream=stream)) for limit in limits)
    return all(bounds is None or bounds[1] <= limit.limit_s for limit, bounds in found)


def bounds_s(
    request: ScheduledRequest, row: Row | None, metric: str, *, closed: bool, stream: bool, q: float = 1.0
) -> tuple[float, float] | None:
    """Return the lower and upper bound of a request's metric, rounded to the nanosecond; None if it does not have the metric.

    These have no value: answers of one token and answers that are no stream (no tpot, itl, max_itl), and requests that the load
    generator cancelled (only lag and ttft). They are in no distribution of the metric, and they keep every limit of it.

    Args:
        row: None if there is no row; the request then counts as failed.
        metric: One of `METRICS`, or itl.
        closed: Latencies count from sending, because a closed loop has no due times.
        stream: Whether its class asks for a stream.
        q: For itl, the quantile of the request's own gaps.
    """
    if metric in WITHIN and not _has_gaps(request, stream):
        return None
    if row is None or row.sent_s is None:
        return FAILED
    found = _bounds_s(row, row.sent_s, metric, closed, q)
    # Differences of times late in a run end in floating-point noise, which ranks would show as a trend.
    return None if found is None else (round(found[0], 9), round(found[1], 9))


def _bounds_s(row: Row, sent_s: float, metric: str, closed: bool, q: float) -> tuple[float, float] | None:
    if metric == "lag":
        return sent_s - row.due_s, sent_s - row.due_s
    begin_s = sent_s if closed or metric.startswith("send_") else row.due_s
    if row.state == "ok":
        value = _measured_s(row, metric, begin_s, q)
        return None if value is None else (value, value)
    if row.state == "cancelled":
        return _until_cancelled_s(row, begin_s) if metric.endswith("ttft") else None
    if row.state == "timeout" and metric not in WITHIN and row.end_s is not None:
        return row.end_s - begin_s, math.inf
    return FAILED


def num_output_tokens(row: Row) -> int:
    """Return the output tokens by the server's usage, else as received."""
    return row.output_tokens if row.output_tokens is not None else sum(n for _, n in row.chunks)


def gaps_s(row: Row) -> Floats:
    """Return all gaps between tokens: 0 before a token that came in the same chunk as its predecessor.

    Inside a chunk the true gaps lie between 0 and the whole gap before the chunk: they are interval-censored, and not averaged.
    """
    if not row.chunks:
        return np.empty(0)
    chunks = row.chunks if isinstance(row.chunks, Chunks) else Chunks(row.chunks)
    times_ms, counts = np.frombuffer(chunks.ms), np.array(chunks.tokens, dtype=np.int64)
    gaps = np.zeros(int(counts.sum()))
    first_of_chunk = (counts.cumsum() - counts)[1:]
    inside = first_of_chunk < gaps.size
    # Added, not assigned: the time before a chunk without tokens belongs to the next token.
    np.add.at(gaps, first_of_chunk[inside], np.diff(times_ms)[inside] / 1000)
    return gaps[1:]


def _measured_s(row: Row, metric: str, begin_s: float, q: float) -> float | None:
    if metric.endswith("ttft"):
        return None if row.seen_s is None else row.seen_s - begin_s
    if metric.endswith("e2e"):
        return None if row.end_s is None else row.end_s - begin_s
    if metric in ("itl", "max_itl"):
        gaps = gaps_s(row)
        return quantile(gaps, 1.0 if metric == "max_itl" else q) if gaps.size else None
    # TPOT as in MLPerf and vLLM: (E2E - TTFT) / (tokens - 1), with the last token's time for E2E.
    num_later = num_output_tokens(row) - 1
    return (
        (row.last_s - row.first_s) / num_later if row.first_s is not None and row.last_s is not None and num_later > 0 else None
    )


def _until_cancelled_s(row: Row, begin_s: float) -> tuple[float, float]:
    if row.first_s is not None:
        return row.first_s - begin_s, row.first_s - begin_s
    return (row.end_s if row.end_s is not None else begin_s) - begin_s, math.inf
