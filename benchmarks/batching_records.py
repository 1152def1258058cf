"""This module computes the batching benchmark's numbers from its records, in the setup's seconds: real ones over ``time_scale``."""

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from benchmarks.batching_theory import Life, block_use
from benchmarks.static_batching.batches import BatchRecord, kv_use
from loadtest.judge.analysis import distribution, summary_of
from loadtest.judge.metrics import Records, metric_bounds, read_records
from loadtest.judge.stats import Floats
from loadtest.judge.summary import Summary
from loadtest.records import Row

BLOCK_SIZE = {True: 16, False: 32}
"""Block size of the fleet's KV cache, by whether the fleet is simulated: attention on the CPU needs multiples of 32."""


@dataclass(frozen=True)
class Run:
    """The records of one experiment on one system. Percentiles and throughput are computed by `loadtest`."""

    folder: Path
    time_scale: float

    @cached_property
    def records(self) -> Records:
        return read_records(self.folder)

    @cached_property
    def summary(self) -> Summary:
        return summary_of(self.records)

    @property
    def problems(self) -> list[str]:
        """Return why the run is invalid; empty if it is valid."""
        return [gate.text for gate in self.summary.gates if not gate.ok]

    @cached_property
    def rows(self) -> list[Row]:
        return sorted(self.records.rows, key=lambda row: row.id)

    @cached_property
    def batches(self) -> list[BatchRecord]:
        """Return the batches of a static server, with times in real seconds."""
        return msgspec.json.decode((self.folder / "batches.json").read_bytes(), type=list[BatchRecord])

    @property
    def answered(self) -> list[Row]:
        return [row for row in self.rows if row.state == "ok"]

    @property
    def length_s(self) -> float:
        start_s, end_s = self.summary.window_s
        return (end_s - start_s) / self.time_scale

    def per_s(self, what: Literal["completed", "output_tokens", "total_tokens"]) -> float:
        """Return requests, output tokens or all tokens (the study's count) per second of a valid run."""
        assert self.summary.throughput is not None
        rate: float = getattr(self.summary.throughput, what)
        return rate * self.time_scale

    def latencies_s(self, metric: str) -> Floats:
        """Return the metric of all requests, in the order of due times; infinite for failed requests."""
        return metric_bounds(self.records, self.records.items(), metric)[1] / self.time_scale

    def median_s(self, metric: str) -> tuple[float | None, float | None, float | None]:
        """Return the median over all requests with its 95 % interval; None if the run cannot show it."""
        low, high = (bounds / self.time_scale for bounds in metric_bounds(self.records, self.records.items(), metric))
        median = next(each for each in distribution(metric, low, high).quantiles if each.q == 0.5)
        return median.value_s, median.low_s, median.high_s

    def window_tokens_per_s(self, window_s: float) -> tuple[float, float]:
        """Return output and total tokens per second in the last two thirds of the window; prompts count at the first token.

        Tokens count by their own times: loadtest counts the tokens of ended answers, and few answers of an overloaded server have ended.
        """
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
        """Return shares of the KV memory, averaged over the time with waiting requests: reserved (allocated in blocks), used."""
        if (self.folder / "batches.json").exists():
            uses = [(kv_use(batch), batch.step_ends_s[-1]) for batch in self.batches]
            memory = kv_tokens * sum(length for _, length in uses)
            totals = {name: sum(getattr(use, name) for use, _ in uses) for name in ("reserved", "padded", "used")}
            return {name: total / memory for name, total in totals.items()}
        lives = self.lives()
        times, allocated, used = block_use(lives, block_size=BLOCK_SIZE[simulated])
        busy = times <= max(life.first_s for life in lives)
        said = [s.values["kv_usage"] for s in self.records.server if "kv_usage" in s.values]
        return {
            "reserved": float(allocated[busy].mean()) / kv_tokens,
            "used": float(used[busy].mean()) / kv_tokens,
            "said_by_engine_max": max(said, default=float("nan")),
        }

    def num_running(self) -> float:
        """Return the mean number of decoding requests while others waited."""
        lives = self.lives()
        times = np.linspace(min(x.first_s for x in lives), max(x.first_s for x in lives), 400)
        return float(np.mean([[x.first_s <= t < x.end_s for x in lives] for t in times], axis=0).sum())


def read_runs(folder: Path) -> list[tuple[dict[str, Any], Run]]:
    """Return the entries of runs.json with their records. ``problems`` of an entry: why its run, the last of ``tries``, is invalid."""
    runs = []
    for entry in read_results(folder)["runs"]:
        run = Run(folder / entry["folder"], entry["time_scale"])
        runs.append(({**entry, "tries": entry.get("tries", 1), "problems": entry["problems"] or run.problems}, run))
    return runs


def round_folder(folder: Path, number: int) -> Path:
    """Return the folder of a round of a setup; rounds count from 1."""
    return folder if number == 1 else folder / f"round-{number}"


def read_rounds(folder: Path) -> list[list[tuple[dict[str, Any], Run]]]:
    """Return `read_runs` of each measured round, in order."""
    folders = (round_folder(folder, number) for number in count(1))
    return [read_runs(each) for each in takewhile(lambda each: (each / "runs.json").exists(), folders)]


def read_results(folder: Path) -> dict[str, Any]:
    """Return runs.json: setup, commit and date of the measurement, and its runs."""
    found: dict[str, Any] = json.loads((folder / "runs.json").read_text())
    return found
