"""This benchmark checks that hostile clients harm no one else: not the fleet's processes, not its memory, not other clients' latency.

    python -m benchmarks.hostile [--cases 10000] [--clients 1000] [--port 8092] [--out results/hostile.json]

``make hostile`` starts a fleet with two simulated accelerators and a small embedding model. Ordinary clients send requests at a fixed
rate, first alone and then beside each kind of hostile clients of `benchmarks/hostile_attacks.py`. Exit status 0: no answer was a 5xx other
than a documented 503, every process of the fleet is still the same one, the ingress has grown by at most 50 MB, and the p99 of the ordinary
answers beside all attacks is at most 1.2 times the p99 before them.
"""

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.hostile_attacks import VECTORS
from benchmarks.processes import fleet, ingresses_of, role_of
from serve_app.checkpoints import make_tiny_embedding, make_tiny_llama
from tests.doubles.fleet import MODEL

RATE, TOKENS = 8.0, 16
"""Requests a second of the ordinary clients, and tokens of each answer."""
BASELINE_S = 75.0
"""How long the ordinary clients are alone: 600 requests, of which 6 are above the p99."""
WARM_UP_CASES = 400
MAX_GROWTH_MIB = 50.0
MAX_P99_RATIO = 1.2
SAMPLE_S = 1.0
REST_S = 15.0
"""Time after the last attack until the memory that stays is read."""
LASTING = ("ingress", "supervisor", "engine core")


@dataclass
class Phase:
    """A phase of the run: the ordinary clients' times, and the ends of the hostile ones' requests."""

    name: str
    first_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    whole_s: list[float] = field(default_factory=list)
    """Times to the end of the answer."""
    lost: list[str] = field(default_factory=list)
    """Ordinary requests that had no whole answer."""
    most_mib: float = 0.0
    """The ingress's largest memory (USS) in this phase."""
    lasted_s: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def config_of(folder: Path, port: int) -> dict[str, Any]:
    """Return the configuration of the fleet. A request may become 100 sequences, so that none takes all places of the engines."""
    small = {"num_cpus": 0.1, "engine_args": {"max_model_len": 512}}
    text = {
        "model": str(make_tiny_llama(folder / "text")),
        "simulated": {"profile": "a10g-llama-8b"},
        "replicas": {"min": 2, "max": 2},
    }
    vectors = {"model": str(make_tiny_embedding(folder / "vectors")), "replicas": {"min": 1, "max": 1}}
    return {
        "name": f"hostile-{port}",
        "models": {
            MODEL: {**small, **text},
            VECTORS: {**small, **vectors, "engine_args": {"max_model_len": 64, "runner": "pooling"}},
        },
        "ingress": {"port": port, "num_cpus": 0.1, "max_waiting_requests": 100},
        "timeouts": {"drain_s": 5},
    }


def p99(times_s: Sequence[float]) -> float:
    """Return the smallest time that at least 99 % of all times do not exceed; NaN if there are none."""
    return sorted(times_s)[math.ceil(0.99 * len(times_s)) - 1] if times_s else math.nan


async def ordinary(http: httpx.AsyncClient, number: int, phase: Phase) -> None:
    """Send one ordinary request, and note how long its answer took."""
    body = {
        "model": MODEL,
        "prompt": f"question {number}",
        "max_tokens": TOKENS,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    began_at, first_at, is_whole = time.monotonic(), None, False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first_at = first_at or time.monotonic()
                is_whole = is_whole or line == "data: [DONE]"
            if answer.status_code == 200 and first_at is not None and is_whole:
                phase.first_s.append(first_at - began_at)
                phase.whole_s.append(time.monotonic() - began_at)
                return
            phase.lost.append(f"status {answer.status_code}, without its end")
    except httpx.HTTPError as exc:
        phase.lost.append(repr(exc))


class Run:
    """The phases of a run against one fleet."""

    def __init__(self, url: str, root: psutil.Process, ingress: psutil.Process) -> None:
        self.phases: list[Phase] = []
        self._url = url
        self._port = int(url.rpartition(":")[2])
        self._root = root
        self._ingress = ingress
        self._sent = 0

    def memory_mib(self) -> float:
        return float(self._ingress.memory_full_info().uss / 2**20)

    @contextlib.asynccontextmanager
    async def phase(self, name: str, *, with_load: bool = True) -> AsyncIterator[Phase]:
        """Yield the phase, which lasts as long as the block. Ordinary clients send beside it."""
        phase = Phase(name)
        self.phases.append(phase)
        began_at, end = time.monotonic(), asyncio.Event()
        async with asyncio.TaskGroup() as tg:
            tg.create_task(self._watch(phase, end))
            if with_load:
                tg.create_task(self._load(phase, end))
            try:
                yield phase
            finally:
                end.set()
        phase.lasted_s = time.monotonic() - began_at
        print(row_of(phase), *phase.lost[:5], *phase.failed[:20], sep="\n", flush=True)

    async def _load(self, phase: Phase, end: asyncio.Event) -> None:
        began_at, sent = time.monotonic(), 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits, verify=False) as http,
            asyncio.TaskGroup() as tg,
        ):
            while not end.is_set():
                tg.create_task(ordinary(http, self._sent, phase))
                sent, self._sent = sent + 1, self._sent + 1
                await asyncio.sleep(max(0.0, began_at + sent / RATE - time.monotonic()))

    async def _watch(self, phase: Phase, end: asyncio.Event) -> None:
        while not end.is_set():
            phase.most_mib = max(phase.most_mib, await asyncio.to_thread(self.memory_mib))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), SAMPLE_S)

    async def attack(self, kind: str, count: int, rate: float, *, with_load: bool = True) -> None:
        """Play a kind of hostile clients as a phase of that name."""
        command = [sys.executable, "-m", "benchmarks.hostile_attacks", kind, "--port", str(self._port), "--count", str(count)]
        process = await asyncio.create_subprocess_exec(
            *command, "--rate", str(rate), stdout=asyncio.subprocess.PIPE, limit=1 << 26
        )
        assert process.stdout is not None
        await process.stdout.readline()  # it has made its requests, which takes a minute for 10,000
        async with self.phase(f"{kind}, {count}", with_load=with_load) as phase:
            said = await process.stdout.readline()
            if await process.wait() == 0:
                met = json.loads(said)
                phase.ends, phase.failed = met["ends"], met["failed"]
            else:
                phase.failed = [f"the attacker ended with status {process.returncode}"]

    def members(self) -> dict[int, str]:
        """Return process id -> role of the fleet's own processes."""
        below = {process.pid: role_of(process) for process in self._root.children(recursive=True)}
        return {pid: role for pid, role in below.items() if role in LASTING}


