"""This benchmark measures what the fleet costs beside a bare ``vllm serve``: same engine arguments, interleaved rounds.

``make bench-overhead`` measures simulated accelerators; ``--config FILE`` takes the first model of a configuration instead, for
example one on a GPU. The load is vLLM's own ``vllm bench serve``: prompts of 64 tokens, EOS ignored, a fixed number of streams.
All servers are up all the time; all but the server under test are idle. CPU time is that of each server's process tree, without the
generator, which shares the cores unless ``--client-cpus`` gives it its own. The CPU time of an idle server is measured before the first
run, shown separately in milliseconds of CPU per second, and not included in its microseconds per token.

``--alone`` measures one ingress process over a fake engine instead, and ``--trees A B`` two checkouts of it in turn (`ingress_alone`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ingress_alone
from benchmarks.targets import VLLM, Target, environment, source_of, started
from serve_app.checkpoints import make_tiny_llama
from serve_app.config import ModelSettings, load_settings

PROFILE = "h100-llama-8b"
ENGINE = {"max_model_len": 1024, "max_num_seqs": 256, "dtype": "float32", "enforce_eager": True}
INPUT_TOKENS, OUTPUT_TOKENS = 64, 64
REQUESTS = {1: 40, 32: 640, 256: 2048}
"""Requests per run and concurrency: about 10 s each on two cores, with answers of 64 tokens."""
ALONE_TOKENS = 20_000
"""Tokens per run of one ingress process; a request counts as 16 tokens."""
_IDLE_S = 20.0


@dataclass(frozen=True)
class Load:
    """A load of ``streams`` concurrent streams, with answers of ``tokens`` tokens."""

    streams: int
    tokens: int = OUTPUT_TOKENS


METRICS = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")


def main() -> None:
    arguments = _arguments()
    if arguments.alone:
        alone(arguments)
    else:
        beside_others(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="serve its first model; default: a simulated accelerator")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=sorted(REQUESTS))
    sides = "bare: vLLM's server; rust: the same with vLLM's Rust front end, fetched once (330 MB); fleet-N-M: N replicas, M ingresses; "
    sides += "ray, ray-direct: Ray Serve LLM as it comes, and with direct streaming"
    parser.add_argument("--targets", nargs="+", default=["bare", "fleet-1", "fleet-2"], help=sides)
    parser.add_argument(
        "--proxy",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "COMMAND"),
        help="one more target, before the bare server: {url} in its command is that server's, {port} is where to listen",
    )
    parser.add_argument("--ray-python", default=".venv-ray-llm/bin/python", help="of an environment with Ray Serve LLM")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of the simulated accelerator")
    parser.add_argument("--out", type=Path, default=Path("results/overhead.json"))
    parser.add_argument("--alone", action="store_true", help="measure one ingress process over a fake engine instead")
    parser.add_argument(
        "--trees", type=Path, nargs="+", default=[Path()], help="with --alone: checkouts to compare; default: this one"
    )
    kinds = list(ingress_alone.PATHS)
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds, help="with --alone: of requests; default: all")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of answers; default: 64, with --alone 4 and 64")
    parser.add_argument(
        "--client-cpus", type=int, nargs="+", help="cores of the load generator alone; the servers get the others"
    )
    return parser.parse_args()


def beside_others(arguments: argparse.Namespace) -> None:
    """Print the figures of each target under each load, and write them to a file."""
    if arguments.client_cpus:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - set(arguments.client_cpus))  # the servers inherit this affinity
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = (
            next(iter(load_settings(arguments.config).models.values()))
            if arguments.config
            else simulated(folder, arguments.time_scale)
        )
        proxies = dict(arguments.proxy)
        with started(model, [*arguments.targets, *proxies], folder, proxies, arguments.ray_python) as targets:
            loads = [Load(streams, tokens) for streams in arguments.concurrency for tokens in arguments.tokens or [OUTPUT_TOKENS]]
            report = measure(targets, model, loads, arguments.rounds, folder, arguments.client_cpus)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(table(report))


def alone(arguments: argparse.Namespace) -> None:
    """Print the CPU time of requests and tokens in the ingress process of each tree."""
    loads = [
        ingress_alone.Load(kind, streams, tokens, max(2 * streams, ALONE_TOKENS // (tokens + 16)))
        for kind in arguments.kinds
        for streams in arguments.concurrency
        for tokens in arguments.tokens or (4, OUTPUT_TOKENS)
    ]
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_llama(Path(name) / "tiny")
        with ingress_alone.started(arguments.trees, model, Path(name)) as ingresses:
            print(", ".join(f"{each.name}: pid {each.pid}" for each in ingresses), flush=True)
            figures = ingress_alone.measure(ingresses, loads, arguments.rounds)
    print(ingress_alone.table(figures))


def simulated(folder: Path, time_scale: float = 1.0) -> ModelSettings:
    """Return a tiny model, made in ``folder``, on a simulated accelerator."""
    simulated = {"profile": PROFILE, "time_scale": time_scale}
    source = str(make_tiny_llama(folder / "tiny"))
    return ModelSettings.model_validate({"name": "tiny", "model": source, "simulated": simulated, "engine_args": ENGINE})


def measure(
    targets: Sequence[Target],
    model: ModelSettings,
    loads: Sequence[Load],
    rounds: int,
    folder: Path,
    client_cpus: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Load the servers in turn; return the report: servers and machine, and one entry per run."""
    bench = partial(_bench, model=model, folder=folder, client_cpus=client_cpus)
    for target in targets:
        bench(target, Load(32), idle={})  # warm-up, not counted
    idle = {target.name: _idle_cpu(target) for target in targets}
    order = [(target, load) for load in loads for _ in range(rounds) for target in targets]
    runs = [bench(target, load, idle=idle[target.name]) for target, load in order]
    return {"machine": _machine(), "model": model.model_dump(mode="json", exclude_unset=True), "idle_cpu": idle, "runs": runs}


