"""The analysis turns a run's records into figures: window, distributions with intervals, throughput, SLO verdict, threats.

It reads a run's folder and rewrites its rows.parquet. Every request that was due in the window is in every distribution: failed requests
as infinite, timeouts as "at least so long". A run whose generator was sick has no figures at all.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loadtest.judge import stats
from loadtest.judge.columns import NONE, Bools
from loadtest.judge.cost import Cost, cost_of
from loadtest.judge.groups import classes_of, turns_of
from loadtest.judge.health import gates
from loadtest.judge.metrics import METRICS, Records, read_records
from loadtest.judge.series import InMemory, Series
from loadtest.judge.stats import QUANTILES, Floats
from loadtest.judge.summary import Distribution, Gate, LimitResult, Quantile, Summary, Throughput
from loadtest.judge.threats import NOT_ESTIMABLE, first_reason, silent_sources, threats
from loadtest.judge.window import Window
from loadtest.plan.laws import Burst, Closed, Trace
from loadtest.plan.slo import Limit
from loadtest.quantiles import Ordered

METHOD = "order statistics at n_eff"
MAX_DRIFT = 0.05
"""Largest change of latency or backlog over a steady window, as a share of the mean, whatever its significance."""
MIN_WINDOW_S = 1.0
MAX_LITTLE_GAP = 0.02
COUNTED = {
    "offered": "offered",
    "completed": "completed",
    "goodput": "goodput",
    "output_tokens": "completed",
    "total_tokens": "completed",
}
"""By rate of `rate_counts`: the rate that counts the same requests. Tokens are those of complete answers."""


def analyse(run: Path) -> Summary:
    """Return the figures of the run, computed from its records alone, so that they can be computed again at any time.

    Raises:
        UsageError: As `read_records`.
    """
    return summary_of(read_records(run))


def summary_of(records: Records) -> Summary:
    """Return the figures of a run whose records have been read."""
    items = Window.of(records)
    end_s = _end_s(records, items)
    items = items.between(-math.inf, end_s)
    cut_s = _cut_s(records, items)
    window = (cut_s, end_s)
    inside = items.between(cut_s, end_s)
    judged = gates(records.health, records.columns, records.requests, records.scenario, records.manifest)
    if all(gate.ok for gate in judged):
        return _valid(records, inside, window, judged)
    return Summary(
        scenario=records.scenario.name,
        verdict="invalid",
        loop=_loop(records),
        window_s=window,
        gates=judged,
        states=inside.states,
        schedule_sha256=records.manifest.schedule_sha256,
        warmup_cut_s=cut_s,
        threats=[
            "The run is invalid: " + "; ".join(gate.text for gate in judged if not gate.ok),
            *first_reason(inside),
            *silent_sources(records),
        ],
    )


def _valid(records: Records, items: Window, window: tuple[float, float], judged: list[Gate]) -> Summary:
    distributions, slo = _figures_of(records, items)
    rows = records.columns
    throughput = _throughput(records, items, window)
    num_reads = int(rows.num_chunks[items.rows].sum())
    summary = Summary(
        scenario=records.scenario.name,
        verdict=_verdict(slo, items.states.get("ok", 0), interrupted=records.manifest.state == "interrupted"),
        loop=_loop(records),
        window_s=window,
        gates=judged,
        states=items.states,
        schedule_sha256=records.manifest.schedule_sha256,
        slo=slo,
        throughput=throughput,
        cost=_cost(records, items, window),
        distributions=distributions,
        num_stalls=int(rows.num_stalls[items.rows].sum()),
        coalesced_share=int(rows.num_coalesced[items.rows].sum()) / num_reads if num_reads else 0.0,
        warmup_cut_s=window[0],
        steady=_steady(records, items, window),
        turns=turns_of(items),
        classes=classes_of(items),
        tokens=_tokens(items),
    )
    summary.threats.extend(threats(records, summary, items))
    return summary


def _loop(records: Records) -> Literal["open", "closed"]:
    return "closed" if records.closed else "open"


def _end_s(records: Records, items: Window) -> float:
    """Return the end of the window: the end of the arrivals, or the time of an interruption."""
    scenario, due_s = records.scenario, items.due_s
    ended_s = records.columns.end_s[~np.isnan(records.columns.end_s)]
    last_end_s = float(ended_s.max()) if ended_s.size else scenario.duration_s
    if isinstance(scenario.arrival, Burst):
        return last_end_s
    end_s = scenario.duration_s
    if isinstance(scenario.arrival, Closed | Trace):
        end_s = min(end_s, math.nextafter(float(due_s[-1]) if due_s.size else 0.0, math.inf))
        if end_s - (float(due_s[0]) if due_s.size else 0.0) < MIN_WINDOW_S:  # as good as a burst
            end_s = last_end_s if ended_s.size else end_s
    if records.manifest.state == "interrupted":
        stops = [event.t_s for event in records.events if event.kind == "interrupted"]
        stops += [records.manifest.ended_s] if records.manifest.ended_s is not None else []
        end_s = min([end_s, *stops])
    return end_s


def _cut_s(records: Records, items: Window) -> float:
    """Return the begin of the window: the end of the scenario's warm-up, or of a longer transient that the latencies show.

    A transient after the scenario's warm-up is left out only if it has no failed request and no injected fault, and keeps each limit
    of the SLO at its quantile. So a run that misses a limit still misses it.
    """
    scenario = records.scenario
    if isinstance(scenario.arrival, Burst):
        return 0.0
    cut_s = scenario.warmup_s
    for metric in ("e2e", "ttft") if records.even and not scenario.faults else ():
        bounds = items.bounds(metric)
        due_s, length = items.due_s[bounds.has], stats.transient_length(bounds.high)
        if not length:
            continue
        part = items.between(scenario.warmup_s, float(due_s[length]))
        answered = np.isfinite(bounds.high[:length][due_s[:length] >= scenario.warmup_s]).all()
        if answered and all(part.share_inside(limit) >= limit.quantile for limit in scenario.slo.limits):
            cut_s = max(cut_s, float(due_s[length]))
    return cut_s


def _figures_of(records: Records, items: Window) -> tuple[dict[str, Distribution], list[LimitResult]]:
    """Return the distribution of each metric that the requests have, also at the SLO's quantiles, and the result of each limit."""
    limits = records.scenario.slo.limits
    distributions, judged = {}, {}
    for metric in (*METRICS, "itl"):  # one after the other: a million requests are 25 MB in each
        series = items.series(metric)
        own = [limit for limit in limits if limit.metric == metric]
        judged.update({limit: limit_result(limit, series) for limit in own})
        if series.size:
            distributions[metric] = _distribution(metric, series, {limit.quantile for limit in own})
    return distributions, [judged[limit] for limit in limits]


