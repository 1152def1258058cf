"""The tiles show the figures that a reader wants first: latency, throughput, failures, and the time of the run."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from loadtest.judge.cost import Cost
from loadtest.judge.summary import Quantile, Summary, Throughput, interval
from loadtest.records import Manifest
from loadtest.wording import percentile, share

QUANTILES = (0.5, 0.95)
LATENCIES = {"ttft": "TTFT", "e2e": "E2E"}
ANSWERED = ("ok", "cancelled")


class TileLine(NamedTuple):
    """One figure of a tile."""

    name: str
    value: str
    note: str
    """The 95 % interval of the value, or its unit or context."""


class Tile(NamedTuple):
    label: str
    lines: list[TileLine]


def tiles(summary: Summary, manifest: Manifest) -> list[Tile]:
    """Return the tiles of a run; for an invalid run only the date, because its figures are meaningless."""
    figures = list(_figures(summary)) if summary.verdict != "invalid" else []
    return [*figures, _date(summary, manifest)]


def _figures(summary: Summary) -> Iterator[Tile]:
    for metric, label in LATENCIES.items():
        distribution = summary.distributions.get(metric)
        found = [(q, at) for q in QUANTILES if distribution and (at := distribution.at(q))]
        if found:
            yield Tile(label, [_latency(q, at) for q, at in found])
    if done := summary.throughput:
        yield Tile("requests/s", [_rate("completed", done, "completed"), _rate("offered", done, "offered")])
        with_prompts = [] if done.total_tokens is None else [_rate("with prompts", done, "total_tokens")]
        yield Tile("tokens/s", [_rate("output", done, "output_tokens"), *with_prompts])
    if summary.cost and (lines := list(cost_lines(summary.cost))):
        yield Tile("cost", lines)
    if num := sum(summary.states.values()):
        num_failed = num - sum(summary.states.get(state, 0) for state in ANSWERED)
        yield Tile("errors", [TileLine("", share(num_failed / num), f"{num_failed:,} of {num:,} requests")])


def cost_lines(cost: Cost) -> Iterator[TileLine]:
    """Yield the known figures of a window's cost."""
    if cost.tokens_per_good is not None:
        yield TileLine("", _short(cost.tokens_per_good), "output tokens per good request")
    if cost.replica_s is not None:
        yield TileLine("", _short(cost.replica_s), f"replica-seconds in {cost.seen_s:,.0f} s")
    if cost.replica_s_per_good is not None:
        yield TileLine("", _short(cost.replica_s_per_good), "replica-seconds per good request")
    if cost.gpu_s is not None:
        yield TileLine("", _short(cost.gpu_s), f"GPU-seconds in {cost.seen_s:,.0f} s")
    if cost.gpu_s_per_good is not None:
        yield TileLine("", _short(cost.gpu_s_per_good), "GPU-seconds per good request")


def _latency(q: float, at: Quantile) -> TileLine:
    value, _, bounds = interval(at).partition(" [")
    return TileLine(percentile(q), value, f"[{bounds}" if bounds else "")


def _rate(name: str, done: Throughput, field: str) -> TileLine:
    bounds = done.intervals.get(field)
    note = "" if bounds is None or field == "offered" else f"[{_short(bounds[0])}, {_short(bounds[1])}]"
    return TileLine(name, _short(getattr(done, field)), note)


def _short(rate: float) -> str:
    """Return the rate with three digits, or with all digits before the point."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _date(summary: Summary, manifest: Manifest) -> Tile:
    start, end = summary.window_s
    lasted = f"{max(0.0, end - start):,.0f} s measured"
    if not manifest.epoch_unix_s:
        return Tile("date", [TileLine("", "never began", lasted)])
    began = datetime.fromtimestamp(manifest.epoch_unix_s, UTC)
    return Tile("date", [TileLine("", f"{began:%Y-%m-%d}", f"{began:%H:%M} UTC, {lasted}")])
