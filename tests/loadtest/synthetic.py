"""This module writes folders of synthetic runs: rows drawn from known laws with a fixed seed, written as a runner writes them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import HealthSample, Manifest, Row, RunEvent, ScheduledRequest, ServerSample, State

Records = list[Row] | list[HealthSample] | list[ServerSample] | list[RunEvent]


def write_run(
    run: Path,
    *,
    seed: int = 1,
    rate: float = 12.0,
    slow: float = 1.0,
    sick: bool = False,
    scenario: dict[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """Write a Poisson run of 60 s at ``rate``; answers take ``slow`` times as long. ``sick``: the generator was late by 300 ms."""
    values: dict[str, Any] = {
        "name": "synthetic",
        "arrival": {"law": "poisson", "rate": rate},
        "seed": seed,
        "duration_s": 60,
        "warmup_s": 5,
        "slo": "ttft_p99=900ms,tpot_p99=60ms",
        "requests": [
            {"input_tokens": {"dist": "uniform", "min": 16, "max": 512}, "output_tokens": {"dist": "exponential", "max": 400}}
        ],
    }
    parsed = parse_scenario(values | (scenario or {}))
    schedule = make_schedule(parsed)
    rng = np.random.default_rng(seed)
    rows = [_row(rng, request, request.due_s or 0.0, slow, 0.3 if sick else 0.0003) for request in schedule.requests]
    run.mkdir(parents=True)
    fields: dict[str, Any] = {
        "state": "finished",
        "scenario": parsed.model_dump(mode="json"),
        "schedule_sha256": schedule.sha256,
        "num_scheduled": len(schedule.requests),
        "target": "http://127.0.0.1:8000",
        "model": "opt-125m",
        "epoch_unix_s": 1.7e9,
        "command": ["serve-app-loadtest", "run", "a scenario.yaml", "--target", "http://127.0.0.1:8000"],
        "workers": 2,
        "ended_s": 66.0,
        "versions": {"loadtest": "0.1.0", "locust": "2.47.0"},
        "machine": {"cores": 2, "system": "Linux"},
    }
    (run / "manifest.json").write_bytes(msgspec.json.encode(Manifest(**fields | manifest)))
    schedule.write(run / "schedule.jsonl")
    write_lines(run / "rows.jsonl", rows)
    write_lines(run / "health.jsonl", _health(rng, rows, lag_s=0.3 if sick else 0.0008))
    write_lines(run / "server.jsonl", _server(rows))
    events = [RunEvent(0.0, "phase", "warm-up"), RunEvent(5.0, "phase", "measured"), RunEvent(30.0, "fault", "kill replica 1")]
    write_lines(run / "events.jsonl", [*events, RunEvent(33.0, "fault-end", "kill replica 1"), RunEvent(60.0, "phase", "drain")])
    return run


def write_lines(path: Path, records: Records) -> None:
    """One record a line."""
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))


def _row(rng: np.random.Generator, request: ScheduledRequest, due_s: float, slow: float, lag_s: float) -> Row:
    sent = due_s + lag_s * float(rng.exponential())
    stall_ms = (33 - due_s) * 1e3 if 30 < due_s < 33 and request.id % 3 == 0 else 0.0
    row = Row(
        id=request.id,
        worker=request.id % 2,
        due_s=due_s,
        state="ok",
        sent_s=sent,
        connected_s=sent + 0.0002,
        headers_s=sent + 0.01,
    )
    if request.id % 97 == 7:
        states: list[State] = ["http_error", "timeout", "truncated"]
        row.state, row.reason = states[request.id // 97 % 3], "it failed"
        row.end_s = due_s + 120 if row.state == "timeout" else sent + 0.02
        row.status, row.retry_after_s = (429, 1.0) if row.state == "http_error" else (200, None)
        return row
    first_ms = stall_ms + slow * float(rng.lognormal(np.log(120 + request.input_tokens / 4), 0.35))
    times, left = [(first_ms, 1)], request.output_tokens - 1
    while left > 0:
        tokens = min(left, 1 + int(rng.random() < 0.2))
        times.append((times[-1][0] + tokens * slow * float(rng.lognormal(np.log(22), 0.15)), tokens))
        left -= tokens
    times = [(round(ms, 3), tokens) for ms, tokens in times]  # as the client records them
    row.chunks, row.prompt_tokens, row.output_tokens, row.status = times, request.input_tokens, request.output_tokens, 200
    row.first_s, row.last_s, row.end_s = sent + first_ms / 1e3, sent + times[-1][0] / 1e3, sent + times[-1][0] / 1e3 + 0.001
    row.finish_reason = "length"
    return row


def _health(rng: np.random.Generator, rows: list[Row], *, lag_s: float) -> list[HealthSample]:
    samples = []
    for t in range(1, 66):
        sent = sum(1 for r in rows if r.sent_s is not None and r.sent_s <= t)
        ended = sum(1 for r in rows if r.end_s is not None and r.end_s <= t)
        for worker in (0, 1):
            lag, cpu = lag_s * (1 + float(rng.exponential())), 0.2 + 0.05 * float(rng.random())
            late_ms = (lag * 1e3 * np.linspace(0, 1, 100)).round(2).tolist()
            counts = {"in_flight": (sent - ended) // 2, "num_sent": sent // 2, "num_rows": ended // 2}
            samples.append(HealthSample(float(t), worker, cpu, lag, 0.0, **counts, read_late_ms=late_ms))
    return samples


def _server(rows: list[Row]) -> list[ServerSample]:
    """Counters as a server with 20 ms of queue, 100 ms of prefill and 1 s of decode per request would have them."""
    samples = []
    for t in range(66):
        ended = sum(1 for r in rows if r.state == "ok" and r.end_s is not None and r.end_s <= t)
        begun = sum(1 for r in rows if r.sent_s is not None and r.sent_s <= t)
        gone = sum(1 for r in rows if r.end_s is not None and r.end_s <= t)
        rejected = sum(1 for r in rows if r.status == 429 and r.end_s is not None and r.end_s <= t)
        values = {
            "running": min(begun - gone, 12),
            "waiting": max(begun - gone - 12, 0),
            "kv_usage": min(1.0, (begun - gone) / 30),
        }
        values |= {"requests_ok": ended, "requests_rejected": rejected, "preemptions": t // 20}
        for name, mean_s in (("queue", 0.02), ("prefill", 0.1), ("decode", 1.0)):
            values |= {f"{name}_s_sum": mean_s * ended, f"{name}_s_count": ended}
        samples.append(ServerSample(float(t), "metrics", {k: float(v) for k, v in values.items()}))
        desired, ready = 1 + (t > 20) + (t > 24), 1 + (t > 28) + (t > 35)
        samples.append(
            ServerSample(float(t), "serve", {"replicas_desired/Replica": float(desired), "replicas_ready/Replica": float(ready)})
        )
    return samples
