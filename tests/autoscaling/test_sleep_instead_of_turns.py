"""This module runs six models on two simulated GPUs: with engines that sleep, and with the turns by starts of `autoscaling/turns.py`.

All times are virtual, and those of sleeping and waking are the simulated accelerator's.
"""

import math
from dataclasses import replace

import pytest

from benchmarks.sleeping import ANSWER_S, COPY_S, NAMES, START_S, Arrivals, ideal, with_sleep, zipf
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.signals import ModelLoad
from tests.autoscaling.plant import RULES

QUIET_S = 5.0


def starts_with_turns(arrivals: Arrivals) -> int:
    """Return the number of cold starts when the models take turns, with a decision each second, each five while no request is there."""
    rules = FleetRules(models=dict.fromkeys(NAMES, replace(RULES, gpus_per_replica=1)), max_gpus=2)
    scaler, starts = FleetScaler(rules), 0
    serves_at = dict.fromkeys(NAMES, math.inf)
    running: dict[str, list[float]] = {name: [] for name in NAMES}
    waiting = dict.fromkeys(NAMES, 0)
    left, now = list(reversed(arrivals)), 0.0
    while left or any(waiting.values()):
        quiet = not any(waiting.values()) and not any(running.values()) and left[-1][0] > now + QUIET_S
        step_s = QUIET_S if quiet else 1.0
        now += step_s
        came = dict.fromkeys(NAMES, 0)
        while left and left[-1][0] <= now:
            came[left.pop()[1]] += 1
        seen = {}
        for name in NAMES:
            serves, target = serves_at[name] <= now, serves_at[name] < math.inf
            waiting[name] += came[name]
            if serves:
                running[name] = [end for end in running[name] if end > now] + [now + ANSWER_S] * waiting[name]
                waiting[name] = 0
            load = ModelLoad(
                interval_s=step_s,
                requests=came[name],
                waiting=waiting[name],
                running=len(running[name]),
                cold_start_s=(START_S,) if serves else (),
            )
            seen[name] = Observation(running=int(serves), target=int(target), minimum=0, maximum=1, load=load)
        for name, decision in scaler.observe(FleetObservation(at=now, models=seen)).items():
            if decision.desired and serves_at[name] == math.inf:
                serves_at[name], starts = now + START_S, starts + 1
            elif not decision.desired and not running[name]:
                serves_at[name] = math.inf
    return starts


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def check(runs: list[Arrivals]) -> None:
    """Check the requests of all runs together: a single run has hardly more than a hundred."""
    worlds = [with_sleep(arrivals) for arrivals in runs]
    ttfts_s = [ttft_s for world in worlds for ttft_s in world.ttfts_s]
    assert len(ttfts_s) == sum(len(arrivals) for arrivals in runs)
    assert p99(ttfts_s) <= COPY_S + 1.0
    assert all(world.num_starts == len(NAMES) for world in worlds)
    assert sum(starts_with_turns(arrivals) for arrivals in runs) >= 5 * sum(world.num_starts for world in worlds)


def test_six_models_that_sleep_need_a_fifth_of_the_starts_and_answer_within_a_wake_up_and_a_second() -> None:
    check([zipf(gap_s=180.0, span_s=2 * 3600.0, seed=1)])


@pytest.mark.slow
@pytest.mark.parametrize("gap_s", [180.0, 300.0, 600.0])
def test_the_same_over_many_hours_seeds_and_intervals(gap_s: float) -> None:
    check([zipf(gap_s=gap_s, span_s=100 * gap_s, seed=seed) for seed in range(1, 6)])


def test_the_ideal_policies_pay_what_a_hand_count_says() -> None:
    """`a` and `c` share a GPU; the first answer of `a` ends 2 s after a wake-up."""
    idle, busy = [(0.0, "a"), (10.0, "c")], [(0.0, "a"), (1.0, "c"), (1.5, "a")]
    assert ideal(idle, stays_s=60.0) == pytest.approx([COPY_S, 2 * COPY_S])
    assert ideal(idle, stays_s=0.0) == pytest.approx([COPY_S, COPY_S])
    assert ideal([(0.0, "a"), (10.0, "a")], stays_s=60.0) == pytest.approx([COPY_S, 0.0])
    assert ideal(busy, stays_s=0.0) == pytest.approx([COPY_S, 3 * COPY_S + 1.0, 5 * COPY_S + 2.5])
