"""`make demo-autoscaling` starts a simulated fleet, puts a jump of load on it, and plots replicas and latencies over time.

It needs no GPU and no cluster, and two cores suffice. It takes about five minutes, and the load two and a half of them. The plot is drawn
whatever the load test's verdict is: a busy machine makes latencies inexact, and the replicas and their times are still those of the run.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from loadtest.errors import UsageError
from loadtest.judge.autoscale import load_steps
from loadtest.records import RunEvent
from loadtest.report.figure_kinds import KINDS
from loadtest.report.figures import RunData, draw_all, read_run
from serve_app.autoscaling.decision_log import Record, read
from serve_app.autoscaling.fleet import INGRESSES
from serve_app.batch.fleet_process import FleetProcess
from serve_app.cli.decision_text import explanation
from serve_app.environment import as_typed
from serve_app.errors import BatchError

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "autoscaling.yaml"
LOAD = {
    "observe.serve_status": "false",
    "observe.fleet": "true",
    "arrival.rate": "1.5",
    "arrival.to_rate": "6",
    "arrival.at_s": "40",
    "warmup_s": "10",
    "duration_s": "150",
}
"""The scenario `step`, shorter and smaller: one replica's load, then that of several."""
SERVE_APP = as_typed(beside=os.path.relpath(sys.executable))
INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell reports it."""
LOG_LIMIT_S = 120.0
"""Longest time to fetch the decision log; a busy machine takes half a minute to start the command."""


def load_command(url: str, out: Path) -> list[str]:
    """Return the command that loads the fleet at ``url`` and writes the report to ``out``."""
    sets = [part for name, value in LOAD.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "loadtest.cli", "run", "step", "--target", url, "--out", str(out), *sets]


def save_decisions(name: str, file: Path) -> str:
    """Write the decision log of the running application into ``file``; without a log, write nothing and return the reason, else ""."""
    command = [sys.executable, "-m", "serve_app.cli.main", "autoscale", "log", name, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOG_LIMIT_S, check=True)
        file.write_text(done.stdout)
    except subprocess.TimeoutExpired:
        return f"`serve-app autoscale log` took longer than {LOG_LIMIT_S:g} s, on a machine that is too busy"
    except (subprocess.SubprocessError, OSError) as exc:
        said = exc.stderr.split("\n") if isinstance(exc, subprocess.CalledProcessError) else []
        return str(next(filter(None, reversed(said)), exc))
    return ""


def draw(run: Path) -> Path:
    """Draw the plot of the run's replicas and latencies, and return its file.

    Raises:
        UsageError: The load test left no records of replicas.
    """
    data = read_run(run)
    (kind,) = (kind for kind in KINDS if kind.name == "autoscaling")
    if not draw_all([kind], data, run / "plot", events=[*data.events, *marks(data)]):
        raise UsageError(str(run), "has no record of replicas")
    return run / "plot" / f"{kind.name}.svg"


def marks(data: RunData) -> Iterator[RunEvent]:
    """Yield the marks of the plot: jumps of the load, orders of replicas and their ends, and that the generator was held up."""
    if data.summary.verdict == "invalid":
        yield RunEvent(0.0, "note", "busy machine: latencies inexact")
    jumps = [step.at_s for step in load_steps(data.records.scenario.arrival, data.records.scenario.duration_s)]
    yield from (RunEvent(at_s, "fault", "the load jumps") for at_s in jumps)
    for words, prefix in (("ordered", "replicas_desired/"), ("serving", "replicas_ready/")):
        for name in data.names(prefix):
            for at_s, count in _rises(*_lists(data, name)):
                since = [at_s - jump_s for jump_s in jumps if jump_s <= at_s]
                after = f" (+{min(since):.0f} s)" if since else ""
                yield RunEvent(at_s, "note", f"{count:.0f} {words}{after}")


def _lists(data: RunData, name: str) -> tuple[list[float], list[float]]:
    found = data.series(name)
    return ([], []) if found is None else (found[0].tolist(), found[1].tolist())


def _rises(times_s: Sequence[float], counts: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield (time, new count) wherever the count rises."""
    for (_, before), (at_s, after) in pairwise(zip(times_s, counts, strict=True)):
        if after > before:
            yield at_s, after


def why(records: Sequence[Record]) -> str:
    """Return the explanation of the first order of a replica; of the last decision if there was none."""
    for record in records:
        for name, decision in record.decided.items():
            if name != INGRESSES and decision.ready_at is not None and decision.desired > record.seen.models[name].target:
                return "\n".join(explanation(record, name))
    last = records[-1]
    return "\n".join(line for name in last.decided if name != INGRESSES for line in explanation(last, name))


def main(arguments: list[str]) -> int:
    """Run the demo; return 0 if there are a plot and an explanation."""
    parser = argparse.ArgumentParser(description="From nothing to the plot of an autoscaled fleet.")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / time.strftime("autoscaling-%Y%m%dT%H%M%S"))
    given = parser.parse_args(arguments)
    print(f"starting the fleet of {CONFIG.relative_to(ROOT)}, about a minute", flush=True)
    try:
        with FleetProcess(CONFIG, on_progress=lambda line: print(f"  {line}", flush=True)) as fleet:
            print(f"ready at {fleet.url}; the load jumps from 1.5 to 6 requests/s after 40 s", flush=True)
            status = subprocess.run(load_command(fleet.url, given.out)).returncode
            lack = save_decisions(fleet.name, given.out / "decisions.jsonl") if given.out.is_dir() else ""
            print("stopping the fleet", flush=True)
    except BatchError as exc:
        print(f"error: {exc.problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped before there was a plot; the fleet has ended; its records, if any, are in {given.out}", file=sys.stderr)
        return INTERRUPTED
    return show(given.out, status, lack)


def explain(decisions: Path, lack: str) -> bool:
    """Print why replicas were ordered, and return True. Without a decision log print ``lack``, its reason, and what to do instead."""
    if decisions.is_file() and (records := read(decisions.read_text().splitlines())[0]):
        print(f"\n{why(records)}\n\nevery decision: {SERVE_APP} autoscale log -f {decisions}")
        return True
    print(
        f"\nno explanation, because there is no log of the decisions: {lack or 'it is empty'}\n"
        f"The log has ended with the fleet. To get one: {SERVE_APP} up -f examples/autoscaling.yaml, and during the load in a second "
        f"terminal {SERVE_APP} autoscale explain"
    )
    return False


def show(run: Path, status: int, lack: str = "") -> int:
    """Draw the plot, print where it is and why replicas were ordered.

    Args:
        status: The load test's.
        lack: Why there is no decision log, "" if there is one.

    Returns:
        0 with a plot and an explanation; 1 with a plot alone; without a plot ``status``, or 1 if that is 0.
    """
    try:
        plot = draw(run)
    except UsageError as exc:
        print(f"error: no plot: {exc}", file=sys.stderr)
        return status or 1
    is_explained = explain(run / "decisions.jsonl", lack)
    print(f"\nreplicas and latencies over time: {plot}\nthe whole report: {run / 'report.html'}")
    if status:
        print(
            "The load test's own verdict above is about the SLO and the sample, and first tokens are late until more replicas serve."
        )
        print("The demo itself is complete." if is_explained else "The demo itself is complete but for the explanation.")
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
