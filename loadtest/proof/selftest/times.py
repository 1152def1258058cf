"""These checks (T1-T4, T10, T11, T13, T15) compare latencies with laws and with the times of the server's own writes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats as law

from loadtest.judge.attribution import attribution
from loadtest.judge.metrics import bounds_s
from loadtest.judge.stats import Floats, quantile
from loadtest.proof.selftest.bench import Bench, Point, Skipped, environment, fault, judged, ms, poisson, scenario_of
from loadtest.proof.truth.ledger import Entry
from loadtest.records import Row, ScheduledRequest, ServerSample, read_lines

OFFSET_S = 0.002
P50_S, P99_S = 0.002, 0.005


def ks_distance(values: Floats, cdf: Callable[[Floats], Floats], *, offset_s: float) -> float:
    """Return the Kolmogorov-Smirnov distance of the values from the nearest law among shifts to the right by up to ``offset_s``."""
    x, n = np.sort(values), values.size
    above = np.arange(1, n + 1) / n - cdf(x)
    below = cdf(x - offset_s) - np.arange(n) / n
    return max(0.0, float(above.max()), float(below.max()))


_LOG_VARIANCE = np.log(2)  # for cv 1
LAWS: dict[str, tuple[dict[str, float], Any]] = {
    "lognormal": ({"cv": 1.0}, law.lognorm(np.sqrt(_LOG_VARIANCE), scale=0.1 * np.exp(-_LOG_VARIANCE / 2))),
    "exponential": ({}, law.expon(scale=0.1)),
}


def t1_laws(bench: Bench, name: str) -> Iterator[Point]:
    """TTFT follows the server's law.

    Kolmogorov-Smirnov distance below 1.63 / sqrt(n), which is 1 %, from the law or a shift of it by up to 2 ms. The server's own
    delay against its schedule is taken off.
    """
    num = 600 if bench.quick else 5000
    more, truth = LAWS[name]
    observed = bench.run({"ttft": {"law": name, "mean_s": 0.1, **more}}, poisson(150, num / 150))
    took = observed.late_s + np.array([e.sent_first_s or 0.0 for _, e in observed.pairs])
    distance = ks_distance(took - observed.server_late_s, truth.cdf, offset_s=OFFSET_S)
    limit = 1.63 / took.size**0.5
    seen = f"D {distance:.4f}, n {took.size}; {observed.lateness()}"
    yield judged(f"{name} law", seen, f"D < {limit:.4f}", distance < limit, timing=True)


def t2_two_points(bench: Bench) -> Iterator[Point]:
    """A law of two times stays one: 100 ms, and 300 ms for 30 %.

    The share nearer to 300 ms is inside the binomial 99 % interval, each request is at the time that was drawn for it, and 1 % at
    most is further than 5 ms from its time (the server's own delay taken off): nothing lies between.
    """
    num = 300 if bench.quick else 2000
    settings = {"law": "two-point", "low_s": 0.1, "high_s": 0.3, "high_probability": 0.3}
    observed = bench.run({"ttft": settings}, poisson(80, num / 80))
    drawn = np.array([e.prefill_s or 0.0 for _, e in observed.pairs])
    actual = np.array([e.sent_first_s or 0.0 for _, e in observed.pairs])
    took = observed.late_s + actual - observed.server_late_s
    num_high = int((took > 0.2).sum())
    low, high = (int(law.binom.ppf(p, took.size, 0.3)) for p in (0.005, 0.995))
    yield judged("mass at 300 ms", f"{num_high} of {took.size}", f"{low}..{high}", low <= num_high <= high)
    wrong = int(((took > 0.2) != (drawn > 0.2)).sum())
    off = float((np.abs(took - drawn) > P99_S).mean())
    seen = f"{wrong} at the other time, {off:.2%} off by more than 5 ms; {observed.lateness()}"
    yield judged("nothing between", seen, "0 and 1 %", wrong == 0 and off <= 0.01, timing=True)


CHUNKS: dict[str, dict[str, Any]] = {
    "4 tokens a chunk, 2 events a segment, 2-4 byte text": {"tokens_per_chunk": 4, "coalesce": 2, "text": "multi-byte"},
    "1 token a chunk": {},
    "16 tokens a chunk": {"tokens_per_chunk": 16},
    "2 events a segment": {"coalesce": 2},
    "2-4 byte text in 7 pieces": {"text": "multi-byte", "split": 7},
    "byte by byte": {"text": "multi-byte", "tokens_per_chunk": 4, "split": "bytes"},
}


def t3_chunks(bench: Bench, name: str) -> Iterator[Point]:
    """Known chunk times, 100 ms + k x 20 ms, are seen however they are packed.

    Token counts exact, by usage and by chunks. TTFT, gaps between chunks and TPOT are off from the server's actual ones by at most 2 ms
    at the p50 and 5 ms at the p99.
    """
    # Byte by byte, an event is 400 writes of the server, so there are fewer events, but enough answers that the p99 is not the maximum.
    rate, duration_s, tokens = (8, 14, 16) if name == "byte by byte" else (20, 6 if bench.quick else 8, 64)
    times = {"ttft": {"law": "constant", "s": 0.1}, "gap": {"law": "constant", "s": 0.02}}
    observed = bench.run(times | CHUNKS[name], poisson(rate, duration_s, output_tokens=tokens))
    counts = [(r.output_tokens, sum(n for _, n in r.chunks)) for r in observed.rows]
    num_wrong = sum(count != (tokens, tokens) for count in counts)
    yield judged(f"{name}: counts", f"{num_wrong} of {len(counts)} answers wrong", "0", num_wrong == 0)
    gaps = np.concatenate([gap_errors_s(*pair) for pair in observed.pairs])
    tpots = np.array([tpot_error_s(*pair) for pair in observed.pairs])
    errors = {"TTFT": np.abs(observed.late_s), "gap": np.abs(gaps), "TPOT": np.abs(tpots)}
    found = {what: (quantile(x, 0.5), quantile(x, 0.99)) for what, x in errors.items()}
    seen = "; ".join(f"{what} off by {ms(p50)} {ms(p99)} ms" for what, (p50, p99) in found.items())
    ok = all(p50 <= P50_S and p99 <= P99_S for p50, p99 in found.values())
    yield judged(f"{name}: times", f"{seen}; {observed.lateness()}", "2, 5 ms", ok, timing=True)


def gap_errors_s(row: Row, told: Entry) -> Floats:
    """Return the error of each gap between the server's writes, as the client sees it; above 0 if too long."""
    first_of_write = np.cumsum([0, *(n for _, n in told.writes)])[:-1]
    seen = np.repeat([at / 1000 for at, _ in row.chunks], [n for _, n in row.chunks])[first_of_write]
    return np.asarray(np.diff(seen) - np.diff([at for at, _ in told.writes]))


def tpot_error_s(row: Row, told: Entry) -> float:
    """Return the error of the client's time per token after the first, against the server's writes; above 0 if too long."""
    num = sum(n for _, n in told.writes)
    found = bounds_s(ScheduledRequest(row.id, row.due_s, "", 0, num), row, "tpot", closed=False, stream=True)
    return (math.nan if found is None else found[1]) - (told.writes[-1][0] - told.writes[0][0]) / (num - 1)


def t4_stall(bench: Bench, loop: str) -> Iterator[Point]:
    """A server that freezes shows in an open loop and hides in a closed one.

    50 requests/s, a freeze of a sixth of the run (5 of 30 s): the p95 from due times is within 10 % of what the schedule and the law
    give, and the p95 of a closed loop of three clients is below 100 ms.
    """
    duration_s = 6.0 if bench.quick else 30.0
    at_s, for_s = duration_s / 2, duration_s / 6
    settings = {"ttft": {"law": "constant", "s": 0.05}, "stalls": [{"at_s": at_s, "for_s": for_s}]}
    arrival = {"law": "constant", "rate": 50} if loop == "open" else {"law": "closed", "concurrency": 3, "max_requests": 100_000}
    observed = bench.run(settings, scenario_of(arrival, duration_s))
    p95_s = observed.percentile("ttft", 0.95) or np.nan
    if loop == "closed":
        worst_s = max((row.first_s or 0.0) - (row.sent_s or 0.0) for row, _ in observed.pairs)
        yield judged("closed loop", f"p95 {p95_s:.3f} s, largest {worst_s:.3f} s", "p95 < 0.1 s", p95_s < 0.1, timing=True)
        return
    due = np.array([row.due_s for row in observed.rows])
    end = due.min() + at_s + for_s  # end of the freeze; the law counts from the first request
    frozen = (due >= end - for_s - 0.05) & (due < end)
    exact_s = quantile(np.where(frozen, np.minimum(end - due, for_s), 0.0) + 0.05, 0.95)
    seen = f"p95 {p95_s:.3f} s; {observed.lateness()}"
    yield judged("open loop", seen, f"{exact_s:.3f} s +- 10 %", abs(p95_s / exact_s - 1) < 0.1, timing=True)


def t10_warm_up(bench: Bench, case: str) -> Iterator[Point]:
    """A slow start is cut off, and nothing else.

    Five times as slow for 20 s: the cut is found within 5 s of that. Of a steady server less than 5 % is cut.
    """
    settings: dict[str, Any] = {"ttft": {"law": "lognormal", "mean_s": 0.05, "cv": 0.5}}
    slow = {} if case == "steady" else {"warm_up": {"for_s": 20, "factor": 5, "shape": "step"}}
    low_s, high_s = (0, 3) if case == "steady" else (15, 25)
    cut_s = bench.run(settings | slow, poisson(20, 60)).summary.warmup_cut_s
    yield judged(case, f"cut at {cut_s:.1f} s of 60 s", f"{low_s}..{high_s} s", low_s <= cut_s <= high_s, timing=True)


def t11_timeouts(bench: Bench) -> Iterator[Point]:
    """Requests beyond the timeout stay inside the percentiles.

    3 % take 4 s and the timeout is 1 s: the p95 is that of the server's actual times within 5 ms, and of the p99 it is said that it
    is the timeout at least.
    """
    settings = {"ttft": {"law": "two-point", "low_s": 0.1, "high_s": 4, "high_probability": 0.03}}
    observed = bench.run(settings, poisson(50, 20, timeout_s=1))
    seen_by_client = observed.summary.distributions["send_ttft"]
    p95, p99 = seen_by_client.at(0.95), seen_by_client.at(0.99)
    assert p95 is not None
    assert p99 is not None
    actual = quantile(
        np.array([e.sent_first_s if e.outcome == "ok" and e.sent_first_s else np.inf for _, e in observed.told]), 0.95
    )
    ok = p95.value_s is not None and abs(p95.value_s - actual) <= P99_S
    yield judged("p95", f"{p95.value_s} s", f"{actual:.4f} s +- 5 ms", ok, timing=True)
    at_least = p99.censored_s or 0.0
    num = sum(row.state == "timeout" for row in observed.rows)
    seen = f"value {p99.value_s}, at least {at_least:.3f} s; {num} timeouts of {len(observed.rows)}"
    yield judged("p99", seen, "no value, at least 1 s", p99.value_s is None and abs(at_least - 1) < 0.05, timing=True)


def t13_attribution(bench: Bench) -> Iterator[Point]:
    """Queue, prefill and decode are the server's, and what is left is the edge that was scripted.

    Each within 5 %. Bursts of 8 requests for 4 slots, each 0.3 s of prefill and 0.4 s of decode: half of them wait 0.7 s. Edge 0.25 s.
    """
    times = {name: {"law": "constant", "s": s} for name, s in (("ttft", 0.3), ("gap", 0.05), ("edge", 0.25))}
    due = bench.new_folder() / "bursts.jsonl"
    due.write_text("".join(f'{{"timestamp": {2000 * n}, "input_length": 8, "output_length": 9}}\n' * 8 for n in range(8)))
    scenario = scenario_of({"law": "trace", "file": str(due)}, 18, output_tokens=9, observe={})
    observed = bench.run(times | {"slots": 4}, scenario)
    samples = list(read_lines(observed.folder / "server.jsonl", ServerSample))
    found = attribution(samples, observed.rows, (-5.0, 60.0))
    parts = {} if found is None else found.parts()
    for name, truth in (("queue", 0.35), ("prefill", 0.3), ("decode", 0.4), ("edge", 0.25)):
        seen = parts.get(name, np.nan)
        yield judged(name, f"{seen:.4f} s", f"{truth} s +- 5 %", abs(seen / truth - 1) < 0.05, timing=True)


def t15_clock(bench: Bench) -> Iterator[Point]:
    """A wall clock that is stepped by +2 s and then by -4 s changes no latency, and the manifest says it.

    libfaketime steps the generator's wall clock, never the machine's. All answers complete, each TTFT within 0.5 s of the server's,
    clock_drift_s -2 +- 0.1. Without libfaketime: skipped.
    """
    file = bench.new_folder().absolute() / "clock"
    file.write_text("+0\n")
    set_to = "echo {0} >{1}.new; mv {1}.new {1}"
    steps = [fault(at, "command", command=["/bin/sh", "-c", set_to.format(to, file)]) for at, to in ((3, "+2"), (6, "-2"))]
    with faked_clock(file):
        observed = bench.run({}, poisson(30, 9, output_tokens=8, faults=steps))
    num_ok = len(observed.pairs)
    worst = float(np.abs(observed.late_s).max())
    yield judged("answers", f"{num_ok} of {observed.manifest.num_scheduled}", "all", num_ok == observed.manifest.num_scheduled)
    yield judged("TTFT, client - server", f"largest {worst:.3f} s", "< 0.5 s", worst < 0.5, timing=True)
    drift_s = observed.manifest.clock_drift_s
    yield judged("clock_drift_s", f"{drift_s:.3f} s", "-2 +- 0.1 s", abs(drift_s + 2) < 0.1)


@contextmanager
def faked_clock(file: Path) -> Iterator[None]:
    """Give child processes a wall clock shifted by the file's content, such as +2 or -2; the file is read each second."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        raise Skipped("no libfaketime (Debian: apt install faketime)")
    variables = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_CACHE_DURATION": "1"}
    with environment(variables | {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}):
        yield
