"""This benchmark runs autoscaling policies on a simulated fleet: SLO attainment, replica-seconds (docs/benchmarks.md).

    python -m benchmarks.autoscaling                     all scenarios, all policies, four seeds: table, figures of the first, JSON
    python -m benchmarks.autoscaling --scenarios diurnal one scenario
    python -m benchmarks.autoscaling --policies serve-app oracle planner
                                                         the policies whose labels begin with one of these; the first two are
                                                         needed: the tuned request count is left out
    python -m benchmarks.autoscaling --live RUN --bounds 1 4 --cold-starts 34 15
                                                         a live run of `serve-app-loadtest`, repeated in simulated time

The fleet is `serve_app/autoscaling/simulation/simulated_fleet.py`: the product's admission, routing and scaling code in simulated time,
with replicas whose steps take the times of an accelerator profile. The arrival laws are `loadtest`'s, so a live run can have the same load.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling_bound import least_replica_s
from benchmarks.scaling_figures import Timeline
from benchmarks.scaling_policies import Fixed, Keda, Oracle, Ours, Planner, RequestCount, request_count
from benchmarks.scaling_tables import ATTAINMENT, COUNT, Row, summaries, table, tuned
from loadtest.judge.analysis import summary_of
from loadtest.judge.metrics import read_records
from loadtest.plan.arrivals import due_times, generator
from loadtest.plan.laws import Arrival, Diurnal, FlashCrowd, Gamma, Poisson, Step
from loadtest.report.figures import RunData
from serve_app.autoscaling.capacity import Slo
from serve_app.autoscaling.decision import ScalingRules
from serve_app.autoscaling.simulation.simulated_fleet import Outcome, Scaling, SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, steps_of_profile
from serve_app.simulated.profiles import PROFILES

PROFILE = "a10g-llama-8b"
SLO = Slo(ttft_s=2.0, itl_s=0.1)
COLD_START_S = 40.0
SEEDS = (1, 2, 3, 4)
"""Seeds of arrivals and lengths: chance alone moves the best request count by a fifth."""
MAX_ANSWER = 1500
FAR_OFF: dict[str, Callable[[], Scaling]] = {"Ray Serve, target 2": RequestCount, "KEDA, waiting > 5": Keda}
TARGETS = (16, 24, 32, 48)
DOWN_DELAYS_S = (60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Scenario:
    """One law of arrivals, and the fleet that serves them."""

    name: str
    arrival: Arrival
    duration_s: float
    initial: int
    maximum: int = 1000

    def rate_at(self, t: float) -> float:
        """Return the law's requests per second, or the mean rate if the law is one of gaps."""
        law = self.arrival
        match law:
            case Step():
                return law.rate if t < law.at_s else law.to_rate
            case FlashCrowd():
                marks = np.cumsum([law.at_s, law.rise_s, law.hold_s, law.fall_s])
                return float(np.interp(t, marks, [law.rate, law.peak_rate, law.peak_rate, law.rate]))
            case Diurnal():
                return float(law.rate * (1 - law.amplitude * np.cos(2 * np.pi * t / law.period_s)))
            case Poisson() | Gamma():
                return law.rate
        raise ValueError(law.law)


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("step x1.5", Step(law="step", rate=12, to_rate=18, at_s=1200), 3600, initial=4),
        Scenario("step x2", Step(law="step", rate=8, to_rate=16, at_s=1200), 3600, initial=3),
        Scenario(
            "spike x10",
            FlashCrowd(law="flash-crowd", rate=4, peak_rate=40, at_s=600, rise_s=30, hold_s=180, fall_s=30),
            1800,
            initial=2,
        ),
        Scenario("diurnal", Diurnal(law="diurnal", rate=20, amplitude=0.9, period_s=7200), 7200, initial=1),
        Scenario("bursty", Gamma(law="gamma", rate=16, cv=3), 2400, initial=5),
    )
}


def hardware() -> Hardware:
    profile = PROFILES[PROFILE]
    # vLLM's defaults for an API server on this device.
    return Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=256)


def jobs_of(scenario: Scenario, seed: int) -> Iterator[Job]:
    """Yield the requests: prompts of 64 to 512 tokens, answers of exponential length with mean 128."""
    times = due_times(scenario.arrival, duration_s=scenario.duration_s, seed=seed)
    rng = generator(seed, "lengths")
    prompts = rng.integers(64, 513, times.size)
    answers = np.clip(rng.exponential(128, times.size).astype(int), 1, MAX_ANSWER)
    for i, (at, prompt, answer) in enumerate(zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True)):
        yield Job(f"j{i}", at, prompt, answer)


