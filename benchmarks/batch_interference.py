"""This benchmark measures how a batch of the API slows chats, and how much idle capacity the batch uses.

    python -m benchmarks.batch_interference                            5 minutes on 2 cores
    python -m benchmarks.batch_interference --seed 2 --out results/b    two more rounds, of other chats
    python -m benchmarks.batch_interference --read results/a results/b  the figures of both together
    .venv-cuda/bin/python -m benchmarks.batch_interference --config gpu.yaml --rate 6    the first model of that file, for example on a GPU

The fleet is one replica with vLLM's priority scheduling behind one ingress, on a simulated accelerator unless ``--config`` is given. Chats
come by the same seeded schedule each time, in turn alone and beside a batch. At the end the batch runs alone. Idle capacity is the tokens
per second of the batch alone, less those of the chats. Results: benchmarks/results/batches-beside-chats.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.batch_lines import Lengths, lines
from benchmarks.batching_records import Run
from benchmarks.processes import cpu_by_role, server
from benchmarks.targets import VLLM, environment, fleet_config
from loadtest.control.runner import run
from loadtest.errors import InvalidRun
from loadtest.judge.series import InMemory, log_ratio
from loadtest.judge.stats import Floats
from loadtest.plan.scenario import parse_scenario
from loadtest.wire.target import Target
from serve_app.config import ModelSettings, load_settings

MODEL = {
    "name": "llama-8b",
    "model": "embedded:smollm2-135m-instruct",
    "simulated": {"profile": "h100-llama-8b", "time_scale": 2.0, "eos_probability": 0.0},
    "engine_args": {"max_model_len": 2048, "max_num_seqs": 256, "enable_prefix_caching": False},
}
START_S = 600.0
NUM_LINES = 40_000
ALONE_S = 20.0
QUANTILES = (0.5, 0.9, 0.99)
LEAST_S = 1e-6
SIDES = ("chats alone", "chats beside a batch")
RATES = "rates.json"
WORK = ("vllm:prompt_tokens", "vllm:generation_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, help="serve its first model, with vLLM's priority scheduling; default: a simulated accelerator"
    )
    parser.add_argument(
        "--rate", type=float, default=3.0, help="chats a second; time is half as fast on the simulated accelerator"
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="of each load of chats")
    parser.add_argument("--rounds", type=int, default=2, help="of chats alone and beside a batch")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's chats; the next rounds count on")
    parser.add_argument("--concurrency", type=int, default=32, help="ingress.batch.concurrency")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of vLLM as JSON, beside the model's own")
    parser.add_argument("--share", type=float, help="batch_step_share; 10 for next to no bound")
    parser.add_argument("--out", type=Path, default=Path("results/batch-interference"))
    parser.add_argument("--read", type=Path, nargs="+", help="only print the figures of these folders together")
    arguments = parser.parse_args()
    if arguments.read:
        print(report(pooled(arguments.read)))
        return
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    model = model_of(arguments.config, arguments.engine_args, arguments.share)
    config = fleet_config(model, 1) | {"name": "bench-interference"}
    config["ingress"] |= {"batch": {"dir": str((out / "store").resolve()), "concurrency": arguments.concurrency}}
    (out / "fleet.yaml").write_text(yaml.safe_dump(config))
    command = [VLLM[0], "-m", "serve_app.cli.main", "up", "-f", str(out / "fleet.yaml")]
    url = f"http://127.0.0.1:{config['ingress']['port']}"
    with server(command, f"{url}/readyz", log=out / "fleet.log", environment=environment(model), start_s=START_S) as fleet:
        seeds = range(arguments.seed, arguments.seed + arguments.rounds)
        try:
            measure(fleet, url, model.name, out, arguments.rate, arguments.seconds, seeds)
        except InvalidRun as exc:
            sys.exit(f"nothing was measured: {exc}")
    print(report(pooled([out])))


def model_of(config: Path | None, engine_args: dict[str, Any], share: float | None) -> ModelSettings:
    """Return the model to serve: the first of a configuration, or the simulated one; with further arguments of vLLM and another share."""
    values: Mapping[str, Any] = MODEL if config is None else _first_model(config)
    arguments = {**values.get("engine_args", {}), "scheduling_policy": "priority", **engine_args}
    return ModelSettings.model_validate(
        {**values, "engine_args": arguments} | ({} if share is None else {"batch_step_share": share})
    )


def _first_model(config: Path) -> dict[str, Any]:
    name, model = next(iter(load_settings(config).models.items()))
    return {**model.model_dump(mode="json", exclude_unset=True), "name": name}


def measure(fleet: psutil.Process, url: str, model: str, out: Path, rate: float, seconds: float, seeds: range) -> None:
    """Run all loads into folders of ``out``; also write tokens per second by side, and shares of a core by side and role."""
    speeds: dict[str, list[float]] = {side: [] for side in (*SIDES, "batch alone")}
    cores: dict[str, dict[str, float]] = {}
    for number in seeds:
        for side in SIDES:
            with batch(url, model) if side == SIDES[1] else nothing(), speed(url, speeds[side]), cpu(fleet, cores, side):
                chats(url, model, out / f"{_folder(side)}{number}", rate, seconds, seed=number)
            print(side, number, f"{speeds[side][-1]:.0f} tokens/s", flush=True)
    with batch(url, model), speed(url, speeds["batch alone"]), cpu(fleet, cores, "batch alone"):
        time.sleep(ALONE_S)
    (out / RATES).write_text(json.dumps({"speeds": speeds, "cores": cores, "seeds": list(seeds)}))


def pooled(folders: Sequence[Path]) -> dict[str, Any]:
    """Return latencies in seconds by side and metric of the seeds that `measure` recorded, and its figures; for cores, the last ones."""
    rates = [json.loads((out / RATES).read_text()) for out in folders]
    asked = [(out, seed) for out, rate in zip(folders, rates, strict=True) for seed in rate["seeds"]]
    runs = {side: [Run(out / f"{_folder(side)}{seed}", 1.0) for out, seed in asked] for side in SIDES}
    latencies = {
        side: {metric: np.concatenate([run.latencies_s(metric) for run in found]) for metric in ("ttft", "itl")}
        for side, found in runs.items()
    }
    speeds = {side: [speed for rate in rates for speed in rate["speeds"][side]] for side in rates[0]["speeds"]}
    return {"latencies": latencies, "speeds": speeds, "cores": rates[-1]["cores"]}


def _folder(side: str) -> str:
    return f"{side.replace(' ', '-')}-"


def report(measured: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    alone, beside = (measured["latencies"][side] for side in SIDES)
    said = ["| chats | n | alone | beside a batch | ratio (95 %) |", "|---|---|---|---|---|"]
    for metric in ("ttft", "itl"):
        a, b = alone[metric], beside[metric]
        for q in QUANTILES:
            values = f"{ms(a, q):.1f} ms | {ms(b, q):.1f} ms"
            said.append(f"| {metric.upper()} p{q * 100:.0f} | {a.size} | {values} | {ratio(b, a, q)} |")
    chats, both, batch_alone = (float(np.mean(each)) for each in measured["speeds"].values())
    share = (both - chats) / (batch_alone - chats)
    said += [
        "",
        f"Tokens/s of prompts and answers: chats {chats:.0f}, chats and batch {both:.0f}, batch alone {batch_alone:.0f}.",
    ]
    said.append(f"The batch fills {share:.0%} of the idle capacity.")
    for side, roles in measured["cores"].items():
        spent = ", ".join(f"{role} {used:.2f}" for role, used in sorted(roles.items(), key=lambda pair: -pair[1]) if used >= 0.01)
        said.append(f"Cores used, {side}: {spent}.")
    return "\n".join(said)


def ms(values: Floats, q: float) -> float:
    return 1000.0 * float(np.quantile(values, q))


def ratio(beside: Floats, alone: Floats, q: float) -> str:
    """Return the ratio of the quantiles with its interval. Gaps of 0, between tokens that came together, have no logarithm."""
    first, second = (InMemory(gaps, gaps) for gaps in (np.maximum(beside, LEAST_S), np.maximum(alone, LEAST_S)))
    found = log_ratio(first, second, q, paired=False)
    if found is None:
        return f"{ms(beside, q) / ms(alone, q):.2f} (too few for an interval)"
    middle, low, high = found.interval()
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def chats(url: str, model: str, out: Path, rate: float, seconds: float, *, seed: int) -> None:
    """Send the schedule of this seed. The reasons of an invalid run are printed, and its records count nevertheless.

    Raises:
        InvalidRun: No chat was answered.
    """
    request = {
        "token_ids": (10, 40_000),
        "input_tokens": {"dist": "uniform", "min": 16, "max": 256},
        "output_tokens": {"dist": "exponential", "mean": 48, "max": 192},
    }
    arrival = {"law": "poisson", "rate": rate}
    values = {"name": "chats", "model": model, "seed": seed + 1, "arrival": arrival, "requests": [request]}
    scenario = parse_scenario({**values, "duration_s": seconds, "warmup_s": 5.0, "drain_s": 60.0, "keep_text": False})
    run(scenario, Target(url), out, quiet=True, report=False)
    found = Run(out, 1.0)
    if not found.answered:
        raise InvalidRun(found.problems or ["no chat was answered"])
    if found.problems:
        print(f"{out.name} is invalid: {'; '.join(found.problems)}", flush=True)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def batch(url: str, model: str) -> Iterator[None]:
    """Keep a batch in progress while the block runs, then cancel it."""
    with httpx.Client(base_url=f"{url}/v1", timeout=120.0) as http:
        made = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            for i, body in enumerate(body_of(line, model) for line in lines(NUM_LINES, Lengths()))
        ]
        text = "".join(json.dumps(line) + "\n" for line in made).encode()
        file = http.post("/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = http.post("/batches", json=asked).raise_for_status().json()["id"]
        wait_for(http, batch_id, "in_progress")
        time.sleep(3.0)  # until the batch occupies its places
        try:
            yield
            status = http.get(f"/batches/{batch_id}").json()["status"]
            if status != "in_progress":
                raise RuntimeError(f"the batch is {status}: give it more lines")
        finally:
            http.post(f"/batches/{batch_id}/cancel")
            wait_for(http, batch_id, "cancelled")


def body_of(line: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model": model, **{key: value for key, value in line.items() if key != "id"}}


def wait_for(http: httpx.Client, batch_id: str, status: str) -> None:
    deadline = time.monotonic() + 120.0
    while (found := http.get(f"/batches/{batch_id}").json()["status"]) != status:
        if time.monotonic() > deadline or found == "failed":
            raise RuntimeError(f"the batch is {found}, not {status}")
        time.sleep(0.5)


@contextmanager
def speed(url: str, found: list[float]) -> Iterator[None]:
    """Append the engine's tokens per second, of prompts and answers, during the block."""
    before, began_at = tokens(url), time.monotonic()
    yield
    found.append((tokens(url) - before) / (time.monotonic() - began_at))


@contextmanager
def cpu(fleet: psutil.Process, found: dict[str, dict[str, float]], side: str) -> Iterator[None]:
    """Store under ``side`` the share of a core that each role of the fleet used during the block; the last round counts."""
    before, began_at = cpu_by_role(fleet), time.monotonic()
    yield
    took_s = time.monotonic() - began_at
    found[side] = {role: (used - before.get(role, 0.0)) / took_s for role, used in cpu_by_role(fleet).items()}


def tokens(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30.0).text)
    return sum(s.value for f in families if f.name in WORK for s in f.samples if s.name.endswith("_total"))


if __name__ == "__main__":
    main()
