"""The loads of `scaling_cases.py`: those where the policy once went wrong, and the matrix of them all for fleets of any size.

A load says how many requests come at each time and how long they are. The matrix says it in replicas, so that each of its loads needs the
same number of them at its peak, by the highest rate at which one replica keeps the limit with requests of this kind.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.autoscaling import COLD_START_S, MAX_ANSWER, SLO, hardware, highest_rate
from benchmarks.scaling_policies import Fixed
from benchmarks.scaling_tables import ATTAINMENT
from serve_app.autoscaling.simulated_fleet import SimulatedFleet, World
from serve_app.autoscaling.simulated_replica import Job

PER_REPLICA = 4.58
"""Requests per second of this mix that one simulated replica takes within the limit."""
PROMPT, ANSWER = (64, 512), 128.0
LARGE = 500
"""From so many replicas on the loads of the matrix are shorter: a second of 1,000 replicas has 4,600 requests."""
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
    cv: float = 1.0
    """Of the gaps between arrivals: standard deviation over mean, of gamma's law."""
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
    needs: Rate | None = None
    """Replicas that the load needs at a time, without room: what the oracle knows. None where nobody has told it."""


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
        gap_s = _gap_s(case, at, rng)
        before, at = at, at + gap_s
        if before < case.changes_at <= at:
            at = case.changes_at  # the rate changes here: from now on gaps are others
            continue
        if at >= case.duration_s:
            return
        answer = min(MAX_ANSWER, max(1, int(rng.expovariate(1 / case.answer(at)))))
        yield Job(f"j{number}", at, rng.randint(*case.prompt(at)), answer)
        number += 1


def _gap_s(case: Case, at: float, rng: random.Random) -> float:
    mean_s = 1 / case.rate(at)
    if at < case.even_until:
        return mean_s
    return rng.expovariate(1 / mean_s) if case.cv == 1 else rng.gammavariate(case.cv**-2, mean_s * case.cv**2)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What requests are like; see `Case` for the fields."""

    prompt: tuple[int, int] = PROMPT
    answer: float = ANSWER
    cached_share: float = 0.0


@cache
def per_replica(kind: Kind, fleet: int) -> float:
    """Return the highest rate of such requests, per replica, at which ``fleet`` replicas keep the limit for an hour.

    To 0.04 requests/s, by one seed. In less than an hour a rate above what the replicas can do may keep the limit.
    """

    def keeps(rate: float) -> bool:
        case = _of_kind(kind, name="steady", rate=lambda _: fleet * rate, duration_s=3600, initial=fleet, needed=fleet)
        machine = replace(hardware(), cached_share=kind.cached_share)
        world = World(hardware=machine, initial=fleet, maximum=fleet, ttft_s=SLO.ttft_s)
        outcome = SimulatedFleet(world).run(jobs_of(case, seed=1), case.duration_s, Fixed())
        return outcome.attainment(SLO.ttft_s) >= ATTAINMENT

    return highest_rate(keeps, low=0.02, high=8.0, within=0.04)


def _of_kind(kind: Kind, **more: Any) -> Case:
    return Case(prompt=lambda _: kind.prompt, answer=lambda _: kind.answer, cached_share=kind.cached_share, **more)


def _line(points: dict[float, float]) -> Rate:
    """Return straight lines between the points (seconds: value)."""
    times, values = [*points], [*points.values()]
    return lambda t: float(np.interp(t, times, values))


def matrix(replicas: int, rate_of: Callable[[Kind, int], float] = per_replica) -> list[Case]:
    """Return one case for each way in which a load moves; each needs so many replicas after its change, or at its peak.

    Needed is what keeps the limit at an even load, by ``rate_of`` as many, but of 4 at most: more hardly help each other more.
    """
    n, is_large = float(replicas), replicas >= LARGE
    after_s = 120.0 if is_large else 180.0

    def one(kind: Kind) -> float:
        return rate_of(kind, min(replicas, 4))

    def case(name: str, needs: Rate, duration_s: float, *, kind: Kind = Kind(), **more: Any) -> Case:
        rate = one(kind)
        known = {
            "changes_at": 120.0,
            "cold_starts_s": (COLD_START_S,),
            "needed": replicas,
            "initial": max(1, math.ceil(needs(0.0))),
        }
        of = {"name": name, "rate": lambda t: rate * needs(t), "needs": needs, "duration_s": duration_s}
        return _of_kind(kind, **(of | known | more))

    def lengths(name: str, before: Kind, after: Kind) -> Case:
        rate, at = n * one(after), 120.0 if is_large else 300.0
        needs = step(rate / one(before), n, at)
        moving: dict[str, Any] = {
            "prompt": lambda t: (before if t < at else after).prompt,
            "answer": lambda t: (before if t < at else after).answer,
        }
        return replace(case(name, needs, at + 300), rate=lambda _: rate, changes_at=at, **moving)

    starts = {
        "starts of 300 s, 40 s believed, x2": (300.0,),
        "starts of 15 to 150 s, x2": (15.0, 150.0, 30.0, 90.0) * replicas,
    }
    initial = math.ceil(n / 2)
    step_s, x15 = 120 + after_s, "step x1.5"
    day_s, even_s, bursty_s = (600.0, 300.0, 200.0) if is_large else (3600.0, 3600.0, 1200.0)
    spike = _line({0: n / 10, 120: n / 10, 150: n, 270: n, 300: n / 10})
    return [
        *(case(f"step x{factor:g}", step(n / factor, n, 120), step_s) for factor in (1.5, 2.0)),
        case("spike x10 of two minutes", spike, 420),
        case("day", lambda t: n * (1 - 0.9 * math.cos(2 * math.pi * t / day_s)) / 1.9, day_s, changes_at=0.0),
        case("bursty, cv 3", lambda _: n, bursty_s, cv=3.0, changes_at=0.0),
        case(
            "trickle, one each 30 s, then all",
            step(1 / 30 / one(Kind()), n, 900),
            1200,
            changes_at=900.0,
            even_until=900.0,
            cold_starts_s=(120.0,),
        ),
        lengths("lengths: prompts x4.3", Kind(), Kind(prompt=(1000, 1500))),
        lengths("lengths: answers 64 to 256", Kind(answer=64.0), Kind(answer=256.0)),
        *(
            case(
                f"cache saves {share:.0%}, step x1.5",
                step(n / 1.5, n, 120),
                step_s,
                kind=Kind(prompt=(1500, 2500), cached_share=share),
            )
            for share in (0.0, 0.4, 0.8)
        ),
        *(
            case(name, step(n / 2, n, 120), 120 + 420, cold_starts_s=(COLD_START_S,) * initial + later)
            for name, later in starts.items()
        ),
        case("5 % silent, to a tenth", step(n, n / 10, 120), 420, silent_share=0.05),
        case("20 % silent, step x1.5", step(n / 1.5, n, 120), step_s, silent_share=0.2, requests=x15),
        case("controller away 15 to 5 s before a step x1.5", step(n / 1.5, n, 120), step_s, away=(105.0, 115.0), requests=x15),
        case("constant", lambda _: n, even_s, changes_at=0.0),
    ]
