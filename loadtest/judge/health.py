"""The gates decide if the generator was healthy enough for its numbers to count, by `loadtest.control.monitor`'s samples. Pure.

A gate that is not ok makes the run invalid: it has no headline numbers.

The limits and their reasons
- Every latency counts from the due time to the read of the answer. So a request that is sent late and an answer that is read late make
  the target look worse, never better; and late requests are not the planned arrivals. Both delays may be 5 % of the *median* TTFT from
  sending at their p50, and 10 % of it at their p99. A starved generator inflates its own p99 of the TTFT tenfold before the median
  moves, so a limit based on the p99 would rise with the starvation. The floor is 3 and 10 ms, which timers of a healthy machine keep;
  the ceiling is 20 and 100 ms for any target, so that a risen median does not raise the limits further.
  (The method's max(2 ms, 1 % of the median) fails on any machine that the target shares: gevent has a lag p99 of 5-50 ms there.)
- Read delays are measured on a timer that becomes readable every 10 ms, as a socket does; they stand for the delays of answers. They
  are weighted by time: reads that come in bunches wait longer than that, because of their own bunch.
- One stop of the event loop may last 0.25 s: a longer one distorts the percentiles of a whole second of arrivals. A burst has no such
  limits below `BURST_LAG_S`: a thousand requests that are due at once are sent one after the other.
- 85 % CPU: above it, a queue forms inside the generator. 50 ms of garbage collection in a second: more is a stall of the generator.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.judge.columns import Bools, RowColumns, ScheduleColumns
from loadtest.judge.summary import Gate
from loadtest.plan.laws import Burst, Closed
from loadtest.plan.scenario import Scenario
from loadtest.quantiles import quantile
from loadtest.records import HealthSample, Manifest
from loadtest.wording import MAX_PROBLEM, percentile, shown

TICK_S = 0.010
"""Interval at which a worker measures how late it reads."""
LATE_FLOOR_S = {0.5: 0.003, 0.99: 0.010}
LATE_SHARE = {0.5: 0.05, 0.99: 0.10}
"""Allowed lateness at each quantile, as a share of the median TTFT."""
LATE_CEILING_S = {0.5: 0.020, 0.99: 0.100}
STALL_S = 0.250
BURST_LAG_S = 2.0
CPU_SHARE = 0.85
GC_S = 0.050
HOLE_S = 3.0
"""Longest allowed time between two samples of a worker; it sends a sample each second until its share is done."""
STOPPED = "the run was interrupted"
"""`Row.reason` of requests that were not sent because of an interruption."""
GAP_SPAN_S = 0.1
"""Delivered arrivals are compared over the number of arrivals that span this time, at which a server notices a burst."""


def gates(
    samples: Sequence[HealthSample],
    rows: RowColumns,
    requests: ScheduleColumns,
    scenario: Scenario,
    manifest: Manifest,
) -> list[Gate]:
    """Return all gates of one run's generator, also those that are ok. Times of the warm-up do not count."""
    measured = [s for s in samples if s.t_s >= _start_s(scenario)] or list(samples)
    sent = rows.is_sent & (rows.due_s >= _start_s(scenario))
    return [
        _complete(manifest),
        _accounted(rows, requests, manifest),
        _sent(rows, scenario, manifest),
        *(_lag(rows, sent, scenario, q) for q in LATE_FLOOR_S),
        *(_read_lag(measured, late_limit_s(rows, sent, scenario, q), q) for q in LATE_FLOOR_S),
        _stalls(measured, scenario),
        _cpu(measured),
        _gc(measured),
        _throttling(measured),
        _samples_there(samples, rows),
        _arrivals(rows, sent, scenario),
    ]


def _start_s(scenario: Scenario) -> float:
    return 0.0 if isinstance(scenario.arrival, Burst) else scenario.warmup_s


def _complete(manifest: Manifest) -> Gate:
    """Judge the problems that only the running generator can see: lost workers, lost records, a full disk."""
    problems = [shown(problem, MAX_PROBLEM) for problem in manifest.problems]
    if manifest.state == "running":
        problems.append("the generator ended without saying how")
    text = "; ".join(problems) or f"all worker processes ({manifest.workers}) were there from start to end"
    return Gate("generator complete", not problems, len(problems), 0, text)


