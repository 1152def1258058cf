"""This benchmark compares static with continuous batching: Anyscale's study (2023), with fair baselines added. docs/benchmarks.md.

    python -m benchmarks.batching --real                           SmolLM2-135M on the CPU, an eighth of the study's lengths
    python -m benchmarks.batching --profile a100-40gb-llama-13b    both sides on the simulated accelerator
    python -m benchmarks.batching --parts bursts                   only (a), of all setups
    python -m benchmarks.batching --draw SETUP                     tables and figures again, from the records on disk

The parts are (a) a burst for each cap of the output length, (b) latencies at two rates, (c) throughput against the offered rate, all in
several rounds with different lengths and arrivals. The load is `loadtest`'s: one seeded schedule per experiment and round, the same
requests for every system, latencies from the due time. Records, JSON and figures are written to results/batching/SETUP, those of a further
round to its round-NUMBER.
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.batching_figures import draw
from benchmarks.batching_records import Run, round_folder
from benchmarks.batching_servers import StaticServer, fleet, static_server
from benchmarks.batching_setups import (
    CONTINUOUS,
    SEED,
    SETUPS,
    STATIC,
    Setup,
    alone,
    burst,
    of_round,
    only,
    poisson,
    quick,
    static_run_s,
    static_values,
)
from loadtest.control.runner import run
from loadtest.errors import InvalidRun
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import ScheduledRequest, read_manifest
from loadtest.wire.target import Target

SHARE = 4
"""A static server (on the CPU only the naive one) gets every so-many-th request of a burst, in full batches: its throughput does not
depend on the queue, and the host's time for accepting requests counts less. ``paper static`` keeps the maximum of all lengths."""
LATENCY_CAP = 1536
PARTS = ("bursts", "latencies", "rates")
MAX_TRIES = 3
"""Most runs of an experiment until one is valid; else its cells stay empty, and it is in no figure."""


@dataclass(frozen=True)
class Experiment:
    """One load on one system. Rates and seconds are the setup's; real times are ``time_scale`` times as long."""

    kind: str
    """One of burst, capacity (a burst with the latency experiment's inputs), alone, latency, rate."""
    system: str
    cap: int
    qps: float = 0.0
    num: int = 0
    window_s: float = 0.0

    @property
    def name(self) -> str:
        return (
            f"{self.kind}-{self.system.replace(' ', '-')}-{self.qps:g}qps"
            if self.qps
            else f"{self.kind}-{self.system}-{self.cap}"
        )

    def scenario(self, setup: Setup, time_scale: float) -> Scenario:
        match self.kind:
            case "burst" | "capacity":
                return burst(setup, self.cap, self.num, latency_inputs=self.kind == "capacity")
            case "alone":
                return alone(setup, self.cap, self.num)
            case "latency":
                return poisson(setup, self.qps, self.num / self.qps, time_scale=time_scale, drain=True)
            case _:
                return poisson(setup, self.qps, self.window_s, time_scale=time_scale, drain=False)


