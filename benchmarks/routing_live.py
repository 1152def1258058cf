"""This benchmark compares routing policies live, on four simulated replicas behind one ingress: hit rate and time to first token.

    python -m benchmarks.routing_live [--sides load prefix ...] [--workloads NAME ...] [--seconds 60] [--port 8100]

The workloads are those of `benchmarks.routing`, at a quarter of their rate for a quarter of the replicas, and slowed by ``--time-scale``.
*least load* and *prefix* are the product's policies. For *round robin* and *consistent hash* the four replicas are four models, and the
client chooses one, so that ingress, links and engines are the same. Hit rates are vLLM's own counts. The first fifth is warm-up.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import server
from benchmarks.routing import PROFILE, WARM_UP_SHARE, WORKLOADS, Workload, score
from benchmarks.routing_fleet import BLOCK_SIZE
from serve_app.checkpoints import make_tiny_llama

REPLICAS = 4
MAX_TOKENS = 16384
ALL_REPLICAS = 16
"""Replicas of the simulation, for which the workloads' rates are made."""
SPLIT = [f"split-{number}" for number in range(REPLICAS)]
CHOSEN: dict[str, Callable[[str, int], str]] = {
    "round robin": lambda _, turn: SPLIT[turn % REPLICAS],
    "consistent hash": lambda client, _: max(SPLIT, key=lambda name: score(client, name)),
    "least load": lambda *_: "load",
    "prefix": lambda *_: "prefix",
}
"""By side, the function that chooses a client's model, from the client's name and the number of the request."""
_VOCABULARY = 200
_START_S, _ANSWER_S = 900.0, 300.0


def long_model(folder: Path) -> Path:
    """Return a tiny checkpoint that accepts `MAX_TOKENS`."""
    model = make_tiny_llama(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_TOKENS}))
    return model


def config_of(model: Path, sides: list[str], port: int, time_scale: float) -> dict[str, Any]:
    """Return the configuration of one fleet with the models of all ``sides``."""
    one = {
        "model": str(model),
        "simulated": {"profile": PROFILE, "time_scale": time_scale},
        "engine_args": {"max_model_len": MAX_TOKENS, "max_num_seqs": 256, "block_size": BLOCK_SIZE},
        "num_cpus": 0.1,
    }
    several = one | {"replicas": {"min": REPLICAS, "max": REPLICAS}}
    models = {
        by: several | {"routing": {"by": by}} for by, side in (("load", "least load"), ("prefix", "prefix")) if side in sides
    }
    if {"round robin", "consistent hash"} & set(sides):
        models |= dict.fromkeys(SPLIT, one)
    return {
        "name": f"routing-{port}",
        "models": models,
        "ingress": {"port": port, "num_cpus": 0.1},
        "timeouts": {"drain_s": 5},
    }


class Run:
    """A run of one workload with one policy. ``ttft_s`` is of the requests after the warm-up; ``failed`` counts all failed requests."""

    def __init__(self, url: str, workload: Workload, side: str, arguments: argparse.Namespace) -> None:
        self.ttft_s: list[float] = []
        self.failed = 0
        self._url, self._workload, self._side = url, workload, side
        self._scale, self._seconds = arguments.time_scale, arguments.seconds
        self._numbers = count()
        self._rng = random.Random(f"{workload.name} {arguments.seed}")  # all sides have the same arrivals and lengths
        self._shift = list(CHOSEN).index(side)  # but each its own texts, because the caches are warm from the side before
        self._begin = time.monotonic()

    async def play(self) -> float:
        """Return the hit rate after the warm-up."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_ANSWER_S, verify=False, limits=limits) as http, asyncio.TaskGroup() as tg:
            snapshot = tg.create_task(self._after_warm_up(http))
            rate = self._workload.rate * REPLICAS / ALL_REPLICAS / self._scale
            for number in count():
                await asyncio.sleep(self._rng.expovariate(rate))
                if time.monotonic() - self._begin > self._seconds:
                    break
                tg.create_task(self._client(http, f"{self._side} {number}", random.Random(self._rng.random())))
            before, after = await snapshot, await self._counts(http)
        return (after[0] - before[0]) / (after[1] - before[1])

    async def _after_warm_up(self, http: httpx.AsyncClient) -> tuple[float, float]:
        await asyncio.sleep(WARM_UP_SHARE * self._seconds)
        return await self._counts(http)

    async def _counts(self, http: httpx.AsyncClient) -> tuple[float, float]:
        """Return the prompt tokens found in prefix caches, and the prompt tokens looked up."""
        told = {"vllm:prefix_cache_hits_total": 0.0, "vllm:prefix_cache_queries_total": 0.0}
        for family in text_string_to_metric_families((await http.get(f"{self._url}/metrics")).text):
            for sample in family.samples:
                if sample.name in told:
                    told[sample.name] += sample.value
        hits, queries = told.values()
        return hits, queries

    async def _client(self, http: httpx.AsyncClient, name: str, rng: random.Random) -> None:
        """Send one turn after another until the end of the run."""
        for ids, max_tokens, pause_s in self._workload.turns(rng):
            prompt = [(number + self._shift) % _VOCABULARY + 10 for number in ids]
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
            model = CHOSEN[self._side](name, next(self._numbers))
            sent_at, first_at = time.monotonic(), None
            async with http.stream("POST", f"{self._url}/v1/completions", json=body | {"model": model}) as answer:
                async for chunk in answer.aiter_raw():
                    if first_at is None and b"data: {" in chunk:
                        first_at = time.monotonic()
                    last = chunk
            self.failed += answer.status_code != 200 or first_at is None or b"[DONE]" not in last
            if first_at is not None and sent_at - self._begin > WARM_UP_SHARE * self._seconds:
                self.ttft_s.append(first_at - sent_at)
            if time.monotonic() - self._begin + pause_s * self._scale > self._seconds:
                return
            await asyncio.sleep(pause_s * self._scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(CHOSEN), choices=CHOSEN)
    parser.add_argument("--workloads", nargs="+", default=["conversations", "shared system prompts", "hot prefix"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, in each run")
    parser.add_argument("--time-scale", type=float, default=2.0, help="of the simulated accelerators; rates and pauses follow")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(long_model(folder / "tiny"), arguments.sides, arguments.port, arguments.time_scale)
        (folder / "fleet.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(folder / "fleet.yaml")]
        url = f"http://127.0.0.1:{arguments.port}"
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        with server(command, f"{url}/readyz", log=folder / "up.log", environment=quiet, start_s=_START_S):
            print(
                "| workload | routing | requests | failed | hit rate % | TTFT p50 ms | TTFT p99 ms |\n|---|---|---|---|---|---|---|"
            )
            for workload in (each for each in WORKLOADS if each.name in arguments.workloads):
                for side in arguments.sides:
                    run = Run(url, workload, side, arguments)
                    hit_rate, ttft_s = asyncio.run(run.play()), sorted(run.ttft_s)
                    p50, p99 = (1000 * ttft_s[int(share * len(ttft_s))] for share in (0.5, 0.99))
                    figures = f"{len(ttft_s)} | {run.failed} | {100 * hit_rate:.1f} | {p50:.0f} | {p99:.0f}"
                    print(f"| {workload.name} | {side} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
