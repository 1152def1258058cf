"""This module has the loads of `scaling_cases.py`: the type of a load, and the loads that once misled the policy. Pure."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.autoscaling import MAX_ANSWER
from serve_app.autoscaling.simulation.simulated_replica import Job

PER_REPLICA = 4.58
"""Requests per second of the usual kind that one simulated replica serves within the limit."""
Rate = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class RequestKind:
    """A kind of requests: lengths in tokens, and the share of each prompt that is cached."""

    prompt: tuple[int, int] = (64, 512)
    """Shortest and longest prompt."""
    answer: float = 128.0
    """Mean of the exponential lengths."""
    cached_share: float = 0.0
    """Share of each prompt that the prefix cache saves; constant."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load with one change."""

    name: str
    rate: Rate
    """Requests per second over time."""
    duration_s: float
    initial: int
    needed: int
    """Number of replicas that the highest rate needs."""
    changes_at: float = 0.0
    cold_starts_s: tuple[float, ...] = (40.0,)
    kind: Callable[[float], RequestKind] = lambda _: RequestKind()
    """The kind of requests at a time."""
    equal_gaps_until_s: float = 0.0
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals, whose law is gamma; 1 is Poisson."""
    away_s: tuple[float, float] | None = None
    """Begin and end of a time without a controller; None if the same controller runs all the time."""
    keeps_memory: bool = True
    """Whether the next controller gets the memory of the previous one."""
    silent_share: float = 0.0
    """Share of the replicas that stop reporting after a minute, but continue to serve."""
    requests_of: str = ""
    """Name of the case whose requests are used; empty for its own requests."""
    needs: Rate | None = None
    """Replicas that the load needs at a time, without headroom, for the oracle. None: the oracle does not run this case."""


def step(before: float, after: float, at: float) -> Rate:
    return lambda t: before if t < at else after


def always(kind: RequestKind, _: float) -> RequestKind:
    return kind


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
            equal_gaps_until_s=1800,
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
        requests_of="step x1.5 from 10 replicas",
    ),
    Case(
        name="lengths, prompts x4.3 at 12/s",
        rate=step(12, 12, 0),
        duration_s=900,
        initial=4,
        needed=12,
        changes_at=600,
        kind=lambda t: RequestKind() if t < 600 else RequestKind(prompt=(1000, 1500)),
    ),
    Case(
        name="lengths, answers 64 to 256 at 12/s",
        rate=step(12, 12, 0),
        duration_s=900,
        initial=3,
        needed=4,
        changes_at=600,
        kind=lambda t: RequestKind(answer=64.0 if t < 600 else 256.0),
    ),
    *(
        Case(
            name=f"restart from {began:g} to {began + 10:g} s, {'kept' if keeps else 'anew'}, step x1.5 from 8 replicas",
            rate=step(32.8, 49.2, 120),
            duration_s=300,
            initial=8,
            needed=_needed(49.2),
            changes_at=120,
            away_s=(began, began + 10),
            keeps_memory=keeps,
            requests_of="step x1.5 from 8 replicas",
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
            kind=partial(always, RequestKind(prompt=(1500, 2500), cached_share=share)),
        )
        for share, needed in ((0.0, 8), (0.4, 5), (0.8, 3))
    ),
    *(
        Case(name=f"constant {rate}/s", rate=step(rate, rate, 0), duration_s=3600, initial=_needed(rate), needed=_needed(rate))
        for rate in (4.3, 8.6, 13.0)
    ),
]


def jobs_of(case: Case, seed: int) -> Iterator[Job]:
    """Yield the requests of a case in the order of due times.

    Each gap is drawn with the rate at its start. If the rate changes gradually, requests are late by a part of a gap.
    """
    rng = random.Random(f"{case.requests_of or case.name}/{seed}")
    at, number = 0.0, 0
    while True:
        before, at = at, at + _gap_s(case, at, rng)
        if before < case.changes_at <= at:
            at = case.changes_at  # the rate changes here, and with it the law of the gaps
            continue
        if at >= case.duration_s:
            return
        kind = case.kind(at)
        answer = min(MAX_ANSWER, max(1, int(rng.expovariate(1 / kind.answer))))
        yield Job(f"j{number}", at, rng.randint(*kind.prompt), answer)
        number += 1


def _gap_s(case: Case, at: float, rng: random.Random) -> float:
    rate = case.rate(at)
    if at < case.equal_gaps_until_s:
        return 1 / rate
    return rng.expovariate(rate) if case.cv == 1 else rng.gammavariate(case.cv**-2, case.cv**2 / rate)