class Bench:
    """A bench that runs the experiments of one setup and keeps a list of the runs."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.made = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        self.runs: list[dict[str, Any]] = []

    def measure(
        self, experiment: Experiment, url: str, time_scale: float, *, begin: Callable[[], None] | None = None, **facts: Any
    ) -> Run | None:
        """Load the server at ``url``, up to `MAX_TRIES` times until the run is valid; return None if it never was.

        Args:
            begin: Prepares the server for each try.
        """
        scenario = experiment.scenario(self.setup, time_scale)
        entry = {**experiment.__dict__, "time_scale": time_scale, **facts}
        for tries in range(1, MAX_TRIES + 1):
            out = self.folder / (experiment.name if tries == 1 else f"{experiment.name}-{tries}")
            if begin:
                begin()
            bad = _load(scenario, url, out)
            print(f"{self.setup.name} {out.name}: {'INVALID: ' + '; '.join(bad) if bad else 'done'}", flush=True)
            if not bad:
                break
        self.runs.append({**entry, "folder": out.name, "tries": tries, "problems": bad})
        results = {"setup": self.setup.name, **self.made, "runs": self.runs}
        (self.folder / "runs.json").write_text(json.dumps(results, indent=1))
        return None if bad else Run(out, time_scale)

    def continuous(self) -> float:
        """Run all of the fleet's experiments; return the CPU's capacity in requests/s, 1 on a simulated accelerator."""
        setup, unit = self.setup, 1.0
        with fleet(setup, self.folder) as url:
            _warm(url, setup)
            for cap in setup.caps if setup.num_burst else ():
                self.measure(Experiment("burst", CONTINUOUS, cap, num=setup.num_burst), url, setup.time_scale)
            if setup.profile is None and setup.seed == SEED:
                self.measure(Experiment("alone", CONTINUOUS, LATENCY_CAP, num=setup.num_burst // SHARE), url, 1.0)
            if setup.profile is None and (setup.qps or setup.rates):
                capacity = self.measure(Experiment("capacity", CONTINUOUS, LATENCY_CAP, num=setup.num_burst), url, 1.0)
                if capacity is None:
                    raise InvalidRun([f"the fleet's capacity, {MAX_TRIES} of {MAX_TRIES} times: no rate can follow from it"])
                unit = capacity.per_s("completed") / 8.0  # the study's saturates around 8
            for qps in setup.qps:
                experiment = Experiment("latency", CONTINUOUS, LATENCY_CAP, qps=qps * unit, num=setup.num_latency)
                self.measure(experiment, url, setup.time_scale, nominal_qps=qps)
            for rate in setup.rates:
                experiment = Experiment("rate", CONTINUOUS, LATENCY_CAP, qps=rate * unit, window_s=setup.window_s)
                self.measure(experiment, url, setup.time_scale, nominal_qps=rate, share=rate)
        return unit

    def static(self, unit: float) -> None:
        """Run all experiments of the three static servers, one after the other on one process."""
        setup = self.setup
        first = static_values(setup, "naive", setup.caps[0], setup.cap(setup.caps[0]), 1.0)
        with static_server(first, self.folder) as static:
            _warm(static.url, setup)
            for system in STATIC:
                for cap in setup.caps if setup.num_burst else ():
                    num, batch = setup.num_burst, setup.batch_size(system, cap)
                    if setup.profile or system == "naive":
                        num = max(1, round(num / SHARE / batch)) * batch
                    self._static(static, Experiment("burst", system, cap, num=num), setup.num_burst)
                for qps in setup.qps:
                    experiment = Experiment("latency", system, LATENCY_CAP, qps=qps * unit, num=setup.num_latency)
                    self._static(static, experiment, nominal_qps=qps)
                capacity = self._static_capacity(system) if setup.static_rates else 0.0
                for rate in setup.static_rates if capacity else ():
                    batches, least = (6, 0) if setup.profile is None else (15, 60)  # simulated time costs nothing
                    window_s = max(setup.window_s, max(batches * setup.batch_size(system, LATENCY_CAP), least) / capacity)
                    experiment = Experiment("rate", system, LATENCY_CAP, qps=rate * capacity, window_s=window_s)
                    self._static(static, experiment, nominal_qps=rate * capacity / unit, share=rate)

    def _static(self, static: StaticServer, experiment: Experiment, num_all: int = 0, **facts: Any) -> None:
        setup, system, cap = self.setup, experiment.system, experiment.cap
        requests = make_schedule(experiment.scenario(setup, 1.0)).requests
        everybody = make_schedule(burst(setup, cap, num_all)).requests if num_all else requests
        global_max = max(r.output_tokens for r in everybody)
        planned_s = self._planned_s(requests, system, cap, global_max)
        length_s = experiment.window_s or max(planned_s, experiment.num / experiment.qps if experiment.qps else 0.0)
        # In whole thousandths, which YAML, JSON and the server's settings represent exactly.
        time_scale = max(0.001, round(setup.static_run_s / length_s, 3)) if setup.profile else 1.0
        known = {"batch_size": setup.batch_size(system, cap), "global_max": global_max, "planned_s": planned_s, **facts}
        values = static_values(setup, system, cap, global_max, time_scale)
        measured = self.measure(experiment, static.url, time_scale, begin=lambda: static.set(values), **known)
        if measured:
            (measured.folder / "batches.json").write_bytes(static.batches())

    def _planned_s(self, requests: Sequence[ScheduledRequest], system: str, cap: int, global_max: int) -> float:
        if self.setup.profile is None:
            return 0.0
        lengths = [(r.input_tokens, r.output_tokens) for r in requests]
        size = self.setup.batch_size(system, cap)
        form = "paper" if system == "paper static" else "fair"
        return static_run_s(self.setup.profile, lengths, form=form, batch_size=size, global_max=global_max)  # type: ignore[arg-type]

    def _static_capacity(self, system: str) -> float:
        """Return requests/s with the latency experiment's lengths, by the timing model or, on the CPU, by the burst just measured.

        0 means that the burst is invalid; the rates that follow from it are left out.
        """
        if self.setup.profile is None:
            burst_run = next(r for r in self.runs if (r["kind"], r["system"], r["cap"]) == ("burst", system, LATENCY_CAP))
            return 0.0 if burst_run["problems"] else Run(self.folder / burst_run["folder"], 1.0).per_s("completed")
        # Of the first round's lengths, so that all rounds have the same rates.
        requests = make_schedule(burst(of_round(self.setup, 1), LATENCY_CAP, 400, latency_inputs=True)).requests
        return len(requests) / self._planned_s(requests, system, LATENCY_CAP, max(r.output_tokens for r in requests))


def commit() -> str:
    """Return the measured commit, with a mark if files have changed since; empty outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _load(scenario: Scenario, url: str, out: Path) -> list[str]:
    """Run the scenario once; return why the run is invalid, or an empty list.

    Raises:
        KeyboardInterrupt: The run was interrupted; loadtest's run catches the signal itself.
    """
    try:
        run(scenario, Target(url), out, quiet=True, report=False)
    except InvalidRun as exc:
        return exc.reasons
    manifest = read_manifest(out)
    if manifest.state == "interrupted" and not manifest.problems:
        raise KeyboardInterrupt
    return Run(out, 1.0).problems


