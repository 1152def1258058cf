"""This module measures what the analysis of a large run costs, for ``... selftest many --requests 1000000`` and the self-test T21.

The run is synthetic: its rows are drawn from laws with a fixed seed and written as a runner writes them. The analysis is a process of
its own, bound to one core, so that the process's memory is that of the analysis.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.records import HealthSample, Manifest, Row, ScheduledRequest

TOKENS = 128
RATE = 1000.0
_ANALYSIS = "import sys; from loadtest.proof.many import measured; measured(sys.argv[1])"
LAG_S = 0.0005
"""Delay between the due time of each request and its sending."""


class AnalysisCost(msgspec.Struct, frozen=True):
    """The cost of one analysis, and its results."""

    requests: int
    """Requests in the window, due after the warm-up."""
    gaps: int
    """Gaps between tokens, including the infinite gaps of refused requests."""
    verdict: str
    cpu_s: float
    """CPU seconds of the process: its duration on a core of its own."""
    peak_bytes: int
    """Largest resident memory of the process, interpreter and libraries included."""
    rows_bytes: int
    parquet_bytes: int


def write_run(run: Path, num: int, *, seed: int = 1) -> int:
    """Write a run of ``num`` answers of `TOKENS` tokens each, every 50th refused; return the number due after the warm-up of 1 s."""
    scenario = parse_scenario(
        {
            "name": "many",
            "arrival": {"law": "poisson", "rate": RATE},
            "duration_s": num / RATE,
            "warmup_s": 1,
            "slo": "ttft_p99=500ms,itl_p99=40ms",
            "requests": [{"output_tokens": {"mean": TOKENS}}],
        }
    )
    rng = np.random.Generator(np.random.Philox(seed))
    schedule = write_records(run, scenario, lambda request: _row(request, rng))
    return sum((request.due_s or 0.0) >= scenario.warmup_s for request in schedule.requests)


def write_records(run: Path, scenario: Scenario, row_of: Callable[[ScheduledRequest], Row]) -> Schedule:
    """Write the records of a run of the scenario with a healthy generator; ``row_of`` is called in the order of due times."""
    schedule, encoder = make_schedule(scenario), msgspec.json.Encoder()
    run.mkdir(parents=True)
    schedule.write(run / "schedule.jsonl")
    with (run / "rows.jsonl").open("wb") as file:
        for request in schedule.requests:
            file.write(encoder.encode(row_of(request)) + b"\n")
    with (run / "health.jsonl").open("wb") as file:
        for t in range(int(scenario.duration_s) + 5):
            file.write(encoder.encode(HealthSample(float(t), 0, 0.3, 0.002, 0.0, 0, 0, 0, read_late_ms=[0.1] * 100)) + b"\n")
    manifest = Manifest(
        "finished", scenario.model_dump(mode="json"), schedule.sha256, len(schedule.requests), "", "", 1.0, [],
        ended_s=scenario.duration_s + 5,
    )  # fmt: skip
    (run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return schedule


def sent_s(request: ScheduledRequest) -> float:
    """Return when the request was sent."""
    return (request.due_s or 0.0) + LAG_S


def refused(request: ScheduledRequest) -> Row:
    """Return the row of a request that was answered with 429 within 10 ms."""
    due_s, at_s = request.due_s or 0.0, sent_s(request)
    return Row(request.id, 0, due_s, "http_error", "429: busy", sent_s=at_s, end_s=at_s + 0.01, status=429)


def answered(request: ScheduledRequest, ms: list[float]) -> Row:
    """Return the row of a stream whose tokens came one by one, ``ms`` milliseconds after sending."""
    due_s, at_s = request.due_s or 0.0, sent_s(request)
    first_s, last_s = (round(at_s + at / 1e3, 6) for at in (ms[0], ms[-1]))
    row = Row(request.id, 0, due_s, "ok", sent_s=at_s, connected_s=at_s, headers_s=first_s, first_s=first_s, last_s=last_s)
    row.end_s, row.status, row.prompt_tokens, row.output_tokens, row.finish_reason = last_s, 200, 64, len(ms), "length"
    row.chunks, row.text, row.text_sha256 = [(at, 1) for at in ms], "word " * len(ms), "0" * 64
    return row


def _row(request: ScheduledRequest, rng: np.random.Generator) -> Row:
    if request.id % 50 == 7:
        return refused(request)
    ms = np.cumsum(np.concatenate([rng.lognormal(5.0, 0.3, 1), rng.lognormal(3.0, 0.2, TOKENS - 1)])).round(3)
    return answered(request, ms.tolist())


def cost_of(run: Path) -> AnalysisCost:
    """Analyse the run in a process bound to one core."""
    ended = subprocess.run([sys.executable, "-c", _ANALYSIS, str(run)], capture_output=True, text=True, check=True)
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=AnalysisCost)


def measured(run: str) -> None:
    """Analyse the run and print the cost; the work of the measured process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from loadtest.judge.analysis import analyse  # its imports are part of the cost

    folder = Path(run)
    summary = analyse(folder)
    itl = summary.distributions.get("itl")
    found = {"requests": sum(summary.states.values()), "gaps": itl.n if itl else 0, "verdict": summary.verdict}
    sizes = {
        f"{key}_bytes": (folder / name).stat().st_size for key, name in (("rows", "rows.jsonl"), ("parquet", "rows.parquet"))
    }
    print(json.dumps({**found, "cpu_s": time.process_time(), "peak_bytes": peak_bytes(), **sizes}))


def peak_bytes() -> int:
    """Return the largest resident memory of this process since it began to execute its program.

    The value is VmHWM: getrusage's ``ru_maxrss`` starts with the memory of the parent process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
