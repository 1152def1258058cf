"""The policy where it once ordered far too much, far too little or too often: one row per case, on the simulated fleet.

    python -m benchmarks.scaling_cases                 all cases, a few CPU minutes
    python -m benchmarks.scaling_cases trickle lengths those whose names begin so
    python -m benchmarks.scaling_cases --headroom 0    with other room for steps than the default
    python -m benchmarks.scaling_cases --others        the other policies beside ours, of the cases that they know enough for

``most / needed`` is the money: the most replicas wanted after the change of the load, over those that its last rate needs by the
highest rate at which one replica keeps the limit (`benchmarks/autoscaling.py`). ``in time`` is the latency: the share of all first tokens
within 2 s.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from benchmarks.autoscaling import FAR_OFF, MAX_ANSWER, PROFILE, SLO, TARGETS, hardware
from benchmarks.scaling_bound import least_replica_s
from benchmarks.scaling_policies import Ours, Planner, Restarted, Silent, request_count
from benchmarks.scaling_tables import COUNT, Mean, best_count
from serve_app.autoscaling.decision import Rule
from serve_app.autoscaling.simulated_fleet import Scaling, SimulatedFleet, World
from serve_app.autoscaling.simulated_replica import Job
from serve_app.simulated.profiles import PROFILES

PER_REPLICA = 4.58
"""Requests per second of this mix that one simulated replica takes within the limit."""
PROMPT, ANSWER = (64, 512), 128.0
Rate = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One change of the load."""

    name: str
    rate: Rate
    """Requests per second."""
    duration_s: float
    initial: int
    needed: int
    """Replicas for the load after the change."""
    changes_at: float = 0.0
    cold_starts_s: tuple[float, ...] = (40.0,)
    prompt: Callable[[float], tuple[int, int]] = lambda _: PROMPT
    """Shortest and longest prompt at a time."""
    answer: Callable[[float], float] = lambda _: ANSWER
    """Mean of the exponential lengths of answers at a time."""
    even_until: float = 0.0
    """Until then arrivals come at equal distances."""
    cached_share: float = 0.0
    """Share of each prompt that the prefix cache saves."""
    away: tuple[float, float] | None = None
    """From when to when no controller runs; None where the same one runs all the time."""
    keeps: bool = True
    """Whether the controller after that gets what the one before knew."""
    silent_share: float = 0.0
    """Share of the replicas that fall silent after a minute, and serve on."""
    requests: str = ""
    """Name of the case whose requests these are; empty for its own."""


def step(before: float, after: float, at: float) -> Rate:
    return lambda t: before if t < at else after


def _needed(rate: float) -> int:
    return math.ceil(rate / PER_REPLICA)