def _warm(url: str, setup: Setup) -> None:
    """Send a few requests that are not counted."""
    for size in (1, setup.input_tokens):
        body = {"model": setup.name, "prompt": [100] * size, "max_tokens": setup.cap(32)}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the embedded model on this CPU")
    parser.add_argument("--profile", nargs="+", default=[], choices=sorted(n for n, s in SETUPS.items() if s.profile))
    parser.add_argument("--rounds", type=int, default=3, help="each with other lengths and arrivals; at least 1")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which of (a), (b) and (c); all if not given")
    parser.add_argument(
        "--quick", action="store_true", help="a look: two caps, few requests; under 3 minutes per setup and round"
    )
    parser.add_argument("--draw", nargs="+", default=[], choices=sorted(SETUPS), help="only draw what was measured before")
    parser.add_argument("--out", type=Path, default=Path("results/batching"))
    parser.add_argument("--figures", type=Path, help="also copy the PNG there, as batching-SETUP-NAME.png")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1 (got {arguments.rounds})")
    chosen = [*(["smollm2-135m-cpu"] if arguments.real else []), *arguments.profile]
    if not chosen and not arguments.draw:
        chosen = list(SETUPS)
    change: Callable[[Setup], Setup] = quick if arguments.quick else lambda setup: setup
    try:
        setups = {name: only(change(SETUPS[name]), arguments.parts) for name in chosen}
    except ValueError as exc:
        parser.error(f"--parts {' '.join(arguments.parts)}: {exc}")
    for name, setup in setups.items():
        shutil.rmtree(arguments.out / name, ignore_errors=True)
        for number in range(1, arguments.rounds + 1):
            folder = round_folder(arguments.out / name, number)
            folder.mkdir(parents=True)
            bench = Bench(of_round(setup, number), folder)
            try:
                bench.static(bench.continuous())
            except InvalidRun as exc:
                print(f"{name}, round {number}: {exc}; what was measured until then is drawn", flush=True)
                break
    for name in (*chosen, *arguments.draw):
        print(draw(change(SETUPS[name]), arguments.out / name))
        for figure in (arguments.out / name).glob("*.png") if arguments.figures else ():
            shutil.copy(figure, arguments.figures / f"batching-{name}-{figure.name}")


if __name__ == "__main__":
    main()
