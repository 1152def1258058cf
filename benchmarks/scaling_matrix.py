"""This module scales loads of many shapes to a fleet: after `matrix(n)` the highest rate of each load needs n replicas.

python -m benchmarks.scaling_matrix    measures `RATES` again, in six CPU minutes
"""

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from benchmarks.autoscaling import COLD_START_S, SLO, hardware, highest_rate
from benchmarks.scaling_loads import Case, Rate, RequestKind, always, jobs_of, step
from benchmarks.scaling_policies import Fixed
from benchmarks.scaling_tables import ATTAINMENT
from serve_app.autoscaling.simulation.simulated_fleet import SimulatedFleet, World

USUAL = RequestKind()
LONG_PROMPTS = RequestKind(prompt=(1000, 1500))
SHORT_ANSWERS, LONG_ANSWERS = RequestKind(answer=64.0), RequestKind(answer=256.0)
CACHED = tuple(RequestKind(prompt=(1500, 2500), cached_share=share) for share in (0.0, 0.4, 0.8))
FLEETS = (1, 4)
"""Fleet sizes at which the rates were measured. Larger fleets are assumed to serve as much per replica as four."""
RATES: dict[RequestKind, tuple[float, float]] = {
    USUAL: (4.73, 5.13),
    LONG_PROMPTS: (0.55, 1.20),
    SHORT_ANSWERS: (5.79, 6.35),
    LONG_ANSWERS: (2.76, 3.04),
    CACHED[0]: (0.08, 0.55),
    CACHED[1]: (0.58, 1.08),
    CACHED[2]: (1.58, 1.98),
}
"""The highest requests per second and replica at which each of `FLEETS` keeps the limit for an hour. Simulated; one seed."""
LARGE = 500
"""Fleets of this size or larger get shorter cases: 1,000 replicas take 5,100 requests each second."""
CHANGES_AT_S = 120.0


def matrix(replicas: int) -> list[Case]:
    """Return the cases for a fleet of this size. All but those of a constant rate change it, or the lengths of requests."""
    n, is_large = float(replicas), replicas >= LARGE
    step_s = CHANGES_AT_S + (120.0 if is_large else 180.0)
    constant_s, bursty_s = (300.0, 200.0) if is_large else (3600.0, 1200.0)
    day_s = 3600.0  # a shorter day rises faster than starts of 40 s can follow
    half, tenth = step(n / 1.5, n, CHANGES_AT_S), step(n, n / 10, CHANGES_AT_S)
    by_half = _case(n, "step x1.5", half, step_s)
    trickle = _case(n, "trickle, one each 30 s, then all", step(1 / 30 / _rate(n, USUAL), n, 900.0), 1200.0)
    return [
        by_half,
        _case(n, "step x2", step(n / 2, n, CHANGES_AT_S), step_s),
        _case(n, "spike x10 of two minutes", _lines({0: n / 10, 120: n / 10, 150: n, 270: n, 300: n / 10}), 420.0),
        replace(_case(n, "day", lambda t: n * (1 - 0.9 * math.cos(2 * math.pi * t / day_s)) / 1.9, day_s), changes_at=0.0),
        # The variation of the number of requests per second is the same for all fleet sizes.
        replace(_case(n, "bursty, gaps with cv 1.5 sqrt(n)", lambda _: n, bursty_s), cv=1.5 * n**0.5, changes_at=0.0),
        replace(trickle, changes_at=900.0, equal_gaps_until_s=900.0, cold_starts_s=(120.0,)),
        _lengths_case(n, "lengths: prompts x4.3", USUAL, LONG_PROMPTS, at=CHANGES_AT_S if is_large else 300.0),
        _lengths_case(n, "lengths: answers 64 to 256", SHORT_ANSWERS, LONG_ANSWERS, at=CHANGES_AT_S if is_large else 300.0),
        *(_case(n, f"cache saves {kind.cached_share:.0%}, step x1.5", half, step_s, kind) for kind in CACHED),
        _starts_case(n, "starts of 300 s, 40 s believed, x2", (300.0,)),
        _starts_case(n, "starts of 15 to 150 s, x2", (15.0, 150.0, 30.0, 90.0) * replicas),
        replace(_case(n, "5 % silent, to a tenth", tenth, 420.0), silent_share=0.05),
        replace(by_half, name="20 % silent, step x1.5", silent_share=0.2, requests_of=by_half.name),
        replace(by_half, name="controller away 15 to 5 s before a step x1.5", away_s=(105.0, 115.0), requests_of=by_half.name),
        replace(_case(n, "constant", lambda _: n, constant_s), changes_at=0.0),
    ]


def _rate(n: float, kind: RequestKind) -> float:
    one, four = RATES[kind]
    return one if n < FLEETS[1] else four


def _case(n: float, name: str, needs: Rate, duration_s: float, kind: RequestKind = USUAL) -> Case:
    rate = _rate(n, kind)
    return Case(
        name=name,
        rate=lambda t: rate * needs(t),
        duration_s=duration_s,
        initial=math.ceil(needs(0.0)),
        needed=round(n),
        changes_at=CHANGES_AT_S,
        cold_starts_s=(COLD_START_S,),
        kind=partial(always, kind),
        needs=needs,
    )


def _lengths_case(n: float, name: str, before: RequestKind, after: RequestKind, *, at: float) -> Case:
    """Return a case with a constant rate and requests that become longer."""
    rate = n * _rate(n, after)
    case = _case(n, name, step(rate / _rate(n, before), n, at), at + 300)
    return replace(case, rate=lambda _: rate, changes_at=at, kind=lambda t: before if t < at else after)


def _starts_case(n: float, name: str, later_starts_s: Sequence[float]) -> Case:
    """Return a case of twice the load, in which ordered replicas take the given start times. The oracle knows when to order them."""
    at = max(later_starts_s) + 30
    case = _case(n, name, step(n / 2, n, at), at + 420)
    return replace(case, changes_at=at, cold_starts_s=(COLD_START_S,) * case.initial + tuple(later_starts_s))


def _lines(points: dict[float, float]) -> Rate:
    """Return the rate with straight lines between the points (seconds: value)."""
    times, values = [*points], [*points.values()]
    return lambda t: float(np.interp(t, times, values))


def measured_rate(fleet: int, kind: RequestKind) -> float:
    """Return the highest rate of such requests, per replica, at which ``fleet`` replicas keep the limit; to 0.04 requests/s.

    The load lasts an hour: for a shorter time, a rate above the replicas' capacity keeps the limit too.
    """

    def keeps(rate: float) -> bool:
        name, constant = "steady", fleet * rate
        case = Case(name=name, rate=lambda _: constant, duration_s=3600, initial=fleet, needed=fleet, kind=partial(always, kind))
        machine = replace(hardware(), cached_share=kind.cached_share)
        world = World(hardware=machine, initial=fleet, maximum=fleet, ttft_s=SLO.ttft_s)
        outcome = SimulatedFleet(world).run(jobs_of(case, seed=1), case.duration_s, Fixed())
        return outcome.attainment(SLO.ttft_s) >= ATTAINMENT

    return highest_rate(keeps, low=0.02, high=8.0, within=0.04)


def main() -> None:
    tasks = [*product(RATES, FLEETS)]
    with ProcessPoolExecutor(max_workers=2) as pool:
        rates = pool.map(measured_rate, [fleet for _, fleet in tasks], [kind for kind, _ in tasks])
        for (kind, fleet), rate in zip(tasks, rates, strict=True):
            print(f"{kind}, {fleet} replicas: {rate:.2f} requests/s each", flush=True)


if __name__ == "__main__":
    main()