CASES = [
    *(
        Case(
            name=f"trickle, one each {gap} s, then 12/s",
            rate=step(1 / gap, 12, 1800),
            duration_s=2100,
            initial=1,
            needed=3,
            changes_at=1800,
            cold_starts_s=(120.0,),
            even_until=1800,
        )
        for gap in (30, 60)
    ),
    *(
        Case(
            name=f"step x{factor:g} from {n} replicas",
            rate=step(n * 4.1, n * 4.1 * factor, 120),
            duration_s=300,
            initial=n,
            needed=_needed(n * 4.1 * factor),
            changes_at=120,
        )
        for n in (1, 8, 10, 65)
        for factor in (1.5, 2.0)
    ),
    Case(
        name="start of 300 s, 40 s believed, 12 to 24/s",
        rate=step(12, 24, 600),
        duration_s=1500,
        initial=4,
        needed=_needed(24),
        changes_at=600,
        cold_starts_s=(40.0,) * 4 + (300.0,),
    ),
    Case(
        name="starts of 15 to 150 s, 8 to 16/s",
        rate=step(8, 16, 600),
        duration_s=1200,
        initial=3,
        needed=_needed(16),
        changes_at=600,
        cold_starts_s=(40.0,) * 3 + (15.0, 150.0, 30.0, 90.0) * 10,
    ),
    Case(
        name="5 % silent, 120 to 12/s",
        rate=step(120, 12, 120),
        duration_s=600,
        initial=30,
        needed=30,
        changes_at=120,
        silent_share=0.05,
    ),
    Case(
        name="20 % silent, step x1.5 from 10 replicas",
        rate=step(41, 61.5, 120),
        duration_s=300,
        initial=10,
        needed=_needed(61.5),
        changes_at=120,
        silent_share=0.2,
        requests="step x1.5 from 10 replicas",
    ),
    Case(
        name="lengths, prompts x4.3 at 12/s",
        rate=step(12, 12, 0),
        duration_s=900,
        initial=4,
        needed=12,
        changes_at=600,
        prompt=lambda t: PROMPT if t < 600 else (1000, 1500),
    ),
    Case(
        name="lengths, answers 64 to 256 at 12/s",
        rate=step(12, 12, 0),
        duration_s=900,
        initial=3,
        needed=4,
        changes_at=600,
        answer=lambda t: 64.0 if t < 600 else 256.0,
    ),
    *(
        Case(
            name=f"restart from {began:g} to {began + 10:g} s, {'kept' if keeps else 'anew'}, step x1.5 from 8 replicas",
            rate=step(32.8, 49.2, 120),
            duration_s=300,
            initial=8,
            needed=_needed(49.2),
            changes_at=120,
            away=(began, began + 10),
            keeps=keeps,
            requests="step x1.5 from 8 replicas",
        )
        for began in (105.0, 130.0)
        for keeps in (True, False)
    ),
    *(
        Case(
            name=f"cache saves {share:.0%} of prompts of 1,500 to 2,500, 4 to 6/s",
            rate=step(4, 6, 300),
            duration_s=600,
            initial=4,
            needed=needed,
            changes_at=300,
            prompt=lambda _: (1500, 2500),
            cached_share=share,
        )
        for share, needed in ((0.0, 8), (0.4, 5), (0.8, 3))
    ),
    *(
        Case(name=f"constant {rate}/s", rate=step(rate, rate, 0), duration_s=3600, initial=_needed(rate), needed=_needed(rate))
        for rate in (4.3, 8.6, 13.0)
    ),
]


def jobs_of(case: Case, seed: int) -> Iterator[Job]:
    """Yield the requests of a case, by their due times."""
    rng = random.Random(f"{case.requests or case.name}/{seed}")
    at, number = 0.0, 0
    while True:
        gap_s = 1 / case.rate(at) if at < case.even_until else rng.expovariate(case.rate(at))
        before, at = at, at + gap_s
        if before < case.changes_at <= at:
            at = case.changes_at  # the rate changes here: from now on gaps are others
            continue
        if at >= case.duration_s:
            return
        answer = min(MAX_ANSWER, max(1, int(rng.expovariate(1 / case.answer(at)))))
        yield Job(f"j{number}", at, rng.randint(*case.prompt(at)), answer)
        number += 1


class Result(NamedTuple):
    """One policy on one case with one seed."""

    most: float
    """The most replicas wanted after the change of the load, over those needed."""
    in_time: float
    replica_s: float
    changes: float
    """Of the number of replicas, after the change of the load."""
    first_s: float
    """Seconds from that to the first order; not a number without one."""
    bound_s: float
    """The fewest replica-seconds with which any policy serves the same requests (`scaling_bound.py`)."""


def _ours(case: Case, headroom: float | None) -> Ours:
    rule = Rule(slo=SLO) if headroom is None else Rule(slo=SLO, headroom=headroom)
    if case.silent_share:
        return Silent(rule, case.silent_share)
    return Ours(rule) if case.away is None else Restarted(rule, case.away, keeps=case.keeps)


def _others() -> dict[str, Callable[[], Scaling]]:
    """Return label -> policy; the request counts by their targets."""
    planner: dict[str, Callable[[], Scaling]] = {"planner": partial(Planner, hardware=hardware(), slo=SLO)}
    return planner | FAR_OFF | {f"{COUNT} {target}": partial(request_count, target, 60.0) for target in TARGETS}


def _is_for_others(case: Case) -> bool:
    """Return whether other policies can run the case: they know no members and no controller, and the planner no cache."""
    return not case.silent_share and case.away is None and not case.cached_share


