"""The scorecard counts what clients notice of faults: the fleet, Ray Serve LLM, and vLLM behind HAProxy, two simulated replicas each.

``make scorecard`` starts each side again for each fault, loads it with the same Poisson arrivals by the load kit, and injects the fault.
A failure is an incomplete answer, or an answer whose text differs from the side's own run without a fault. Runs that are already in OUT are
not repeated. Without HAProxy or the environment of Ray Serve LLM (see `benchmarks.peers`), their sides are left out.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

import httpx
import psutil
import yaml

from benchmarks.overhead import ENGINE
from benchmarks.peers import changed
from benchmarks.processes import server
from benchmarks.targets import environment, fleet_config, refuse_real_computation
from loadtest.judge.stats import share_bound
from loadtest.records import Row, RunEvent, read_lines, read_rows
from serve_app.checkpoints import make_tiny_llama
from serve_app.config import ModelSettings

PROFILE = "a10g-llama-8b"
FLEET, RAY, HAPROXY = SIDES = ("fleet", "ray-serve-llm", "haproxy")
NO_FAULT = "no fault"
FAULTS = ("kill", "hang", "scale-down", "roll-out", "control plane")
"""The faults: an engine core is killed; an engine core is stopped; one of two replicas is removed; an engine setting changes; Serve's
controller is killed."""
PORT = 8074
MARK = "SERVE_APP_SCORECARD"
NUM_REPLICAS = 2
START_S = 300.0
BEFORE_S, SUFFERS_S = 10.0, 2.0
"""Requests that were due up to ``BEFORE_S`` before the fault count. A request suffers if it fails or waits longer than ``SUFFERS_S`` for
its first token."""
LOAD = {
    "name": "scorecard",
    "arrival": {"law": "poisson", "rate": 2},
    "requests": [{"input_tokens": {"mean": 64}, "output_tokens": {"mean": 128}}],
    "duration_s": 90,
    "warmup_s": 5,
    "timeout_s": 60,
    "drain_s": 60,
}
FAULT_AT_S = 25.0


@dataclass(frozen=True)
class Record:
    """One run. ``suffering_s``: time from the fault to the due time of the last request that suffered. ``pauses_s`` is per request."""

    side: str
    fault: str
    seed: int
    n: int
    failures: int
    suffering_s: float
    pauses_s: list[float]
    load_1min: float


@dataclass(frozen=True)
class Side:
    """A running side, and the commands that change it."""

    url: str
    folder: Path
    scale_down: Sequence[str]
    roll_out: Sequence[str]

    def pid(self, *marks: str) -> int:
        """Return the oldest of the side's processes whose command line has one of ``marks``."""
        found = [p for p in psutil.process_iter() if _belongs_to(p, self.folder, marks)]
        return min(found, key=psutil.Process.create_time).pid

    def command(self, fault: str) -> Sequence[str]:
        engine = ("serve_app.replica.engine", "VLLM::EngineCore")
        match fault:
            case "kill":
                return ["kill", "-KILL", str(self.pid(*engine))]
            case "hang":
                return ["kill", "-STOP", str(self.pid(*engine))]
            case "control plane":
                return ["kill", "-KILL", str(self.pid("ray::ServeController"))]
            case "scale-down":
                return self.scale_down
        return self.roll_out


def _belongs_to(process: psutil.Process, folder: Path, marks: Sequence[str]) -> bool:
    """Return whether the process has the variable that all processes of a side inherit: Ray's processes are not its descendants.

    vLLM's engine core overwrites its own variables with its process title, so the variables of its parents count too.
    """
    with suppress(psutil.Error):
        if any(m in " ".join(process.cmdline()) for m in marks):
            return any(_has_mark(each, folder) for each in (process, *process.parents()))
    return False


def _has_mark(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(MARK) == str(folder)
    return False


@contextmanager
def started(name: str, model: ModelSettings, folder: Path, ray_python: str) -> Iterator[Side]:
    if name == FLEET:
        with _fleet(model, folder) as side:
            yield side
        return
    python = ray_python if name == RAY else sys.executable
    settings = {"name": model.name, **model.model_dump(mode="json", exclude_unset=True)}  # the dump omits the name
    command = [python, "-m", "benchmarks.peers", name, str(PORT), str(folder), json.dumps(settings)]
    url = f"http://127.0.0.1:{PORT}"
    with server(command, f"{url}/v1/models", log=folder / "log", environment=_marked(model, folder), start_s=START_S) as root:
        refuse_real_computation(root)
        yield Side(url, folder, ["kill", "-USR1", str(root.pid)], ["kill", "-USR2", str(root.pid)])


@contextmanager
def _fleet(model: ModelSettings, folder: Path) -> Iterator[Side]:
    config = fleet_config(model, NUM_REPLICAS)
    del config["timeouts"]  # the benchmark tests the defaults
    config["name"], config["ingress"]["port"] = "scorecard", PORT
    own = folder / "fleet.yaml"
    own.write_text(yaml.safe_dump(config))
    section = config["models"][model.name]
    section["engine_args"] = changed(model).engine_args
    other = folder / "changed.yaml"
    other.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(own)]
    variables = {**_marked(model, folder), "SERVE_APP_CACHE": str(folder / "cache")}
    operate = ["env", f"SERVE_APP_CACHE={folder / 'cache'}", sys.executable, "-m", "tests.e2e_fleet.operate"]
    with server(command, f"{url}/readyz", log=folder / "log", environment=variables, start_s=START_S):
        yield Side(url, folder, [*operate, "scale", str(own), model.name, "1"], [*operate, "redeploy", str(other)])


def _marked(model: ModelSettings, folder: Path) -> dict[str, str]:
    return {**environment(model), MARK: str(folder)}


