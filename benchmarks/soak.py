"""The soak checks that a fleet stays the same size (memory, descriptors, threads, tasks) under a load that comes and goes.

    python -m benchmarks.soak [--minutes 60] [--port 8090]

``make soak`` starts a fleet of two simulated accelerators and keeps 70 % of the places in their batches busy. Clients open a connection
for each request; some disconnect in mid-answer, some send requests that are refused, and all prompts except their system prompts are new.
Every ``--kill-every`` seconds the engine of the youngest replica is killed; the older replica and the ingress live through the whole soak.
The first quarter of the time is warm-up. Exit status 0: each process that lived through the rest is as large in its last third as in its
first, and no answer failed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.processes import role_of, server
from benchmarks.routing import text
from serve_app.checkpoints import make_tiny_llama

REPLICAS, PLACES = 2, 24
LOAD = 0.7
"""Share of the places in the engines' batches that requests take."""
SAMPLE_S = 5.0
WARM_UP_SHARE = 0.25
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 400
LEAVES, REFUSED = 0.1, 0.05
"""Share of clients that close the connection in mid-answer, and share of clients whose request is refused."""
ROOM = {"memory MiB": 8.0, "descriptors": 8.0, "threads": 4.0, "tasks": 8.0}
"""A figure has grown if its last third is above 1.05 x its first third + this number."""
_START_S, _ANSWER_S = 600.0, 300.0


@dataclass(frozen=True)
class Sample:
    """One sample of one process. ``tasks`` counts the tasks of the ingress's event loop, from its series."""

    at: float
    pid: int
    role: str
    figures: dict[str, float]


@dataclass
class Record:
    """The record of a soak. ``ends`` counts requests by their end."""

    samples: list[Sample] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0


def config_of(model: Path, port: int) -> dict[str, Any]:
    """Return the configuration of the fleet."""
    engine = {"max_model_len": 2048, "max_num_seqs": PLACES}
    return {
        "name": f"soak-{port}",
        "models": {
            "tiny": {
                "model": str(model),
                "simulated": {"profile": "a10g-llama-8b"},
                "engine_args": engine,
                "replicas": {"min": REPLICAS, "max": REPLICAS},
                "num_cpus": 0.1,
            }
        },
        "ingress": {"port": port, "num_cpus": 0.1},
        "timeouts": {"drain_s": 5},
    }


async def client(url: str, rng: random.Random, record: Record) -> None:
    """Send one request, and record its end."""
    max_tokens = min(600, max(8, int(rng.lognormvariate(4.5, 0.8))))
    system = text(("soak", rng.randrange(SYSTEM_PROMPTS)), SYSTEM_TOKENS)
    ids = [number % 200 + 10 for number in [*system, *text(rng.random(), rng.randint(20, 600))]]
    body: dict[str, Any] = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    path, kind = "/v1/completions", rng.random()
    body["stream"] = kind < LEAVES or rng.random() < 0.8
    if kind > 1 - REFUSED:
        body["max_tokens"] = -1
    elif rng.random() < 0.3:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": " ".join(map(str, body.pop("prompt")[:300]))}]
    leave_after = rng.randint(1, 5) if kind < LEAVES else None
    try:
        async with (
            httpx.AsyncClient(timeout=_ANSWER_S, verify=False) as http,
            http.stream("POST", url + path, json=body) as answer,
        ):
            record.ends[await _end(answer, leave_after)] += 1
    except httpx.HTTPError as exc:
        record.ends[f"failed: {type(exc).__name__}"] += 1


async def _end(answer: httpx.Response, leave_after: int | None) -> str:
    """Return how an answer ended for its client."""
    lines = []
    async for line in answer.aiter_lines():
        lines.append(line)
        if leave_after is not None and sum(each.startswith("data: ") for each in lines) >= leave_after:
            return "left"
    if answer.status_code == 400:
        return "refused"
    if answer.status_code != 200:
        return f"failed: status {answer.status_code}"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "answered"
    ended = "data: [DONE]" in lines and not any(line.startswith('data: {"error"') for line in lines)
    return "answered" if ended else "failed: a stream without its end"