def _accounted(rows: RowColumns, requests: ScheduleColumns, manifest: Manifest) -> Gate:
    """Check that each request that had to be sent has one row. After an interruption, only requests due before it had to be sent."""
    ended_s = manifest.ended_s if manifest.state == "interrupted" else math.inf
    until_s = math.inf if ended_s is None else ended_s
    ids, times = np.unique(rows.id, return_counts=True)
    asked = requests.id if until_s == math.inf else requests.id[requests.due_s < until_s]
    missing, unknown = int(np.setdiff1d(asked, ids).size), int(np.setdiff1d(ids, requests.id).size)
    double = int((times - 1).sum())
    text = f"{missing} of {asked.size} scheduled requests without a row, {double} with several, {unknown} rows of unknown ids"
    return Gate("every request accounted for", not missing + double + unknown, missing + double + unknown, 0, text)


def _sent(rows: RowColumns, scenario: Scenario, manifest: Manifest) -> Gate:
    """Check that no request was held back that the target should have received.

    The rest of an interrupted run, of a closed loop's list, and of conversations that ended early is excused.
    """
    until_s = scenario.duration_s if isinstance(scenario.arrival, Closed) or scenario.has_conversations else math.inf
    unsent = rows.is_state("never_sent") & (rows.due_s >= _start_s(scenario)) & (rows.due_s < until_s)
    if manifest.state == "interrupted":
        unsent &= ~rows.has_reason(STOPPED)
    num = int(unsent.sum())
    text = f"{num} requests that were due in the window were never sent"
    text += f", the first because: {rows.reasons[rows.reason[unsent][0]]}" if num else ""
    return Gate("every request sent", not num, num, 0, text)


def late_limit_s(rows: RowColumns, sent: Bools, scenario: Scenario, q: float) -> float:
    """Return the allowed delay of sending a request, or of reading an answer, at this quantile."""
    if isinstance(scenario.arrival, Burst):
        return BURST_LAG_S
    first = (rows.seen_s - rows.sent_s)[sent & rows.is_state("ok")]
    first = first[~np.isnan(first)]
    share_s = LATE_SHARE[q] * quantile(first, 0.5) if first.size else 0.0
    return min(LATE_CEILING_S[q], max(LATE_FLOOR_S[q], share_s))


def _lag(rows: RowColumns, sent: Bools, scenario: Scenario, q: float) -> Gate:
    limit_s = late_limit_s(rows, sent, scenario, q)
    lags = (rows.sent_s - rows.due_s)[sent]
    value = quantile(lags, q) if lags.size else 0.0
    text = f"{q:.0%} of {lags.size} requests left within {value * 1e3:.1f} ms of their due time, limit {limit_s * 1e3:.1f} ms"
    advice = _advice(value <= limit_s, "add workers, or give them cores of their own")
    return Gate(f"lag {percentile(q)}", value <= limit_s, value, limit_s, text + advice)


def read_lag_name(q: float) -> str:
    return f"read lag {percentile(q)}"


def _read_lag(samples: Sequence[HealthSample], limit_s: float, q: float) -> Gate:
    """Judge the read delays of the worst worker: a reader that is late adds its delay to every time that it records."""
    by_worker = _by_worker(samples)
    late_ms = [np.concatenate([s.read_late_ms for s in seen]) for seen in by_worker.values()]
    if not any(late.size for late in late_ms):
        return Gate(read_lag_name(q), True, None, limit_s, "not judged: these records do not have how late answers were read")
    value = max(quantile(late, q) for late in late_ms if late.size) / 1e3
    text = f"{q:.0%} of what became readable was read within {value * 1e3:.1f} ms, limit {limit_s * 1e3:.1f} ms"
    advice = _advice(value <= limit_s, "add workers, or give them cores of their own")
    return Gate(read_lag_name(q), value <= limit_s, value, limit_s, text + advice)


def _by_worker(samples: Sequence[HealthSample]) -> dict[int, list[HealthSample]]:
    found: dict[int, list[HealthSample]] = {}
    for sample in samples:
        found.setdefault(sample.worker, []).append(sample)
    return found


def _stalls(samples: Sequence[HealthSample], scenario: Scenario) -> Gate:
    limit_s = BURST_LAG_S if isinstance(scenario.arrival, Burst) else STALL_S
    worst = max(samples, key=lambda s: s.lag_max_s, default=None)
    value = worst.lag_max_s if worst else 0.0
    where = f" (worker {worst.worker} before {worst.t_s:.0f} s)" if worst else ""
    text = f"the event loop's longest stop was {value * 1e3:.0f} ms{where}, limit {limit_s * 1e3:.0f} ms"
    return Gate(
        "loop stalls", value < limit_s, value, limit_s, text + _advice(value < limit_s, "keep other work off the machine")
    )