def _warm_up(url: str, model: str) -> None:
    """Send a few requests to each replica: work for the first requests is no cost of a fault."""
    for _ in range(4 * NUM_REPLICAS):
        body = {"model": model, "prompt": "warm", "max_tokens": 4, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=START_S).raise_for_status()


def measure(side_name: str, fault: str, seed: int, model: ModelSettings, out: Path, ray_python: str) -> Record:
    """Start the side, load it and inject the fault; the load kit's records are in ``out``."""
    run = out / f"{side_name}-{fault.replace(' ', '-')}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as name:
        folder = Path(name)
        with started(side_name, model, folder, ray_python) as side:
            _warm_up(side.url, model.name)
            words = [] if fault == NO_FAULT else [*side.command(fault)]
            faults = [{"at_s": FAULT_AT_S, "action": "command", "command": words}] if words else []
            scenario = folder / "scenario.yaml"
            scenario.write_text(yaml.safe_dump({**LOAD, "seed": seed, "faults": faults}))
            command = [sys.executable, "-m", "loadtest.cli", "run", str(scenario), "--target", side.url, "--out", str(run)]
            subprocess.run(
                [*command, "--no-report"], check=False
            )  # its verdict is about the generator and an SLO, not about the fault
            if fault == "hang":
                with suppress(ProcessLookupError):  # the fleet has already killed it; the other sides keep it stopped
                    os.kill(int(words[-1]), signal.SIGCONT)
    return audit(side_name, fault, seed, run, out / f"{side_name}-no-fault-{seed}")


def audit(side: str, fault: str, seed: int, run: Path, reference: Path) -> Record:
    """Compare a run with the undisturbed one of its side."""
    texts = {row.id: row.text_sha256 for row in read_rows(reference)}
    events = read_lines(run / "events.jsonl", RunEvent)
    at_s = next((event.t_s for event in events if event.kind == "fault"), FAULT_AT_S)
    rows = [row for row in read_rows(run) if row.due_s >= at_s - BEFORE_S]
    failed = {row.id for row in rows if row.state != "ok" or row.text_sha256 != texts[row.id]}
    suffering = [row.due_s - at_s for row in rows if row.due_s >= at_s and (row.id in failed or _pauses(row)[0] > SUFFERS_S)]
    pauses = [round(max(_pauses(row)), 3) for row in rows]
    return Record(side, fault, seed, len(rows), len(failed), round(max(suffering, default=0.0), 1), pauses, os.getloadavg()[0])


def _pauses(row: Row) -> list[float]:
    """Return the seconds from sending to the first token, between chunks, and to the end of an incomplete answer."""
    if row.sent_s is None:
        return [0.0]
    times = [0.0, *(ms / 1000 for ms, _ in row.chunks)]
    if row.state != "ok" and row.end_s is not None:
        times.append(row.end_s - row.sent_s)
    return [b - a for a, b in pairwise(times)] or [0.0]


def bound(n: int, failures: int) -> str:
    """Return the failures in per cent of ``n``; without failures, the 95 % upper bound of their share."""
    return f"{failures / n:.1%}" if failures else f"0 (below {share_bound(0, n):.1%})"


def table(records: Sequence[Record]) -> str:
    lines = [
        "| fault | side | runs, n | failures | suffering ends after | pause p50 / p99 / worst |",
        "|---|---|---|---|---|---|",
    ]
    for fault in (NO_FAULT, *FAULTS):
        for side in SIDES:
            runs = [r for r in records if (r.side, r.fault) == (side, fault)]
            if not runs:
                continue
            n, failures = sum(r.n for r in runs), sum(r.failures for r in runs)
            cuts = quantiles((pauses := [p for r in runs for p in r.pauses_s]), n=100)
            ends = f"{max(r.suffering_s for r in runs):.1f} s"
            shape = f"{cuts[49]:.2f} / {cuts[98]:.2f} / {max(pauses):.2f} s"
            lines.append(f"| {fault} | {side} | {len(runs)}, {n} | {failures}: {bound(n, failures)} | {ends} | {shape} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--ray-python", default=".venv-ray-llm/bin/python", help="of an environment with Ray Serve LLM")
    parser.add_argument("--out", type=Path, default=Path("results/scorecard"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "scorecard.jsonl"
    records = [Record(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as name:
        model = _model(Path(name))
        for seed in range(1, arguments.runs + 1):
            for side, fault in _cells(arguments.sides, arguments.faults, arguments.ray_python):
                if any((r.side, r.fault, r.seed) == (side, fault, seed) for r in records):
                    continue
                records.append(measure(side, fault, seed, model, arguments.out, arguments.ray_python))
                with file.open("a") as lines:
                    lines.write(json.dumps(asdict(records[-1])) + "\n")
                print(table(records), flush=True)


def _model(folder: Path) -> ModelSettings:
    simulated: Mapping[str, str] = {"profile": PROFILE}
    source = str(make_tiny_llama(folder / "tiny"))
    return ModelSettings.model_validate({"name": "tiny", "model": source, "simulated": simulated, "engine_args": ENGINE})


def _cells(sides: Sequence[str], faults: Sequence[str], ray_python: str) -> Iterator[tuple[str, str]]:
    for side in sides:
        missing = {RAY: shutil.which(ray_python) is None, HAPROXY: shutil.which("haproxy") is None}
        if missing.get(side):
            print(f"{side} is left out: {ray_python if side == RAY else 'haproxy'} is not there", file=sys.stderr)
            continue
        yield side, NO_FAULT
        yield from ((side, fault) for fault in faults if (side, fault) != (HAPROXY, "control plane"))


if __name__ == "__main__":
    main()