async def clients(url: str, rng: random.Random, record: Record, until: float) -> None:
    """Make the load of one place: one request after another, each on a new connection."""
    await asyncio.sleep(rng.random() * 5)
    while time.monotonic() < until:
        await client(url, rng, record)


async def watch(url: str, root: psutil.Process, record: Record, until: float) -> None:
    """Sample all processes repeatedly."""
    async with httpx.AsyncClient(timeout=60, verify=False) as http:
        while time.monotonic() < until:
            scraped = (await http.get(f"{url}/metrics")).text
            tasks = next(float(line.split()[1]) for line in scraped.splitlines() if line.startswith("serve_app_tasks "))
            record.samples += await asyncio.to_thread(looks, root, tasks)
            await asyncio.sleep(SAMPLE_S)


def looks(root: psutil.Process, tasks: float) -> list[Sample]:
    """Return one sample of each process below ``root``."""
    at, samples = time.monotonic(), []
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            role = role_of(process) if role_of(process) != "other" else process.name()
            memory, descriptors = process.memory_full_info().uss / 2**20, process.num_fds()
            figures = {"memory MiB": memory, "descriptors": float(descriptors), "threads": float(process.num_threads())}
            samples.append(Sample(at, process.pid, role, figures | ({"tasks": tasks} if role == "ingress" else {})))
    return samples


async def kill(root: psutil.Process, every_s: float, record: Record, until: float) -> None:
    """Kill the youngest engine core repeatedly, but not in the last minute."""
    while until - time.monotonic() > every_s + 60:
        await asyncio.sleep(every_s)
        engines = [each for each in root.children(recursive=True) if role_of(each) == "engine core"]
        if len(engines) == REPLICAS:
            max(engines, key=psutil.Process.create_time).kill()
            record.num_kills += 1


async def soak(url: str, root: psutil.Process, arguments: argparse.Namespace) -> Record:
    """Load, kill and watch; return the record."""
    record, until = Record(), time.monotonic() + 60 * arguments.minutes
    async with asyncio.TaskGroup() as tg:
        for number in range(int(LOAD * REPLICAS * PLACES)):
            tg.create_task(clients(url, random.Random(f"{arguments.seed} {number}"), record, until))
        tg.create_task(watch(url, root, record, until))
        tg.create_task(kill(root, arguments.kill_every, record, until))
    return record


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return a line per figure that grew, and print a row per process that lived through the time after the warm-up."""
    begin, end = samples[0].at, samples[-1].at  # all samples taken together have the same time
    warm_at = begin + WARM_UP_SHARE * (end - begin)
    problems = []
    print("| process | pid | figure | first third | last third | most |\n|---|---|---|---|---|---|")
    for pid in sorted({sample.pid for sample in samples}):
        of_it = [sample for sample in samples if sample.pid == pid]
        if of_it[0].at > warm_at or of_it[-1].at < end:
            continue
        counted = [sample for sample in of_it if sample.at >= warm_at]
        third = max(1, len(counted) // 3)
        for name in counted[0].figures:
            values = [sample.figures[name] for sample in counted]
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            print(f"| {of_it[0].role} | {pid} | {name} | {first:.0f} | {last:.0f} | {max(values):.0f} |")
            if last > 1.05 * first + ROOM[name]:
                problems.append(f"{of_it[0].role} {pid}: {name} grew from {first:.0f} to {last:.0f}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/soak.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(make_tiny_llama(folder / "tiny"), arguments.port)
        (folder / "soak.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(folder / "soak.yaml")]
        url = f"http://127.0.0.1:{arguments.port}"
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        with server(command, f"{url}/readyz", log=folder / "up.log", environment=quiet, start_s=_START_S) as root:
            record = asyncio.run(soak(url, root, arguments))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    samples = [[s.at, s.pid, s.role, s.figures] for s in record.samples]
    arguments.out.write_text(json.dumps({"samples": samples, "ends": record.ends, "kills": record.num_kills}))
    problems = grown(record.samples) + [f"{n} requests {end}" for end, n in record.ends.items() if end.startswith("failed")]
    print(f"{arguments.minutes:g} minutes, {record.num_kills} engines killed, requests: {dict(record.ends)}", *problems, sep="\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