def _idle_cpu(target: Target) -> dict[str, float]:
    """Return CPU seconds per second, by role, without requests."""
    before = target.cpu_s()
    time.sleep(_IDLE_S)
    return {role: (seconds - before.get(role, 0.0)) / _IDLE_S for role, seconds in target.cpu_s().items()}


def _bench(
    target: Target,
    load: Load,
    *,
    model: ModelSettings,
    folder: Path,
    idle: Mapping[str, float],
    client_cpus: Sequence[int] | None,
) -> dict[str, Any]:
    """Load one server; return vLLM's figures and, by role, the additional CPU us per output token."""
    started_s, before = time.monotonic(), target.cpu_s()
    result = folder / "result.json"
    command = ["taskset", "--cpu-list", ",".join(map(str, client_cpus))] if client_cpus else []
    command += [*VLLM, "bench", "serve", "--base-url", target.url, "--model", model.name]
    command += ["--tokenizer", source_of(model)]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(load.tokens)]
    command += ["--ignore-eos", "--num-prompts", str(REQUESTS.get(load.streams, 8 * load.streams)), "--seed", "1"]
    command += ["--max-concurrency", str(load.streams), "--num-warmups", "0", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--result-filename", str(result)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment(model)})
    figures = json.loads(result.read_text())
    tokens = figures["total_output_tokens"]
    after, elapsed_s = target.cpu_s(), time.monotonic() - started_s
    cpu = {r: (after[r] - before.get(r, 0.0) - idle.get(r, 0.0) * elapsed_s) / tokens * 1e6 for r in after}
    run = {
        "target": target.name,
        "concurrency": load.streams,
        "tokens": load.tokens,
        "failed": figures["failed"],
        "cpu_us_per_token": cpu,
    }
    run |= {name: figures[name] for name in METRICS}
    print(f"{target.name:9} x{load.streams:<4} {load.tokens} {run['output_throughput']:8.0f} tok/s  {_show_cpu(cpu)}", flush=True)
    return run


def _machine() -> dict[str, Any]:
    import ray
    import torch
    import vllm

    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "ray": ray.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def table(report: Mapping[str, Any]) -> str:
    """Return the Markdown table: medians over the rounds, the range of the throughput, and the CPU time of idle servers."""
    rows = [
        "| streams | tokens | server | tok/s (min-max) | x bare | TTFT p50/p99 ms | ITL p50/p99 ms | CPU us/token above idle |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_side: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for run in report["runs"]:
        by_side.setdefault((run["concurrency"], run["tokens"], run["target"]), []).append(run)
    for (streams, tokens, target), runs in sorted(by_side.items()):
        bare = [r["output_throughput"] for r in by_side.get((streams, tokens, "bare"), ())]
        rates = [r["output_throughput"] for r in runs]
        ratio = f"{statistics.median(rates) / statistics.median(bare):.2f}" if bare else "-"
        middle = {name: statistics.median(r[name] for r in runs) for name in METRICS}
        roles = {role for r in runs for role in r["cpu_us_per_token"]}
        cpu = {role: statistics.median(r["cpu_us_per_token"].get(role, 0.0) for r in runs) for role in roles}
        rows.append(
            f"| {streams} | {tokens} | {target} | {statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f}) | {ratio} "
            f"| {middle['median_ttft_ms']:.1f} / {middle['p99_ttft_ms']:.1f} "
            f"| {middle['median_itl_ms']:.1f} / {middle['p99_itl_ms']:.1f} | {_show_cpu(cpu)} |"
        )
    for name, cpu in report["idle_cpu"].items():
        rows.append(f"\nIdle {name}, ms of CPU per second: {_show_cpu({role: rate * 1e3 for role, rate in cpu.items()})}")
    return "\n".join(rows)


def _show_cpu(cpu: Mapping[str, float]) -> str:
    return ", ".join(f"{role} {value:.1f}" for role, value in sorted(cpu.items()) if value >= 0.5)


if __name__ == "__main__":
    main()
