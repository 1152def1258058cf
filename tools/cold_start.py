"""This script measures starts: of fleets of one simulated and one real tiny model, again and again.

``python -m tools.cold_start`` prints a row per process and state of vLLM's cache folder: ``cold`` as in a new pod and, with ``--warm``,
``warm`` as on a machine that has served the model before. ``--tree NAME=PATH`` (more than once) compares checkouts in interleaved
rounds. The seconds until ready depend on the machine's load; CPU seconds, of a process with all its children, depend on it less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import server
from serve_app.checkpoints import make_tiny_llama

_PORT = 8069
_START_S = 900.0
_COMMAND = [sys.executable, "-m", "serve_app.cli.main"]
_ENGINE = {"engine_args": {"max_model_len": 1024}, "num_cpus": 0.1}
Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[], help="NAME=PATH of a checkout; default: this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="start each a second time, too")
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.tree) or {"here": "."}
    figures: dict[Row, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "tiny")
        for number in range(arguments.rounds):
            for tree, path in trees.items():
                home = folder / f"{tree}-{number}"
                home.mkdir()
                for cache in ("cold", "warm") if arguments.warm else ("cold",):
                    for process, figure in _start(Path(path).absolute(), model, home):
                        figures[process, cache, tree].append(figure)
                        print(tree, cache, process, json.dumps(figure), file=sys.stderr, flush=True)
    print("\n".join(_table(figures)))


def _start(tree: Path, model: Path, home: Path) -> list[tuple[str, dict[str, float]]]:
    """Start a fleet of the checkout and end it again; return the figures of each process."""
    models = {"real": _ENGINE, "simulated": {"simulated": {"profile": "a10g-llama-8b"}, **_ENGINE}}
    config = {
        "name": "cold-start",
        "models": {name: {**section, "model": str(model)} for name, section in models.items()},
        "ingress": {"port": _PORT, "num_cpus": 0.1},
        "timeouts": {"drain_s": 5, "no_replica_s": 5},
    }
    file = home / "fleet.yaml"
    file.write_text(yaml.safe_dump(config))
    ours = {
        "PYTHONPATH": str(tree),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "SERVE_APP_CACHE": str(home / "own"),
    }
    environment = {**ours, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    url = f"http://127.0.0.1:{_PORT}/readyz"
    command = ["env", f"--chdir={tree}", *_COMMAND, "up", "-f", str(file)]
    with server(command, url, log=home / "log", environment=environment, start_s=_START_S):
        status = [*_COMMAND, "status", "cold-start", "--json"]
        said = subprocess.run(status, cwd=tree, env={**os.environ, **environment}, check=True, capture_output=True).stdout
        return [figure for member in json.loads(said)["members"] for figure in _figures(member)]


def _figures(member: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield process and figures of one member of the fleet."""
    if member["role"] == "ingress":
        yield "ingress", {"cpu": _cpu_s(member["pid"])}
        return
    load, who = member["load"], member["model"]
    started_at = psutil.Process(member["pid"]).create_time()
    yield (
        f"{who}, replica",
        {"ready": member["epoch"] / 1e9 - started_at, "cpu": _cpu_s(member["pid"], without=load["engine_pid"])},
    )
    yield f"{who}, engine", {"cpu": _cpu_s(load["engine_pid"]), **load.get("cold_start", {})}


def _cpu_s(pid: int, *, without: int | None = None) -> float:
    """Return CPU seconds of a process and its ended and running children, except for the process tree ``without``."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    below = [_cpu_s(child.pid) for child in process.children() if child.pid != without]
    return float(times.user + times.system + times.children_user + times.children_system + sum(below))


def _table(figures: dict[Row, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the medians as a table in Markdown, with the range of the CPU time."""
    names = list(dict.fromkeys(name for runs in figures.values() for run in runs for name in run if name != "cpu"))
    yield f"| process | vLLM's cache | tree | n | CPU s (min-max) | {' | '.join(f'{name} s' for name in names)} |"
    yield "|---" * (len(names) + 5) + "|"
    for (process, cache, tree), runs in sorted(figures.items()):
        cpu = [run["cpu"] for run in runs]
        cells = [f"{statistics.median(cpu):.1f} ({min(cpu):.1f}-{max(cpu):.1f})"]
        cells += [f"{statistics.median(values):.1f}" if (values := [r[n] for r in runs if n in r]) else "" for n in names]
        yield f"| {process} | {cache} | {tree} | {len(runs)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
