"""How much a large run costs to analyse: ``python -m loadtest.proof.selftest many --requests 1000000``.

The run never happened: its rows are drawn from laws with a fixed seed and written as a runner writes them. The analysis is a process
of its own, bound to one core, so that its memory is that of the analysis alone.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import HealthSample, Manifest, Row

TOKENS = 128
RATE = 1000.0
_ANALYSIS = "import sys; from loadtest.proof.many import measured; measured(sys.argv[1])"


class Cost(msgspec.Struct, frozen=True):
    """Of one analysis."""

    requests: int
    cpu_s: float
    """CPU seconds of the process: how long it takes on a core of its own."""
    peak_bytes: int
    """Largest resident memory of the process, interpreter and libraries included."""
    rows_bytes: int
    parquet_bytes: int


def write_run(run: Path, num: int, *, seed: int = 1) -> None:
    """Write a run of ``num`` answers of `TOKENS` tokens each; every 50th request was refused."""
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
    schedule = make_schedule(scenario)
    run.mkdir(parents=True)
    schedule.write(run / "schedule.jsonl")
    rng, encoder = np.random.Generator(np.random.Philox(seed)), msgspec.json.Encoder()
    with (run / "rows.jsonl").open("wb") as file:
        for request in schedule.requests:
            file.write(encoder.encode(_row(request.id, request.due_s or 0.0, rng)) + b"\n")
    with (run / "health.jsonl").open("wb") as file:
        for t in range(int(num / RATE) + 5):
            file.write(encoder.encode(HealthSample(float(t), 0, 0.3, 0.002, 0.0, 0, 0, 0, read_late_ms=[0.1] * 100)) + b"\n")
    manifest = Manifest(
        "finished", scenario.model_dump(mode="json"), schedule.sha256, len(schedule.requests), "", "", 1.0, [],
        ended_s=num / RATE + 5,
    )  # fmt: skip
    (run / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def _row(number: int, due_s: float, rng: np.random.Generator) -> Row:
    sent_s = due_s + 0.0005
    if number % 50 == 7:
        return Row(number, 0, due_s, "http_error", "429: busy", sent_s=sent_s, end_s=sent_s + 0.01, status=429)
    ms = np.cumsum(np.concatenate([rng.lognormal(5.0, 0.3, 1), rng.lognormal(3.0, 0.2, TOKENS - 1)])).round(3)
    first_s, last_s = (round(sent_s + at / 1e3, 6) for at in (float(ms[0]), float(ms[-1])))
    row = Row(number, 0, due_s, "ok", sent_s=sent_s, connected_s=sent_s, headers_s=first_s, first_s=first_s, last_s=last_s)
    row.end_s, row.status, row.prompt_tokens, row.output_tokens, row.finish_reason = last_s, 200, 64, TOKENS, "length"
    row.chunks, row.text, row.text_sha256 = [(at, 1) for at in ms.tolist()], "word " * TOKENS, "0" * 64
    return row


def cost_of(run: Path) -> Cost:
    """Analyse the run in a process bound to one core."""
    ended = subprocess.run([sys.executable, "-c", _ANALYSIS, str(run)], capture_output=True, text=True, check=True)
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Cost)


def measured(run: str) -> None:
    """What the process does: analyse, and print its cost."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from loadtest.judge.analysis import analyse  # what it loads is part of the cost

    folder = Path(run)
    summary = analyse(folder)
    sizes = {
        f"{key}_bytes": (folder / name).stat().st_size for key, name in (("rows", "rows.jsonl"), ("parquet", "rows.parquet"))
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cost = {"requests": sum(summary.states.values()), "cpu_s": time.process_time(), "peak_bytes": peak}
    print(json.dumps({**cost, **sizes}))