def distribution(metric: str, low: Floats, high: Floats, *, also: Collection[float] = ()) -> Distribution:
    """Return percentiles with intervals of latencies that are known between bounds; both bounds are in the order of due times.

    Args:
        also: Quantiles in addition to those of every distribution.
    """
    return _distribution(metric, InMemory(low, high), also)


def _distribution(metric: str, series: Series, also: Collection[float]) -> Distribution:
    n_eff = {q: series.worth(q) for q in sorted({*QUANTILES, *also})}
    return Distribution(
        metric=metric,
        n=series.size,
        num_failed=series.num_failed,
        n_eff=round(n_eff[0.99], 1),
        method=METHOD if series.resolved else NOT_ESTIMABLE,
        num_left=series.num_left,
        mean_s=None if series.num_failed or series.num_left else series.mean_answered_s,
        mean_answered_s=series.mean_answered_s,
        quantiles=[_quantile(series.low, series.high, q, size, series.resolved) for q, size in n_eff.items()],
    )


def _quantile(low: Ordered, high: Ordered, q: float, n_eff: float, resolved: bool) -> Quantile:
    """Return the quantile of sorted bounds, with its interval."""
    has_upper = stats.order_ranks(int(min(n_eff, low.size)), q)[1] is not None
    k = stats.rank(low.size, q) - 1
    at_least, at_most = float(low[k]), float(high[k])
    known = at_least == at_most and math.isfinite(at_most)
    lower, upper = stats.order_interval(low, high, q, n_eff)
    return Quantile(
        q=q,
        value_s=at_most if known else None,
        low_s=lower if resolved and math.isfinite(lower) else None,
        high_s=upper if resolved and math.isfinite(upper) else None,
        censored_s=None if known or at_least == math.inf else at_least,
        failed=at_least == math.inf,
        high_failed=resolved and has_upper and upper == math.inf,
    )


