"""`make demo-autoscaling` starts a simulated fleet, puts a jump of load on it, and plots replicas and latencies over time.

It needs no GPU and no cluster, and two cores suffice. It takes about five minutes, and the load two and a half of them.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from serve_app.batch.fleet_process import FleetProcess
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


def load_command(url: str, out: Path) -> list[str]:
    """Return the command that loads the fleet at ``url`` and writes the report to ``out``."""
    sets = [part for name, value in LOAD.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "loadtest.cli", "run", "step", "--target", url, "--out", str(out), *sets]


def main(arguments: list[str]) -> int:
    """Run the demo; return 0 if there is a plot, or else the load test's exit status."""
    parser = argparse.ArgumentParser(description="From nothing to the plot of an autoscaled fleet.")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / time.strftime("autoscaling-%Y%m%dT%H%M%S"))
    given = parser.parse_args(arguments)
    print(f"starting the fleet of {CONFIG.relative_to(ROOT)}, about a minute", flush=True)
    try:
        with FleetProcess(CONFIG, on_progress=lambda line: print(f"  {line}", flush=True)) as fleet:
            print(f"ready at {fleet.url}; the load jumps from 1.5 to 6 requests/s after 40 s", flush=True)
            status = subprocess.run(load_command(fleet.url, given.out)).returncode
            print("stopping the fleet", flush=True)
    except BatchError as exc:
        print(f"error: {exc.problem}", file=sys.stderr)
        return 1
    plot = given.out / "figures" / "autoscaling.svg"
    if not plot.is_file():
        return status or 1
    print(f"\nreplicas and latencies over time: {plot}\nthe whole report: {given.out / 'report.html'}")
    if status:
        print("The load test's own verdict above is about the SLO and the sample; the demo itself is complete.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