def simulate(scenario: Scenario, make: Callable[[], Scaling], seed: int) -> Outcome:
    world = World(
        hardware=hardware(),
        initial=scenario.initial,
        maximum=scenario.maximum,
        cold_starts_s=(COLD_START_S,),
        ttft_s=SLO.ttft_s,
    )
    return SimulatedFleet(world).run(jobs_of(scenario, seed), scenario.duration_s, make())


def rate_per_replica() -> float:
    """Return the highest Poisson rate at which one replica keeps the SLO, to 0.05 requests/s; the oracle is given this rate."""

    def keeps(rate: float) -> bool:
        steady = Scenario("steady", Poisson(law="poisson", rate=rate), 1800, initial=1, maximum=1)
        return simulate(steady, Fixed, SEEDS[0]).attainment(SLO.ttft_s) >= ATTAINMENT

    return highest_rate(keeps, low=0.5, high=20.0, within=0.05)


def highest_rate(keeps: Callable[[float], bool], *, low: float, high: float, within: float) -> float:
    """Return the highest rate that ``keeps`` the limit, at most ``within`` too low. ``low`` must keep the limit, and ``high`` must not."""
    while high - low > within:
        rate = (low + high) / 2
        low, high = (rate, high) if keeps(rate) else (low, rate)
    return low


def row_of(scenario: Scenario, policy: str, make: Callable[[], Scaling], seed: int) -> tuple[Row, Outcome]:
    began = time.process_time()
    outcome = simulate(scenario, make, seed)
    rises_at = getattr(scenario.arrival, "at_s", None)
    after = [c.at - rises_at for c in outcome.changes if rises_at is not None and c.at >= rises_at and c.after > c.before]
    row = Row(
        scenario=scenario.name,
        policy=policy,
        seed=seed,
        requests=len(outcome.jobs),
        attainment=outcome.attainment(SLO.ttft_s),
        ttft_p95_s=outcome.ttft_s(0.95),
        replica_s=outcome.replica_s,
        changes_per_hour=len(outcome.changes) / outcome.duration_s * 3600,
        most=max(wanted for _, wanted, _, _ in outcome.timeline),
        first_change_s=after[0] if after else None,
        cpu_s=time.process_time() - began,
        bound_s=least_replica_s(outcome, hardware(), PROFILES[PROFILE], minimum=1),
    )
    return row, outcome


def policies(scenario: Scenario, per_replica: float) -> dict[str, Callable[[], Scaling]]:
    """Return the policies by label; the request counts with each tried setting."""
    found: dict[str, Callable[[], Scaling]] = {
        "serve-app": partial(Ours, ScalingRules(slo=SLO)),
        "oracle": partial(Oracle, rate_at=scenario.rate_at, rate_per_replica=per_replica, cold_start_s=COLD_START_S),
    }
    found["planner"] = partial(Planner, hardware=hardware(), slo=SLO)
    found["serve-app, utilization 1"] = partial(Ours, ScalingRules(slo=SLO, utilization=1.0))
    found |= FAR_OFF
    for target, down_s in product(TARGETS, DOWN_DELAYS_S):
        found[f"{COUNT}, target {target}, down after {down_s:g} s"] = partial(request_count, target, down_s)
    return found


def _task(task: tuple[Scenario, str, float, int]) -> tuple[Row, Timeline]:
    scenario, policy, per_replica, seed = task
    row, outcome = row_of(scenario, policy, policies(scenario, per_replica)[policy], seed)
    return row, outcome.timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seeds", nargs="+", type=int, help="of arrivals and lengths")
    parser.add_argument("--policies", nargs="+", default=[""], help="beginnings of labels")
    which.add_argument("--live", type=Path, help="folder of a load test of a fleet that was scaled")
    parser.add_argument("--bounds", type=int, nargs=2, metavar=("MIN", "MAX"), help="replicas of the live fleet")
    parser.add_argument(
        "--cold-starts", type=float, nargs="+", help="seconds that the live fleet's replicas took, in their order"
    )
    parser.add_argument("--out", type=Path, default=Path("results/autoscaling"))
    parser.add_argument("--figures", type=Path, help="also copy the PNG there, as scaling-SCENARIO.png")
    options = parser.parse_args()
    if options.live:
        if options.bounds is None or options.cold_starts is None:
            parser.error("--live needs --bounds and --cold-starts")
        print(json.dumps(live_and_simulated(options.live, options.bounds, options.cold_starts), indent=1))
        return
    per_replica = rate_per_replica()
    chosen = [SCENARIOS[name] for name in options.scenarios]
    seeds = options.seeds or SEEDS
    results = run_all(chosen, per_replica, seeds, tuple(options.policies))
    compare(chosen, per_replica, results, seeds, options.out, options.figures)


