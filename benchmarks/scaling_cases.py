"""The cases are loads for which the policy once ordered far too much, too little or too often: a row each, on a simulated fleet.

    python -m benchmarks.scaling_cases                 all cases, ten CPU minutes
    python -m benchmarks.scaling_cases trickle lengths the cases whose names begin with one of these
    python -m benchmarks.scaling_cases --headroom 0    with another headroom than the default
    python -m benchmarks.scaling_cases --others        the other policies beside ours, on the cases that they can run
    python -m benchmarks.scaling_cases --replicas 65   instead, 17 shapes of load (`scaling_matrix.py`) for a fleet of 65 replicas

``most / needed`` measures cost: the most wanted replicas after the change of the load, over the replicas that its highest rate needs. One
replica serves `PER_REPLICA` requests/s within the limit or, with ``--replicas``, the rate of `scaling_matrix.RATES`. ``in time`` measures
latency: the share of all first tokens within 2 s.
"""

import argparse
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from benchmarks.autoscaling import FAR_OFF, PROFILE, SLO, TARGETS, hardware
from benchmarks.scaling_bound import least_replica_s
from benchmarks.scaling_loads import CASES, Case, jobs_of
from benchmarks.scaling_matrix import matrix
from benchmarks.scaling_policies import Oracle, Ours, Planner, Restarted, Silent, request_count
from benchmarks.scaling_tables import COUNT, Mean, best_count
from serve_app.autoscaling.decision import ScalingRules
from serve_app.autoscaling.simulation.simulated_fleet import Scaling, SimulatedFleet, World
from serve_app.simulated.profiles import PROFILES


class Result(NamedTuple):
    """The result of one policy on one case with one seed."""

    most: float
    """Most wanted replicas after the change of the load, over the needed replicas."""
    in_time: float
    replica_s: float
    changes: float
    """Number of changes of the number of replicas, after the change of the load."""
    first_s: float
    """Seconds from the change of the load to the first order; NaN without an order."""
    bound_s: float
    """The fewest replica-seconds with which any policy serves the same requests (`scaling_bound.py`)."""


def _ours(case: Case, headroom: float | None) -> Ours:
    rules = ScalingRules(slo=SLO) if headroom is None else ScalingRules(slo=SLO, headroom=headroom)
    if case.silent_share:
        return Silent(rules, case.silent_share)
    return Ours(rules) if case.away_s is None else Restarted(rules, case.away_s, keeps=case.keeps_memory)


def _others(case: Case) -> dict[str, Callable[[], Scaling]]:
    """Return the policies by label: the request counts by their targets, and the oracle if the case says what it needs."""
    found: dict[str, Callable[[], Scaling]] = {}
    if case.needs is not None:
        found["oracle"] = partial(Oracle, rate_at=case.needs, rate_per_replica=1.0, cold_start_s=max(case.cold_starts_s))
    found["planner"] = partial(Planner, hardware=hardware(), slo=SLO)
    return found | FAR_OFF | {f"{COUNT} {target}": partial(request_count, target, 60.0) for target in TARGETS}


def _is_for_others(case: Case) -> bool:
    """Return whether other policies can run the case: they have no members and no controller, and the planner ignores caches."""
    return not case.silent_share and case.away_s is None and not case.kind(0.0).cached_share


def result_of(case: Case, seed: int, policy: Scaling) -> Result:
    machine = replace(hardware(), cached_share=case.kind(0.0).cached_share)
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


def cases_of(replicas: int | None) -> list[Case]:
    """Return the matrix for a fleet of ``replicas``; without a number, the cases that went wrong before."""
    return CASES if replicas is None else matrix(replicas)


def _task(task: tuple[int | None, int, int, float | None]) -> Result:
    replicas, number, seed, headroom = task
    case = cases_of(replicas)[number]
    return result_of(case, seed, _ours(case, headroom))


def _task_of_another(task: tuple[int | None, int, int, str]) -> Result:
    replicas, number, seed, label = task
    case = cases_of(replicas)[number]
    return result_of(case, seed, _others(case)[label]())


