"""Numbers of the batching benchmark out of the records of its runs. Seconds are the setup's: real ones divided by ``time_scale``."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.batching_theory import Life, block_use
from loadtest import stats
from loadtest.records import Manifest, Row, ServerSample, read_lines, read_manifest
from loadtest.stats import Floats
from serve_app.static_batching.batches import BatchRecord, kv_use

BLOCK_SIZE = {True: 16, False: 32}
"""Of the fleet's KV cache, by whether it is simulated: the CPU's attention takes multiples of 32."""


@dataclass(frozen=True)
class Run:
    """One experiment on one system, as it was recorded."""

    folder: Path
    time_scale: float

    @cached_property
    def rows(self) -> list[Row]:
        return sorted(read_lines(self.folder / "rows.jsonl", Row), key=lambda row: row.id)

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.folder)

    @cached_property
    def batches(self) -> list[BatchRecord]:
        """Of a static server; the times are real seconds."""
        return msgspec.json.decode((self.folder / "batches.json").read_bytes(), type=list[BatchRecord])

    @property
    def answered(self) -> list[Row]:
        return [row for row in self.rows if row.state == "ok"]

    @property
    def length_s(self) -> float:
        return (max(row.end_s or 0.0 for row in self.rows) - min(row.due_s for row in self.rows)) / self.time_scale

    @property
    def output_tokens_per_s(self) -> float:
        return sum(row.output_tokens or 0 for row in self.answered) / self.length_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens included, as the study counts."""
        return self.output_tokens_per_s + sum(row.prompt_tokens or 0 for row in self.answered) / self.length_s

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.length_s

    def latencies_s(self, metric: str) -> Floats:
        """Return E2E or TTFT from the due time in the order of due times; infinite for what failed."""
        ends = [(row.end_s if metric == "e2e" else row.first_s) if row.state == "ok" else None for row in self.rows]
        due = [row.due_s for row in self.rows]
        return np.array([np.inf if e is None else (e - d) / self.time_scale for e, d in zip(ends, due, strict=True)])

    def median_s(self, metric: str) -> tuple[float, float, float]:
        """Return the median with its 95 % interval for dependent samples (`loadtest.stats`)."""
        values = self.latencies_s(metric)
        low, high = stats.order_interval(np.sort(values), np.sort(values), 0.5, stats.effective_size(values, 0.5))
        return stats.quantile(values, 0.5), low, high

    def window_tokens_per_s(self, window_s: float) -> tuple[float, float]:
        """Return output and total tokens per second in the last two thirds of the window; prompts count at the first token."""
        start, end = window_s / 3 * self.time_scale, window_s * self.time_scale
        output = prompt = 0
        for row in self.rows:
            at = (row.sent_s or 0.0) + np.array([ms for ms, _ in row.chunks]) / 1000
            inside = (at >= start) & (at < end)
            output += int(np.array([n for _, n in row.chunks])[inside].sum()) if row.chunks else 0
            prompt += (row.prompt_tokens or 0) if row.chunks and inside[0] else 0
        seconds = window_s * 2 / 3
        return output / seconds, (output + prompt) / seconds

    def lives(self) -> list[Life]:
        """Return when each answered request got its tokens, in the setup's seconds."""
        lives = []
        for row in self.answered:
            times = [((row.sent_s or 0.0) + ms / 1000) / self.time_scale for ms, num in row.chunks for _ in range(num)]
            if times:
                lives.append(Life(row.prompt_tokens or 0, times[0], times[-1], times))
        return lives

    def kv(self, kv_tokens: int, *, simulated: bool) -> dict[str, float]:
        """Return shares of the KV memory, averaged over the time that requests waited: reserved (allocated in blocks), used."""
        if (self.folder / "batches.json").exists():
            uses = [(kv_use(batch), batch.step_ends_s[-1]) for batch in self.batches]
            memory = kv_tokens * sum(length for _, length in uses)
            totals = {name: sum(getattr(use, name) for use, _ in uses) for name in ("reserved", "padded", "used")}
            return {name: total / memory for name, total in totals.items()}
        lives = self.lives()
        times, allocated, used = block_use(lives, block_size=BLOCK_SIZE[simulated])
        busy = times <= max(life.first_s for life in lives)
        said = [s.values["kv_usage"] for s in read_lines(self.folder / "server.jsonl", ServerSample) if "kv_usage" in s.values]
        return {
            "reserved": float(allocated[busy].mean()) / kv_tokens,
            "used": float(used[busy].mean()) / kv_tokens,
            "said_by_engine_max": max(said, default=float("nan")),
        }

    def num_running(self) -> float:
        """Return how many requests were decoding on average while others waited."""
        lives = self.lives()
        times = np.linspace(min(x.first_s for x in lives), max(x.first_s for x in lives), 400)
        return float(np.mean([[x.first_s <= t < x.end_s for x in lives] for t in times], axis=0).sum())


def read_runs(folder: Path) -> list[tuple[dict[str, Any], Run]]:
    """Return what ran, and its records."""
    entries = json.loads((folder / "runs.json").read_text())["runs"]
    return [(entry, Run(folder / entry["folder"], entry["time_scale"])) for entry in entries]
