"""This script measures starts: of fleets of one simulated and one real tiny model, repeatedly.

``python -m tools.cold_start`` prints a row per process and state of vLLM's cache folder: ``cold`` as in a new pod and, with ``--warm``,
``warm`` as on a machine that has served the model before. ``--tree NAME=PATH`` (more than once) compares checkouts in interleaved
rounds. ``--again`` also kills each engine and measures the next one on the node. ``--warm-start false true`` compares models with and
without forked engines in interleaved fleets. The seconds until ready depend on the machine's load; CPU seconds, of a process with all its
children, depend on it less.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.processes import server
from serve_app.checkpoints import make_tiny_llama

_PORT = 8069
_START_S = 900.0
_POLL_S = 0.1
_COMMAND = [sys.executable, "-m", "serve_app.cli.main"]
_ENGINE = {"engine_args": {"max_model_len": 1024}, "num_cpus": 0.1}
_MODELS = {"real": _ENGINE, "simulated": {"simulated": {"profile": "a10g-llama-8b"}, **_ENGINE}}
Row = tuple[str, str, str]
Figures = tuple[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[], help="NAME=PATH of a checkout; default: this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="start each a second time, too")
    parser.add_argument("--again", action="store_true", help="also measure the start after the death of each engine")
    parser.add_argument(
        "--warm-start", nargs="+", choices=("false", "true"), default=["false"], help="of the models; default: false"
    )
    parser.add_argument("--only", choices=_MODELS, help="start only this model")
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.tree) or {"here": "."}
    figures: dict[Row, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny_llama(folder / "tiny")
        for number in range(arguments.rounds):
            for (tree, path), warm_start in itertools.product(trees.items(), arguments.warm_start):
                name = f"{tree}, forks" if warm_start == "true" else tree
                models = _models(model, arguments.only, warm_start=warm_start == "true")
                home = folder / f"{name}-{number}"
                home.mkdir()
                for cache in ("cold", "warm") if arguments.warm else ("cold",):
                    for process, figure in _start(Path(path).absolute(), models, home, again=arguments.again):
                        figures[process, cache, name].append(figure)
                        print(name, cache, process, json.dumps(figure), file=sys.stderr, flush=True)
    print("\n".join(_table(figures)))


def _models(model: Path, only: str | None, *, warm_start: bool) -> dict[str, Any]:
    own = {"model": str(model), **({"warm_start": True} if warm_start else {})}  # an older checkout does not know the key
    return {name: {**section, **own} for name, section in _MODELS.items() if only in (None, name)}


def _start(tree: Path, models: dict[str, Any], home: Path, *, again: bool) -> list[Figures]:
    """Start a fleet of the checkout and end it again; return the figures of each process."""
    config = {
        "name": "cold-start",
        "models": models,
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
        members = _members(tree, environment)
        found = [figure for member in members for figure in _figures(member)]
        if again:
            for member in members:
                if member["role"] == "replica":
                    os.kill(member["load"]["engine_pid"], signal.SIGKILL)
            for status_code in (503, 200):
                _wait(url, status_code)
            members = [member for member in _members(tree, environment) if member["role"] == "replica"]
            found += [(f"{process}, again", figure) for member in members for process, figure in _figures(member)]
        return found


def _members(tree: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    status = [*_COMMAND, "status", "cold-start", "--json"]
    said = subprocess.run(status, cwd=tree, env={**os.environ, **environment}, check=True, capture_output=True).stdout
    return list(json.loads(said)["members"])


def _wait(url: str, status_code: int) -> None:
    deadline = time.monotonic() + _START_S
    while httpx.get(url, timeout=10).status_code != status_code:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} has not answered {status_code} for {_START_S:g} s")
        time.sleep(_POLL_S)


def _figures(member: dict[str, Any]) -> Iterator[Figures]:
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