async def play(run: Run, *, cases: int, clients: int) -> dict[str, Any]:
    """Play all phases; return what was measured."""
    await run.attack("descriptions", WARM_UP_CASES, 40.0, with_load=False)  # what the ingress loads once, it loads here
    await run.attack("inputs", 60, 40.0, with_load=False)
    num_warm, before, at_first = len(run.phases), run.members(), run.memory_mib()
    async with run.phase("alone"):
        await asyncio.sleep(BASELINE_S)
    await run.attack("descriptions", cases, 40.0)
    await run.attack("inputs", 1000, 10.0)
    await run.attack("slow heads", clients, 50.0)
    await run.attack("slow readers", clients, 20.0)
    await run.attack("bodies of 1 GB", max(2, clients // 25), 4.0)
    await asyncio.sleep(REST_S)
    alone, *attacks = run.phases[num_warm:]
    return {
        "phases": [asdict(phase) for phase in run.phases],
        "gone": sorted(f"{role} {pid}" for pid, role in before.items() if pid not in run.members()),
        "memory_mib": {"first": at_first, "most": max(phase.most_mib for phase in attacks), "last": run.memory_mib()},
        "p99_s": {
            "whole_alone": p99(alone.whole_s),
            "whole_beside": p99([time_s for phase in attacks for time_s in phase.whole_s]),
            "first_alone": p99(alone.first_s),
            "first_beside": p99([time_s for phase in attacks for time_s in phase.first_s]),
        },
    }


def row_of(phase: Phase) -> str:
    """Return the phase's row of the table."""
    times = " | ".join(f"{1000 * p99(times_s):.0f}" for times_s in (phase.first_s, phase.whole_s))
    ends = ", ".join(f"{end}: {num}" for end, num in sorted(phase.ends.items()))
    lost = f"{len(phase.whole_s)} | {len(phase.lost)}"
    return f"| {phase.name} | {phase.lasted_s:.0f} | {ends} | {len(phase.failed)} | {lost} | {times} | {phase.most_mib:.0f} |"


def problems(measured: Mapping[str, Any]) -> list[str]:
    """Return what was not as it must be."""
    found = [problem for phase in measured["phases"] for problem in phase["failed"]]
    found += [f"ordinary request in {phase['name']!r}: {lost}" for phase in measured["phases"] for lost in phase["lost"]]
    found += [f"{process} has ended" for process in measured["gone"]]
    memory, times = measured["memory_mib"], measured["p99_s"]
    if (growth := memory["most"] - memory["first"]) > MAX_GROWTH_MIB:
        found.append(f"the ingress grew by {growth:.0f} MiB, limit {MAX_GROWTH_MIB:.0f}")
    if not (ratio := times["whole_beside"] / times["whole_alone"]) <= MAX_P99_RATIO:
        found.append(f"the p99 of ordinary answers became {ratio:.2f} times as long, limit {MAX_P99_RATIO}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="requests made from docs/openapi.json")
    parser.add_argument("--clients", type=int, default=1000, help="slow heads, and slow readers; 1 in 25 as many bodies of 1 GB")
    parser.add_argument("--port", type=int, default=8092)
    parser.add_argument("--out", type=Path, default=Path("results/hostile.json"))
    arguments = parser.parse_args()
    print(
        "| phase | s | ends | failed | ordinary | lost | p99 first token ms | p99 whole ms | ingress MiB |\n" + "|---" * 9 + "|"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with fleet(config_of(folder, arguments.port), folder) as (url, root):
            (ingress,) = ingresses_of(root)
            run = Run(url, root, ingress)
            measured = asyncio.run(play(run, cases=arguments.cases, clients=arguments.clients))
    found = problems(measured)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**measured, "problems": found}))
    memory, times = measured["memory_mib"], measured["p99_s"]
    print(f"ingress: {memory['first']:.0f} MiB at first, {memory['most']:.0f} at most, {memory['last']:.0f} at last")
    for kind in ("whole", "first"):
        alone, beside = 1000 * times[f"{kind}_alone"], 1000 * times[f"{kind}_beside"]
        print(
            f"p99 of ordinary answers, {kind}: {alone:.0f} ms alone, {beside:.0f} ms beside attacks, {beside / alone:.2f} times"
        )
    print(*found[:50], sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