def run_all(
    scenarios: list[Scenario], per_replica: float, seeds: Sequence[int], labels: tuple[str, ...]
) -> list[tuple[Row, Timeline]]:
    """Run the policies whose labels begin with a given text. Only the best request count of the first seed runs with the other seeds."""
    results: list[tuple[Row, Timeline]] = []
    with ProcessPoolExecutor(max_workers=2) as pool:

        def run(tasks: list[tuple[Scenario, str, float, int]]) -> None:
            for number, result in enumerate(pool.map(_task, tasks), 1):
                results.append(result)
                print(f"{number} of {len(tasks)} runs", end="\r", file=sys.stderr, flush=True)

        pairs = [(scenario, policy) for scenario in scenarios for policy in policies(scenario, per_replica)]
        pairs = [(scenario, policy) for scenario, policy in pairs if policy.startswith(labels)]
        tasks = [(scenario, policy, per_replica, seed) for scenario, policy in pairs for seed in seeds]
        run([task for task in tasks if task[3] == seeds[0] or not task[1].startswith(COUNT)])
        rows = [row for row, _ in results]
        best = [(scenario, tuned(summaries(rows, scenario.name))) for scenario in scenarios]
        run([(scenario, count.policy, per_replica, seed) for scenario, count in best if count for seed in seeds[1:]])
    return results


def compare(
    scenarios: list[Scenario],
    per_replica: float,
    results: list[tuple[Row, Timeline]],
    seeds: Sequence[int],
    out: Path,
    figures: Path | None,
) -> None:
    """Write the report of all runs and the figures of the first seed; print the table."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for row, _ in results]
    report: dict[str, Any] = {"profile": PROFILE, "slo": asdict(SLO), "cold_start_s": COLD_START_S, "seeds": list(seeds)}
    report |= {"oracle_rate_per_replica": per_replica, "rows": [asdict(row) for row in rows]}
    (out / "report.json").write_text(json.dumps(report, indent=1))
    from benchmarks.scaling_figures import draw

    names = [scenario.name for scenario in scenarios]
    for name in names:
        shown = {row.policy: timeline for row, timeline in results if (row.scenario, row.seed) == (name, seeds[0])}
        best = tuned(summaries(rows, name))
        labels = ["serve-app", "oracle", *([best.policy] if best else [])]
        lines = {label: shown[label] for label in labels if label in shown}
        path = out / f"scaling-{name.replace(' ', '-')}.png"
        draw(path, name, lines, per_replica)
        if figures:
            (figures / path.name).write_bytes(path.read_bytes())
    print(f"one replica keeps the SLO up to {per_replica:.2f} requests/s (simulated {PROFILE})\n")
    print(table(rows, names))


def live_and_simulated(run: Path, bounds: tuple[int, int], cold_starts_s: Sequence[float]) -> dict[str, Any]:
    """Return TTFT and replica-seconds (the integral of the desired replicas) of a live run and of its simulation."""
    data = RunData(records := read_records(run), summary_of(records))
    known = (data.value_s(item, "ttft") for item in data.items)
    values = [math.inf if value is None else value for value in known]  # a request without a first token is late on either side
    columns = data.autoscaling().timeline  # type: ignore[union-attr]  # the fleet was scaled
    duration_s = records.scenario.duration_s
    told = zip(columns["t_s"], columns["desired"], strict=True)
    wanted = np.array([(t, n) for t, n in told if t is not None and n is not None and 0 <= t <= duration_s])
    live = {f"ttft_p{percent}_s": float(np.percentile(values, percent, method="higher")) for percent in (50, 95)}
    live["replica_s"] = float(np.trapezoid(wanted[:, 1], wanted[:, 0]))
    minimum, maximum = bounds
    world = World(hardware=hardware(), minimum=minimum, initial=minimum, maximum=maximum, cold_starts_s=tuple(cold_starts_s))
    planned = [item.request for item in data.items]
    jobs = (Job(str(r.id), r.due_s or 0.0, r.input_tokens, max(1, r.output_tokens)) for r in planned)
    outcome = SimulatedFleet(world).run(jobs, duration_s, Ours(ScalingRules(slo=SLO)))
    simulated = {f"ttft_p{percent}_s": outcome.ttft_s(percent / 100) for percent in (50, 95)}
    simulated["replica_s"] = float(sum(n for at, n, _, _ in outcome.timeline if at <= duration_s))
    ratios = {name: round(simulated[name] / live[name], 3) for name in live}
    return {"requests": len(planned), "live": live, "simulated": simulated, "simulated over live": ratios}


if __name__ == "__main__":
    main()