def limit_result(limit: Limit, series: Series) -> LimitResult:
    """Judge one limit over all requests (for itl: gaps) that have the metric. A pass needs a run that is long enough to show slow swings.

    Requests that the load generator cancelled before the limit may be inside or over it. The limit passes only if it would with all of
    them over, and is missed only if it would be with none of them over.
    """
    if not series.size:
        return LimitResult(str(limit), "undecided", 0.0, 0.0, 1.0, 0.0)
    inside, unknown = series.attained(limit.limit_s), series.unknown(limit.limit_s)
    n_eff = series.worth(limit.quantile, limit.limit_s)
    lower, _ = stats.share_interval(inside, n_eff)
    _, upper = stats.share_interval(inside + unknown, n_eff)
    verdict: Literal["pass", "fail", "undecided"] = "undecided"
    if upper < limit.quantile:
        verdict = "fail"
    elif lower >= limit.quantile and series.resolved:
        verdict = "pass"
    attained = inside / (1 - unknown) if unknown < 1 else 0.0
    return LimitResult(str(limit), verdict, attained, lower, upper, n_eff, unknown)


def _verdict(slo: Sequence[LimitResult], num_ok: int, *, interrupted: bool) -> Literal["pass", "slo-missed", "undecided"]:
    """Return the verdict of the run. A run without a complete answer does not pass, even without limits, nor does an interrupted run."""
    verdicts = {result.verdict for result in slo}
    if "fail" in verdicts:
        return "slo-missed"
    return "undecided" if "undecided" in verdicts or not num_ok or interrupted else "pass"


def _throughput(records: Records, items: Window, window: tuple[float, float]) -> Throughput | None:
    """Return the rates of the window: offered and goodput count due requests, the others ended requests. None: the window is empty.

    A rate that counts fewer than `stats.MIN_COUNTED` requests has no interval.
    """
    length_s = window[1] - window[0]
    if length_s <= 0:
        return None
    counts = rate_counts(records, items, window)
    rates = {name: float(batches.sum()) / length_s for name, batches in counts.items()}
    intervals = {name: stats.rate_interval(batches, length_s) for name, batches in counts.items() if has_interval(counts, name)}
    return Throughput(**rates, intervals=intervals)


def _cost(records: Records, items: Window, window: tuple[float, float]) -> Cost | None:
    """Return the cost. If several sources report replicas, only Kubernetes counts: its pods contain Ray Serve's replicas."""
    if window[1] <= window[0]:
        return None
    rows, is_ok = records.columns, records.columns.is_state("ok")
    done = items.rows[is_ok[items.rows]] if records.scenario.slo.limits else _ended_ok(records, window)
    pods = [sample for sample in records.server if sample.source == "kubernetes" and not sample.error]
    return cost_of(
        pods or records.server,
        window,
        good_at_s=_good_at_s(records, items, window),
        output_tokens=float(rows.num_output_tokens[done].sum()),
        gpus_per_replica=records.scenario.observe.gpus_per_replica,
    )


