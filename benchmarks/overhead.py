"""What the fleet costs beside a bare ``vllm serve``: same engine flags, simulated accelerator, interleaved rounds.

``make bench-overhead``. The load is vLLM's own ``vllm bench serve``: 64 + 64 tokens, EOS ignored, a fixed number of streams.
All servers are up all the time and idle but for the one under test. CPU is that of each server's process tree while it is
loaded, so that the generator, which shares the two cores, is not in it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import cpu_by_role, server
from serve_app.checkpoints import make_tiny_llama

PROFILE = "h100-llama-8b"
ENGINE = {"max_model_len": 1024, "max_num_seqs": 256, "dtype": "float32", "enforce_eager": True}
INPUT_TOKENS, OUTPUT_TOKENS = 64, 64
REQUESTS = {1: 40, 32: 640, 256: 2048}
"""Requests per run and concurrency: about 10 s each on two cores."""
METRICS = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
VLLM = [sys.executable, "-m", "benchmarks.vllm_cli"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass
class Target:
    """One server under test."""

    name: str
    url: str
    root: psutil.Process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=sorted(REQUESTS))
    parser.add_argument("--targets", nargs="+", default=["bare", "fleet-1", "fleet-2"])
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("results/overhead.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_tiny_llama(Path(folder) / "tiny")
        starters = {"bare": _bare, "fleet-1": _fleet, "fleet-2": _fleet}
        targets = [starters[n](stack, n, model, Path(folder), arguments.time_scale) for n in arguments.targets]
        for target in targets:
            _bench(target, model, 32, Path(folder))  # warm-up, not counted
        runs = [
            _bench(target, model, concurrency, Path(folder))
            for concurrency in arguments.concurrency
            for _ in range(arguments.rounds)
            for target in targets
        ]
    report = {"machine": _machine(), "time_scale": arguments.time_scale, "profile": PROFILE, "runs": runs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(table(report))


def _bare(stack: ExitStack, name: str, model: Path, folder: Path, time_scale: float) -> Target:
    simulated = {"simulated": {"profile": PROFILE, "time_scale": time_scale}}
    flags = ["--max-model-len", str(ENGINE["max_model_len"]), "--max-num-seqs", str(ENGINE["max_num_seqs"])]
    flags += ["--dtype", str(ENGINE["dtype"]), "--enforce-eager", "--disable-uvicorn-access-log"]
    flags += ["--distributed-executor-backend", "serve_app.simulated.executor.SimulatedExecutor"]
    flags += ["--additional-config", json.dumps(simulated), "--served-model-name", "tiny"]
    command = [*VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", "8060", *flags]
    url = "http://127.0.0.1:8060"
    log = folder / f"{name}.log"
    root = stack.enter_context(server(command, f"{url}/health", log=log, environment=ENVIRONMENT, start_s=180))
    return Target(name, url, root)


def _fleet(stack: ExitStack, name: str, model: Path, folder: Path, time_scale: float) -> Target:
    replicas = int(name.removeprefix("fleet-"))
    port = 8060 + replicas
    config = {
        "name": f"bench-{name}",
        "models": [
            {
                "name": "tiny",
                "model": str(model),
                "simulated": {"profile": PROFILE, "time_scale": time_scale},
                "engine_args": ENGINE,
                "replicas": {"min": replicas, "max": replicas},
                "num_cpus": 0.1,
            }
        ],
        "ingress": {"port": port, "num_cpus": 0.1},
        "timeouts": {"drain_s": 5},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(path)]
    url = f"http://127.0.0.1:{port}"
    log = folder / f"{name}.log"
    root = stack.enter_context(server(command, f"{url}/readyz", log=log, environment=ENVIRONMENT, start_s=240))
    return Target(name, url, root)


def _bench(target: Target, model: Path, concurrency: int, folder: Path) -> dict[str, Any]:
    """Load one server with ``concurrency`` streams and return vLLM's figures and CPU microseconds per output token by role."""
    before = cpu_by_role(target.root)
    result = folder / "result.json"
    command = [*VLLM, "bench", "serve", "--base-url", target.url, "--model", "tiny", "--tokenizer", str(model)]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--ignore-eos", "--num-prompts", str(REQUESTS.get(concurrency, 8 * concurrency)), "--seed", "1"]
    command += ["--max-concurrency", str(concurrency), "--num-warmups", "0", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--result-filename", str(result)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ENVIRONMENT})
    figures = json.loads(result.read_text())
    tokens = figures["total_output_tokens"]
    after = cpu_by_role(target.root)
    cpu = {role: (after[role] - before.get(role, 0.0)) / tokens * 1e6 for role in after}
    run = {"target": target.name, "concurrency": concurrency, "failed": figures["failed"], "cpu_us_per_token": cpu}
    run |= {name: figures[name] for name in METRICS}
    print(f"{target.name:8} x{concurrency:<4} {run['output_throughput']:8.0f} tok/s  {_show_cpu(cpu)}", flush=True)
    return run


def _machine() -> dict[str, Any]:
    import ray
    import vllm

    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "ray": ray.__version__,
    }


def table(report: Mapping[str, Any]) -> str:
    """Return the Markdown table: medians over the rounds, and the range of the throughput."""
    rows = [
        "| streams | server | tok/s (min-max) | x bare | TTFT p50/p99 ms | ITL p50/p99 ms | CPU us/token by process |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(r["concurrency"], r["target"]) for r in report["runs"]})
    for concurrency, target in keys:
        runs = [r for r in report["runs"] if (r["concurrency"], r["target"]) == (concurrency, target)]
        bare = [r["output_throughput"] for r in report["runs"] if (r["concurrency"], r["target"]) == (concurrency, "bare")]
        rates = [r["output_throughput"] for r in runs]
        ratio = f"{statistics.median(rates) / statistics.median(bare):.2f}" if bare else "-"
        middle = {name: statistics.median(r[name] for r in runs) for name in METRICS}
        roles = {role for r in runs for role in r["cpu_us_per_token"]}
        cpu = {role: statistics.median(r["cpu_us_per_token"].get(role, 0.0) for r in runs) for role in roles}
        rows.append(
            f"| {concurrency} | {target} | {statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f}) | {ratio} "
            f"| {middle['median_ttft_ms']:.1f} / {middle['p99_ttft_ms']:.1f} "
            f"| {middle['median_itl_ms']:.1f} / {middle['p99_itl_ms']:.1f} | {_show_cpu(cpu)} |"
        )
    return "\n".join(rows)


def _show_cpu(cpu: Mapping[str, float]) -> str:
    return ", ".join(f"{role} {value:.1f}" for role, value in sorted(cpu.items()) if value >= 0.5)


if __name__ == "__main__":
    main()
