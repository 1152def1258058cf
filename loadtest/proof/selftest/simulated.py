"""This check (T8) tests the gates of `loadtest.judge.health` on many simulated runs: 50 healthy ones, and starved ones.

A simulated worker is a process that stops now and then. Events during a stop (a due request, a readable answer, a tick) are handled at
its end. Everything that the gates judge follows from that, so that a starved generator inflates its own TTFT as a real one does.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from loadtest.judge.columns import RowColumns, ScheduleColumns
from loadtest.judge.health import TICK_S, gates
from loadtest.judge.stats import Floats
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.proof.selftest.bench import Bench, Point, judged
from loadtest.records import HealthSample, Manifest, Row

DURATION_S = 40.0
NUM_RUNS = 50
LAWS: tuple[dict[str, Any], ...] = (
    {"law": "poisson"},
    {"law": "constant"},
    {"law": "gamma", "cv": 3},
    {"law": "on-off", "on_s": 4, "off_s": 4},
)
CASES = tuple(product(LAWS, (2, 10, 40), (1, 3), (0.03, 0.3, 3.0)))
"""The 72 cases of the runs: law, requests/s, workers, median TTFT."""


class Stops(NamedTuple):
    """Stops of a worker: their number per second, and their mean length (exponential)."""

    per_s: float
    mean_s: float


HEALTHY = Stops(20, 0.0015)
"""Stopped for 3 % of the time; a worker that shares two cores with an idle target is stopped for less."""
STARVED = Stops(10, 0.050)
"""Another process uses the core for two fifths of the time."""


def t8_simulated(bench: Bench) -> Iterator[Point]:
    """Of 50 healthy runs none is called invalid, and of 50 starved ones all are.

    Simulated, 4 laws of arrivals, 2 to 40 requests/s, 1 or 3 workers, TTFT of 0.03 to 3 s. Healthy: each worker stands still 20 times a
    second for 1.5 ms. Starved: 10 times for 50 ms, which the gate of late reads must find each time.
    """
    for name, stops in (("healthy", HEALTHY), ("starved", STARVED)):
        failed = [failed_gates(stops, seed) for seed in range(NUM_RUNS)]
        num = sum(bool(gates) for gates in failed)
        by_gate = Counter(gate for gates in failed for gate in gates)
        seen = f"{num} of {NUM_RUNS} invalid" + "".join(f", {gate} {count}" for gate, count in by_gate.most_common(4))
        if name == "healthy":
            yield judged(name, seen, "0", num == 0)
        else:
            yield judged(name, seen, f"{NUM_RUNS}, each by read lag p99", by_gate["read lag p99"] == NUM_RUNS)


def failed_gates(stops: Stops, seed: int) -> list[str]:
    """Return the gates that the run of this seed fails."""
    law, rate, workers, ttft_s = CASES[seed * 5 % len(CASES)]  # 5 and 72 have no common factor: another case for each seed
    scenario = parse_scenario(
        {"name": "simulated", "arrival": law | {"rate": rate}, "seed": seed, "duration_s": DURATION_S, "workers": workers}
    )
    schedule, rng = make_schedule(scenario), np.random.Generator(np.random.Philox(seed))
    rows: list[Row] = []
    samples: list[HealthSample] = []
    for worker in range(workers):
        later = Later(stops, DURATION_S + 60, rng)
        part = schedule.part(worker, workers)
        due = np.array([request.due_s for request in part], dtype=float)
        sent = later(due + rng.uniform(0, 0.001, due.size))  # the delay of gevent's timers
        first = later(sent + rng.lognormal(np.log(ttft_s), 0.5, due.size))
        rows += [
            Row(request.id, worker, due_s, "ok", sent_s=sent_s, first_s=first_s, end_s=first_s)
            for request, due_s, sent_s, first_s in zip(part, due.tolist(), sent.tolist(), first.tolist(), strict=True)
        ]
        num_s = int(np.ceil(first.max(initial=0.0)))  # a worker samples until all of its answers have come
        ticks = np.arange(num_s * 100, dtype=np.float64) * TICK_S
        late_ms = ((later(ticks) - ticks) * 1e3).reshape(-1, 100)
        samples += [
            HealthSample(t + 1.0, worker, 0.3, float(late.max()) / 1e3, 0.0, 0, 0, 0, read_late_ms=late.tolist())
            for t, late in enumerate(late_ms)
        ]
    manifest = Manifest("finished", {}, schedule.sha256, len(rows), "", "", 1.0, [], workers=workers, ended_s=DURATION_S + 10)
    return [
        gate.name
        for gate in gates(samples, RowColumns.of(rows), ScheduleColumns.of(schedule.requests), scenario, manifest)
        if not gate.ok
    ]


class Later:
    """A function that moves times inside a worker's stop to the end of the stop."""

    def __init__(self, stops: Stops, until_s: float, rng: np.random.Generator) -> None:
        num = rng.poisson(stops.per_s * until_s)
        begin = np.sort(rng.uniform(0, until_s, num))
        self._begin = begin
        # If a stop begins inside another stop, both end at the later end.
        self._end = np.maximum.accumulate(begin + rng.exponential(stops.mean_s, num))

    def __call__(self, times: Floats) -> Floats:
        last = np.searchsorted(self._begin, times, side="right") - 1
        end = np.where(last >= 0, self._end[np.maximum(last, 0)], 0.0)
        return np.asarray(np.maximum(times, end))