def _cpu(samples: Sequence[HealthSample]) -> Gate:
    value = max((quantile(np.array([s.cpu for s in seen]), 0.95) for seen in _by_worker(samples).values()), default=0.0)
    text = f"the busiest worker used {value:.0%} of a core at its p95, limit {CPU_SHARE:.0%}"
    return Gate("CPU p95", value < CPU_SHARE, value, CPU_SHARE, text + _advice(value < CPU_SHARE, "add workers"))


def _gc(samples: Sequence[HealthSample]) -> Gate:
    value = max((s.gc_s for s in samples), default=0.0)
    text = f"at most {value * 1e3:.0f} ms of garbage collection in a second, limit {GC_S * 1e3:.0f} ms"
    return Gate("garbage collection", value <= GC_S, value, GC_S, text)


def _throttling(samples: Sequence[HealthSample]) -> Gate:
    counts = [[s.throttled for s in seen] for seen in _by_worker(samples).values()]
    value = max((max(seen) - min(seen) for seen in counts), default=0)
    text = f"the cgroup was throttled in {value} periods" + _advice(not value, "raise the CPU limit")
    return Gate("CPU throttling", not value, value, 0, text)


def _samples_there(samples: Sequence[HealthSample], rows: RowColumns) -> Gate:
    """Judge the longest gap between a worker's samples, from 0 to its last sent request: a stopped worker sends no samples.

    A worker that is done sends no more samples either. `_complete` judges a worker that was lost without a row.
    """
    workers = np.unique(rows.worker[rows.is_sent]).tolist()
    last_s = {worker: float(rows.sent_s[rows.is_sent & (rows.worker == worker)].max()) for worker in workers}
    by_worker, hole_s = _by_worker(samples), 0.0
    for worker in last_s.keys() | by_worker.keys():
        times = [0.0, *sorted(s.t_s for s in by_worker.get(worker, ()))]
        times.append(max(times[-1], last_s.get(worker, 0.0)))
        hole_s = max(hole_s, float(np.diff(times).max()))
    text = f"the longest time without a health sample of a worker was {hole_s:.1f} s, limit {HOLE_S:g} s"
    return Gate("health samples", hole_s <= HOLE_S, hole_s, HOLE_S, text)


def _arrivals(rows: RowColumns, sent: Bools, scenario: Scenario) -> Gate:
    """Compare the delivered arrivals with the schedule, by the largest distance between the distributions of their gaps."""
    name, num = "delivered arrivals", int(sent.sum())
    if isinstance(scenario.arrival, Closed | Burst) or num < 20:
        return Gate(name, True, None, 1, "not judged: needs an open loop and at least 20 requests")
    due, left = np.sort(rows.due_s[sent]), np.sort(rows.sent_s[sent])
    step = max(1, math.ceil(GAP_SPAN_S * num / max(due[-1] - due[0], 1e-9)))
    due_gaps, left_gaps = np.diff(due[::step]), np.diff(left[::step])
    if len(due_gaps) < 10:
        return Gate(name, True, None, 1, "not judged: needs at least ten gaps")
    value = gap_distance(due_gaps, left_gaps, tolerance_s=LATE_FLOOR_S[0.99])
    limit = 1.63 * math.sqrt(2 / len(due_gaps))  # two-sample Kolmogorov-Smirnov at 1 %
    text = f"gaps over {step} arrivals, sent against scheduled: distance {value:.3f}, limit {limit:.3f} (n={len(due_gaps)})"
    return Gate(name, value <= limit, value, limit, text)


def gap_distance(a: NDArray[np.float64], b: NDArray[np.float64], *, tolerance_s: float) -> float:
    """Return the largest difference of two samples' distribution functions; b may be shifted by up to the tolerance.

    With tolerance 0 it is the Kolmogorov-Smirnov distance, for which equal gaps sent a microsecond late are another law.
    """

    def excess(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
        x, y = np.sort(x), np.sort(y)
        at_x = np.arange(1, len(x) + 1) / len(x)
        return float(np.max(at_x - np.searchsorted(y, x + tolerance_s, side="right") / len(y)))

    return max(0.0, excess(a, b), excess(b, a))


def _advice(ok: bool, text: str) -> str:
    return "" if ok else f": {text}"
