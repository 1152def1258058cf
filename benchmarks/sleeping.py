"""This benchmark measures six models that share two simulated GPUs by sleeping, in virtual time; the seed decides all figures.

    python -m benchmarks.sleeping [--seeds 1 2 3 4 5] [--gaps 180 300 600] [--after 60]

It prints the time to the first token above a wake-up beside that of two ideal policies that know nothing of the future, and where the
slowest twentieth of the requests spent its time. `tests/core/sleep_world.py` has the real decisions; the times of sleeping and waking are
the simulated accelerator's.
"""

import argparse
import math
import random
import statistics
from collections import defaultdict

import numpy as np

from loadtest.judge.stats import order_interval, quantile
from serve_app.core.sleep import Phase
from serve_app.simulated.profiles import PROFILES
from serve_app.simulated.sleeping import copy_s
from tests.core.sleep_world import SleepWorld

NAMES = "abcdef"
START_S = 40.0
COPY_S = copy_s(PROFILES["a10g-llama-8b"])
ANSWER_S = 2.0
AFTER_S = 60.0
NUM_GAPS = 200
SLOW = 0.05
_PARTS = {Phase.DRAINING: "drain", Phase.FALLING_ASLEEP: "sleep", Phase.WAKING: "wake-up"}
Arrivals = list[tuple[float, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--gaps", type=float, nargs="+", default=[180.0, 300.0, 600.0], help="mean seconds between two requests")
    parser.add_argument("--after", type=float, default=AFTER_S, help="sleep.after_s")
    arguments = parser.parse_args()
    print(f"a wake-up: {COPY_S:.2f} s; {ANSWER_S:.0f} s an answer; after_s {arguments.after:.0f}\n")
    print(
        f"| gap s | side | requests | p50 | p95 | p99 - wake-up | 95 % interval | seeds | over wake-up + 1 s % |\n|{'---|' * 9}"
    )
    worlds = []
    for gap_s in arguments.gaps:
        runs = [zipf(gap_s=gap_s, span_s=NUM_GAPS * gap_s, seed=seed) for seed in arguments.seeds]
        here = [with_sleep(arrivals, after_s=arguments.after) for arrivals in runs]
        worlds += here
        _row(gap_s, "here", [world.ttfts_s for world in here])
        _row(gap_s, "ideal, sleeps when asked", [ideal(arrivals, stays_s=arguments.after) for arrivals in runs])
        _row(gap_s, "ideal, sleeps when idle", [ideal(arrivals, stays_s=0.0) for arrivals in runs])
    print(f"\nThe slowest {SLOW:.0%} of all requests spent, in the mean:", slow_parts(worlds))


def zipf(*, gap_s: float, span_s: float, seed: int) -> Arrivals:
    """Return Poisson arrivals, ``gap_s`` apart in the mean; the n-th model gets a share of them that is proportional to 1/n."""
    draw, at, arrivals = random.Random(seed), 0.0, Arrivals()
    weights = [1 / rank for rank in range(1, len(NAMES) + 1)]
    while (at := at + draw.expovariate(1 / gap_s)) < span_s:
        arrivals.append((at, draw.choices(NAMES, weights)[0]))
    return arrivals


def with_sleep(arrivals: Arrivals, *, after_s: float = AFTER_S) -> SleepWorld:
    """Return the world after the arrivals; three models share a GPU, as Ray places them. All have started once before the first."""
    world = SleepWorld(after_s=after_s)
    for number, name in enumerate(NAMES):
        world.add(name, f"gpu {number % 2}", start_s=START_S, sleep_s=COPY_S, wake_s=COPY_S)
    while world.num_starts < len(NAMES) or any(e.changes_at < math.inf for e in world.engines.values()):
        world.turn()
    began = world.now
    for at, name in arrivals:
        while world.now < began + at:
            world.pass_quiet(began + at)
            world.turn(lasting_s=ANSWER_S)
        world.ask(name)
    while any(e.waiting for e in world.engines.values()):
        world.turn(lasting_s=ANSWER_S)
    return world


def ideal(arrivals: Arrivals, *, stays_s: float) -> list[float]:
    """Return the times to the first token, in order of arrival at each GPU, if no news takes time and a drain ends with its last answer.

    Args:
        stays_s: Seconds after its last answer for which a model stays awake though no other asks; the first that asks ends them.
    """
    gpus, ttfts_s = [_Gpu(), _Gpu()], []
    for at, name in arrivals:
        gpu = gpus[NAMES.index(name) % 2]
        if gpu.awake != name or at >= gpu.busy_until + stays_s:
            sleeps_at = max(gpu.busy_until, min(at, gpu.busy_until + stays_s))
            gpu.awake, gpu.serves_at = name, max(at, sleeps_at + COPY_S) + COPY_S
        begins_at = max(at, gpu.serves_at)
        gpu.busy_until = max(gpu.busy_until, begins_at + ANSWER_S)
        ttfts_s.append(begins_at - at)
    return ttfts_s


class _Gpu:
    """Which model has it, and until when that model has answers to make."""

    awake: str | None = None
    serves_at = busy_until = -math.inf


def slow_parts(worlds: list[SleepWorld]) -> str:
    """Return how the slowest requests spent their time, from each world's log of phases."""
    served = [(ttft_s, at, name, world) for world in worlds for at, name, ttft_s in world.served]
    slowest = sorted(served, key=lambda each: each[0])[-math.ceil(SLOW * len(served)) :]
    spent: dict[str, float] = defaultdict(float)
    for ttft_s, at, name, world in slowest:
        gpus = world.engines[name].applicant.gpus
        phases: dict[str, list[tuple[float, Phase]]] = defaultdict(list)
        for since, other, phase in world.phases:
            if world.engines[other].applicant.gpus == gpus and since <= at:
                phases[other].append((since, phase))
        known_s = 0.0
        for changes in phases.values():
            ends = [since for since, _ in changes[1:]] + [at]
            for (since, phase), until in zip(changes, ends, strict=True):
                lasted_s = until - max(since, at - ttft_s)
                if phase in _PARTS and lasted_s > 0:
                    spent[_PARTS[phase]] += lasted_s
                    known_s += lasted_s
        spent["news and answers of others"] += ttft_s - known_s
    return ", ".join(f"{part} {seconds / len(slowest):.2f} s" for part, seconds in sorted(spent.items()))


def _row(gap_s: float, side: str, runs: list[list[float]]) -> None:
    pooled = np.sort(np.concatenate(runs))
    seeds = sorted(quantile(np.asarray(run), 0.99) - COPY_S for run in runs)
    low, high = order_interval(pooled, pooled, 0.99, pooled.size)
    over = float(np.mean(pooled > COPY_S + 1.0))
    p50, p95, p99 = (quantile(pooled, q) for q in (0.5, 0.95, 0.99))
    print(
        f"| {gap_s:.0f} | {side} | {pooled.size} | {p50:.2f} | {p95:.2f} | {p99 - COPY_S:.2f} | {low - COPY_S:.2f} to {high - COPY_S:.2f} "
        f"| {statistics.median(seeds):.2f} ({seeds[0]:.2f} to {seeds[-1]:.2f}) | {100 * over:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