def line(case: Case, results: list[Result]) -> str:
    """Return the table row of one case: means over all seeds, and the worst seed."""
    first_s = fmean(result.first_s for result in results)
    replica_s = Mean.of(r.replica_s for r in results)
    ratios = f"{fmean(r.most for r in results):.2f}, {max(r.most for r in results):.2f}"
    first = "–" if math.isnan(first_s) else f"{first_s:.0f} s"
    cost = f"{replica_s.text(',.0f')} | {replica_s.value / fmean(r.bound_s for r in results):.2f}"
    return f"| {case.name} | {case.needed} | {ratios} | {_in_time(results)} | {cost} | {fmean(r.changes for r in results):.1f} | {first} |"


def line_beside_others(case: Case, ours: Sequence[Result], others: Mapping[str, Sequence[Result]]) -> str:
    """Return the table row of one case: for each policy the share in time, its worst seed, and the replica-seconds over ours.

    Of the request counts, only the best in hindsight (`best_count`) is shown, with its target. All policies have the same seeds.
    """
    replica_s = {label: fmean(r.replica_s for r in results) for label, results in others.items()}
    counts = [label for label in others if label.startswith(COUNT)]
    pairs = {label: (fmean(r.in_time for r in others[label]), replica_s[label]) for label in counts}
    best = best_count(pairs, fmean(r.in_time for r in ours))
    base_s = fmean(r.replica_s for r in ours)
    cells = [f"{_in_time(ours)}; 1.00"]
    cells += [f"{_in_time(results)}; {replica_s[label] / base_s:.2f}" for label, results in others.items() if label not in counts]
    cells.append(f"{_in_time(others[best])}; {replica_s[best] / base_s:.2f} ({best.removeprefix(COUNT).strip()})")
    return f"| {case.name} | {' | '.join(cells)} |"


def _in_time(results: Sequence[Result]) -> str:
    return f"{Mean.of(r.in_time for r in results).text('.1%')}, {min(r.in_time for r in results):.1%}"


def _pool() -> ProcessPoolExecutor:
    # A run keeps millions of objects and makes no cycles, so the collector would only cost a tenth of the time.
    return ProcessPoolExecutor(max_workers=2, initializer=gc.disable)


def _print_beside_others(replicas: int | None, chosen: list[int], seeds: Sequence[int]) -> None:
    cases = cases_of(replicas)
    labels = [*_others(cases[chosen[0]])]  # the same for all cases
    names = ["serve-app", *(label for label in labels if not label.startswith(COUNT))]
    print(f"| in time, worst; replica-s over ours | {' | '.join(names)} | {COUNT}, best of {len(TARGETS)} (target) |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    with _pool() as pool:
        ours = pool.map(_task, [(replicas, i, seed, None) for i in chosen for seed in seeds])
        others = pool.map(_task_of_another, [(replicas, i, seed, label) for i in chosen for label in labels for seed in seeds])
        for i in chosen:
            own = [next(ours) for _ in seeds]
            print(line_beside_others(cases[i], own, {label: [next(others) for _ in seeds] for label in labels}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of cases; all without")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--replicas", type=int, help="every way in which a load moves, for so many; 1000: an hour of CPU for a seed"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--headroom", type=float, help="in place of the default")
    which.add_argument("--others", action="store_true", help="the other policies beside ours")
    options = parser.parse_args()
    if options.replicas is not None and options.replicas < 1:
        parser.error(f"--replicas {options.replicas}: 1 at least")
    if options.headroom is not None and not 0 <= options.headroom < math.inf:
        parser.error(f"--headroom {options.headroom}: 0 at least, and finite")
    cases = cases_of(options.replicas)
    chosen = [i for i, case in enumerate(cases) if case.name.startswith(tuple(options.names) or "")]
    if options.others:
        chosen = [i for i in chosen if _is_for_others(cases[i])]
    if not chosen:
        why = ", or the other policies cannot run it" if options.others else ""
        parser.error(
            f"no case's name begins with {' or '.join(options.names)}{why}; there are: {'; '.join(c.name for c in cases)}"
        )
    if options.others:
        _print_beside_others(options.replicas, chosen, options.seeds)
        return
    print("| case (simulated) | needed | most / needed, worst | in time, worst | replica-s | x bound | changes | first order |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with _pool() as pool:
        found = pool.map(_task, [(options.replicas, i, seed, options.headroom) for i in chosen for seed in options.seeds])
        for i in chosen:
            print(line(cases[i], [next(found) for _ in options.seeds]), flush=True)


if __name__ == "__main__":
    main()
