"""The requests of a run and the latencies of each, from its records. Only `read_records` does IO.

A value is a pair of bounds, in seconds. They are equal where it was measured. A request that ended otherwise than asked has no
latency and counts as infinite; one that timed out took at least as long as it was watched, and perhaps forever, even if its first
token came: to its user it failed.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from loadtest.records import HealthSample, Manifest, Row, RunEvent, ScheduledRequest, read_lines, read_manifest
from loadtest.scenario import Closed, Constant, Gamma, Poisson, Scenario, parse_scenario
from loadtest.stats import Floats

METRICS = ("ttft", "tpot", "itl", "e2e", "send_ttft", "send_e2e", "lag")
FAILED = (math.inf, math.inf)

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One request of the window; ``row`` None: it has none."""

    request: ScheduledRequest
    row: Row | None
    due_s: float


@dataclass(frozen=True)
class Records:
    """A run's folder, read."""

    manifest: Manifest
    scenario: Scenario
    schedule: list[ScheduledRequest]
    rows: list[Row]
    health: list[HealthSample]
    events: list[RunEvent]

    @property
    def closed(self) -> bool:
        return isinstance(self.scenario.arrival, Closed)

    @property
    def even(self) -> bool:
        """Whether the offered load is the same all the time, so that steadiness can be asked for."""
        return isinstance(self.scenario.arrival, Constant | Poisson | Gamma | Closed)

    @cached_property
    def streams(self) -> dict[str, bool]:
        return {c.name: c.stream for c in self.scenario.requests}

    def items(self) -> list[Item]:
        """Return all requests with a due time, in its order. In a closed loop those that a client became free for."""
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
        UsageError: It holds no run, or a record cannot be read.
    """
    manifest = read_manifest(run)
    return Records(
        manifest=manifest,
        scenario=parse_scenario(manifest.scenario),
        schedule=list(read_lines(run / "schedule.jsonl", ScheduledRequest)),
        rows=_optional(run / "rows.jsonl", Row),
        health=_optional(run / "health.jsonl", HealthSample),
        events=_optional(run / "events.jsonl", RunEvent),
    )


def _optional(path: Path, kind: type[T]) -> list[T]:
    return list(read_lines(path, kind)) if path.exists() else []


def value_s(request: ScheduledRequest, row: Row | None, metric: str, *, closed: bool, stream: bool) -> float | None:
    """Return the upper of `bounds_s`: infinite unless measured."""
    bounds = bounds_s(request, row, metric, closed=closed, stream=stream)
    return None if bounds is None else bounds[1]


def bounds_s(
    request: ScheduledRequest, row: Row | None, metric: str, *, closed: bool, stream: bool
) -> tuple[float, float] | None:
    """Return at least and at most how long it took, or None: such a request has no such metric. To the nanosecond.

    Without the metric are: answers of one token (tpot, itl), answers that are no stream (tpot, itl), and requests that we left on
    purpose (all but lag and ttft).

    Args:
        row: None: nothing is known of the request, which counts as failed.
        metric: One of `METRICS`.
        closed: Latencies count from sending, for a closed loop has no due time.
        stream: Whether its class asks for a stream.
    """
    if metric in ("tpot", "itl") and (not stream or request.output_tokens < 2):
        return None
    if row is None or row.sent_s is None:
        return FAILED
    found = _bounds_s(row, row.sent_s, metric, closed)
    # Differences of times late in a run end in noise of the floating point, which ranks would take for a trend.
    return None if found is None else (round(found[0], 9), round(found[1], 9))


def _bounds_s(row: Row, sent_s: float, metric: str, closed: bool) -> tuple[float, float] | None:
    if metric == "lag":
        return sent_s - row.due_s, sent_s - row.due_s
    begin_s = sent_s if closed or metric.startswith("send_") else row.due_s
    if row.state == "ok":
        value = _measured_s(row, metric, begin_s)
        return None if value is None else (value, value)
    if row.state == "cancelled":
        return _until_cancelled_s(row, begin_s) if metric.endswith("ttft") else None
    if row.state == "timeout" and metric not in ("tpot", "itl") and row.end_s is not None:
        return row.end_s - begin_s, math.inf
    return FAILED


def num_output_tokens(row: Row) -> int:
    """Return the tokens by the server's usage, else as received."""
    return row.output_tokens if row.output_tokens is not None else sum(n for _, n in row.chunks)


def gaps_s(row: Row) -> Floats:
    """Return all gaps between tokens: 0 before a token that came in one chunk with the one before it.

    Inside a chunk the truth lies between 0 and the whole gap before it: it is censored by the interval, and not smeared over it.
    """
    if not row.chunks:
        return np.empty(0)
    times_ms, counts = np.array(row.chunks).T
    gaps = np.zeros(int(counts.sum()))
    first_of_chunk = (counts.cumsum() - counts).astype(np.int64)[1:]
    gaps[first_of_chunk[first_of_chunk < gaps.size]] = np.diff(times_ms)[first_of_chunk < gaps.size] / 1000
    return gaps[1:]


def _measured_s(row: Row, metric: str, begin_s: float) -> float | None:
    if metric.endswith("ttft"):
        # An answer that is no stream shows nothing before its end.
        seen_s = row.first_s if row.first_s is not None else row.end_s
        return None if seen_s is None else seen_s - begin_s
    if metric.endswith("e2e"):
        return None if row.end_s is None else row.end_s - begin_s
    if metric == "itl":
        gaps = gaps_s(row)
        return float(gaps.max()) if gaps.size else None
    if row.first_s is None or row.last_s is None or not row.chunks:
        return None
    num_later = num_output_tokens(row) - row.chunks[0][1]
    return (row.last_s - row.first_s) / num_later if num_later > 0 else None


def _until_cancelled_s(row: Row, begin_s: float) -> tuple[float, float]:
    if row.first_s is not None:
        return row.first_s - begin_s, row.first_s - begin_s
    return (row.end_s if row.end_s is not None else begin_s) - begin_s, math.inf