def rate_counts(records: Records, items: Window, window: tuple[float, float]) -> dict[str, Floats]:
    """Return the counts of each rate in each of `stats.NUM_BATCHES` equal parts of the window.

    ``total_tokens`` is left out if an answer does not report the tokens of its prompt.
    """
    rows, done = records.columns, _ended_ok(records, window)
    ended_s, output, prompt = rows.end_s[done], rows.num_output_tokens[done], rows.prompt_tokens[done]
    edges = np.linspace(*window, stats.NUM_BATCHES + 1)

    def count(at_s: Floats, weights: npt.NDArray[Any] | None = None) -> Floats:
        return np.histogram(at_s, bins=edges, weights=weights)[0].astype(np.float64)

    counts = {
        "offered": count(items.due_s),
        "completed": count(ended_s),
        "goodput": count(_good_at_s(records, items, window)),
        "output_tokens": count(ended_s, output),
    }
    return counts if (prompt == NONE).any() else counts | {"total_tokens": count(ended_s, output + prompt)}


def _ended_ok(records: Records, window: tuple[float, float]) -> Bools:
    """Return which rows are complete answers that ended in the window."""
    rows = records.columns
    return rows.is_state("ok") & (rows.end_s >= window[0]) & (rows.end_s <= window[1])


def _good_at_s(records: Records, items: Window, window: tuple[float, float]) -> Floats:
    """Return the time at which each good request counts: its due time or, without limits (all complete answers are good), its end."""
    limits = records.scenario.slo.limits
    return items.due_s[items.good(limits)] if limits else records.columns.end_s[_ended_ok(records, window)]


def has_interval(counts: Mapping[str, Floats], rate: str) -> bool:
    """Return whether at least `stats.MIN_COUNTED` requests were counted for the rate."""
    return float(counts[COUNTED[rate]].sum()) >= stats.MIN_COUNTED


def _tokens(items: Window) -> dict[str, int]:
    """Count the output tokens of answered requests in three ways; ``disagree`` is the number of rows where two counts differ."""
    rows = items.records.columns
    ok = items.rows[rows.is_state("ok")[items.rows]]
    ways = np.stack(
        [rows.output_tokens[ok], np.where(rows.chunk_tokens[ok] > 0, rows.chunk_tokens[ok], NONE), rows.retokenized[ok]]
    )
    most = ways.max(axis=0)
    return {
        "usage": int(np.maximum(ways[0], 0).sum()),
        "chunks": int(rows.chunk_tokens[ok].sum()),
        "tokenizer": int(np.maximum(ways[2], 0).sum()),
        "disagree": int(((ways != NONE) & (ways != most)).any(axis=0).sum()),
    }


def _steady(records: Records, items: Window, window: tuple[float, float]) -> bool | None:
    """Return whether backlog and latency stayed level; None if that is not decidable: too few requests, too short, uneven by design."""
    rows = records.columns
    there = items.row >= 0
    there[there] = ~np.isnan(rows.end_s[items.row[there]])
    due, index = items.due_s[there], items.row[there]
    if not records.even or due.size < 100:
        return None
    end, sent = rows.end_s[index], rows.sent_s[index]
    begin = np.where(np.isnan(sent), due, sent) if records.closed else due
    length_s, took_s = window[1] - window[0], float((end - begin).mean())
    if length_s < 5 * took_s:
        return None
    in_flight = np.arange(due.size) - np.searchsorted(np.sort(end), due)
    level = all(_level(due, series) for series in (in_flight.astype(np.float64), end - begin))
    if records.closed:
        return level
    ended = ~np.isnan(rows.end_s)
    # The requests in flight at both edges differ by chance, and the more so the longer a request takes compared with the window.
    return level and abs(stats.little_gap(rows.due_s[ended], rows.end_s[ended], window)) < max(MAX_LITTLE_GAP, took_s / length_s)


def _level(at_s: Floats, series: Floats) -> bool:
    low, high = stats.drift_interval(at_s, series)
    return low <= 0 <= high or abs(low + high) / 2 < MAX_DRIFT * float(series.mean())