def result_of(case: Case, seed: int, policy: Scaling) -> Result:
    machine = replace(hardware(), cached_share=case.cached_share)
    world = World(hardware=machine, initial=case.initial, maximum=4000, cold_starts_s=case.cold_starts_s, ttft_s=SLO.ttft_s)
    outcome = SimulatedFleet(world).run(jobs_of(case, seed), case.duration_s, policy)
    after = [change for change in outcome.changes if change.at >= case.changes_at]
    most = max(wanted for at, wanted, _, _ in outcome.timeline if at >= case.changes_at)
    ups = [change.at - case.changes_at for change in after if change.after > change.before]
    return Result(
        most=most / case.needed,
        in_time=outcome.attainment(SLO.ttft_s),
        replica_s=outcome.replica_s,
        changes=len(after),
        first_s=ups[0] if ups else math.nan,
        bound_s=least_replica_s(outcome, machine, PROFILES[PROFILE], minimum=world.minimum),
    )


def _task(task: tuple[int, int, float | None]) -> Result:
    number, seed, headroom = task
    return result_of(CASES[number], seed, _ours(CASES[number], headroom))


def _task_of_another(task: tuple[int, int, str]) -> Result:
    number, seed, label = task
    return result_of(CASES[number], seed, _others()[label]())


def line(case: Case, results: list[Result]) -> str:
    """Return the row of one case's table: means of all seeds, and the worst."""
    first_s = fmean(result.first_s for result in results)
    in_time, replica_s = Mean.of(r.in_time for r in results), Mean.of(r.replica_s for r in results)
    ratios = f"{fmean(r.most for r in results):.2f}, {max(r.most for r in results):.2f}"
    shares = f"{in_time.text('.1%')}, {min(r.in_time for r in results):.1%}"
    first = "–" if math.isnan(first_s) else f"{first_s:.0f} s"
    cost = f"{replica_s.text(',.0f')} | {replica_s.value / fmean(r.bound_s for r in results):.2f}"
    return f"| {case.name} | {case.needed} | {ratios} | {shares} | {cost} | {fmean(r.changes for r in results):.1f} | {first} |"


def line_beside_others(case: Case, ours: Result, others: dict[str, Result]) -> str:
    """Return the row of one case: of each policy the share in time, and the replica-seconds over ours.

    Of the request counts it has the one that is the best in hindsight (`best_count`), with its target.
    """
    counts = {label: (r.in_time, r.replica_s) for label, r in others.items() if label.startswith(COUNT)}
    best = best_count(counts, ours.in_time)
    shown = [ours, *(r for label, r in others.items() if label not in counts), others[best]]
    cells = " | ".join(f"{r.in_time:.1%}, {r.replica_s / ours.replica_s:.2f}" for r in shown)
    return f"| {case.name} | {cells} ({best.removeprefix(COUNT).strip()}) |"


def _print_beside_others(chosen: list[int], seed: int) -> None:
    labels = [*_others()]
    names = ["serve-app", *(label for label in labels if not label.startswith(COUNT))]
    print(f"| seed {seed}: in time, replica-s over ours | {' | '.join(names)} | {COUNT}, best of {len(TARGETS)} (target) |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        ours = pool.map(_task, [(i, seed, None) for i in chosen])
        others = pool.map(_task_of_another, [(i, seed, label) for i in chosen for label in labels])
        for i in chosen:
            print(line_beside_others(CASES[i], next(ours), {label: next(others) for label in labels}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of cases; all without")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--headroom", type=float, help="in place of the default")
    which.add_argument("--others", action="store_true", help="the other policies beside ours, with the first seed")
    options = parser.parse_args()
    chosen = [i for i, case in enumerate(CASES) if case.name.startswith(tuple(options.names) or "")]
    if options.others:
        chosen = [i for i in chosen if _is_for_others(CASES[i])]
    if not chosen:
        parser.error(f"no case's name begins with one of {', '.join(options.names)}, or the other policies cannot run it")
    if options.others:
        _print_beside_others(chosen, options.seeds[0])
        return
    print("| case (simulated) | needed | most / needed, worst | in time, worst | replica-s | x bound | changes | first order |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        found = pool.map(_task, [(i, seed, options.headroom) for i in chosen for seed in options.seeds])
        for i in chosen:
            print(line(CASES[i], [next(found) for _ in options.seeds]), flush=True)


if __name__ == "__main__":
    main()
