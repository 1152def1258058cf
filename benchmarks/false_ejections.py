"""This benchmark checks that a replica that is only slow (simulated, overloaded, CPU throttled) keeps its place in the fleet.

``make bench-false-ejections`` starts a supervisor with its engine and bounds the CPU time of both together: by a cgroup v1 quota, or, where
no cgroup can be made, by stopping and continuing them in turns. It keeps three times as many requests unfinished as the engine runs at
once, with prompts of 1600 tokens among them. Exit status 1 if the engine or the link was lost, or a request failed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import Settings, inherited_environment, parse_settings
from serve_app.core.fleet_report import describe
from serve_app.membership import Lease
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess
from serve_app.replica.server import ReplicaIdentity, ReplicaServer
from tests.doubles.fake_engine import FINGERPRINT, VLLM_VERSION
from tests.doubles.fleet import Fleet, fleet

MODEL = "tiny"
MAX_NUM_SEQS = 64
SIMULATED = {"profile": "h100-llama-8b", "time_scale": 0.05}
"""An accelerator so fast that scheduler and supervisor use a whole core unless they are throttled."""
PROMPT_TOKENS = (20, 20, 20, 500, 1600)
ANSWER_TOKENS = (20, 400)
PERIOD_S = 0.1
"""Period of the quota, or of stopping and continuing."""
CGROUPS = Path("/sys/fs/cgroup/cpu")
START_LIMIT_S = 300.0


def settings_of(model_path: str) -> Settings:
    args = {"max_model_len": 2048, "max_num_seqs": MAX_NUM_SEQS}
    model = {"model": model_path, "simulated": SIMULATED, "engine_args": args}
    return parse_settings({"models": {MODEL: model}})


async def replica(model_path: str) -> None:
    """Run the replica's process: print the port and the engine's process id, then serve until the engine is lost."""
    settings = settings_of(model_path)
    lost = asyncio.get_running_loop().create_future()
    servers: list[ReplicaServer] = []
    engine = EngineProcess(
        settings.health, on_message=lambda message: servers[0].on_engine_message(message), on_lost=lost.set_result
    )
    path = asyncio.get_running_loop().create_future()
    path.set_result(model_path)
    ready: pipe.EngineReady = await engine.start(
        settings.models[MODEL],
        path,
        environment=inherited_environment(),
        timeout_s=START_LIMIT_S,
        max_frame_bytes=settings.protocol.max_frame_bytes,
    )
    # This benchmark's front end is a test double, which reports the fingerprint of a test double.
    ready = msgspec.structs.replace(ready, fingerprint=FINGERPRINT, vllm_version=VLLM_VERSION)
    server = ReplicaServer(ReplicaIdentity("a", model=MODEL), settings.protocol, b"", engine, ready)
    servers.append(server)
    print(json.dumps({"port": await server.listen(), "engine_pid": engine.pid}), flush=True)
    beating = asyncio.create_task(server.heartbeats())
    error = await lost
    beating.cancel()
    await server.close(error.code, str(error))
    raise SystemExit(f"the engine is lost: {error}")


@contextlib.contextmanager
def throttled(pids: list[int], share: float) -> Iterator[str]:
    """Limit these processes together to ``share`` of one core; yield the method."""
    group = CGROUPS / f"serve-app-throttled-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        with _stopped_by_turns(pids, share):
            yield "stopped and continued by turns"
        return
    try:
        (group / "cpu.cfs_period_us").write_text(str(int(PERIOD_S * 1e6)))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_S * 1e6)))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield "a cgroup's quota"
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended
                (CGROUPS / "cgroup.procs").write_text(left)
        group.rmdir()


@contextlib.contextmanager
def _stopped_by_turns(pids: list[int], share: float) -> Iterator[None]:
    """Stop and continue from a process of its own, which the load of this process does not delay."""
    pid = os.fork()
    if pid == 0:
        while True:
            for number, rest_s in ((signal.SIGSTOP, (1 - share) * PERIOD_S), (signal.SIGCONT, share * PERIOD_S)):
                for victim in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, number)
                time.sleep(rest_s)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for victim in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)


@dataclass
class Load:
    """A closed loop of requests, and its measurements."""

    fleet: Fleet
    random: random.Random
    finished: int = 0
    errors: list[str] = field(default_factory=list)
    last_at: float = 0.0
    longest_silence_s: float = 0.0
    longest_stall_s: float = 0.0
    """Longest stall of this process's own event loop. A link is lost if either end stalls for `protocol.heartbeat_timeout_s`."""

    async def run(self, num_requests: int, until: float) -> None:
        self.last_at = time.monotonic()
        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_own_loop(until))
            for _ in range(num_requests):
                group.create_task(self._loop(numbers, until))

    async def _watch_own_loop(self, until: float) -> None:
        while (before := time.monotonic()) < until:
            await asyncio.sleep(0.1)
            self.longest_stall_s = max(self.longest_stall_s, time.monotonic() - before - 0.1)

    async def _loop(self, numbers: "itertools.count[int]", until: float) -> None:
        while time.monotonic() < until:
            prompt = [self.random.randrange(3, 900) for _ in range(self.random.choice(PROMPT_TOKENS))]
            stream = await self.fleet.front.add(f"r{next(numbers)}", prompt, max_tokens=self.random.randint(*ANSWER_TOKENS))
            while not stream.finished and stream.error is None and time.monotonic() < until:
                stream.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stream.changed.wait(), 1.0)
                    self._seen()
            self.finished += stream.finished
            self.errors += [str(stream.error)] if stream.error is not None else []

    def _seen(self) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self.last_at)
        self.last_at = now


@contextlib.asynccontextmanager
async def started(model_path: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    command = [sys.executable, "-m", __spec__.name, "--replica", model_path]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not (line := await process.stdout.readline()).startswith(b"{"):
                if not line:
                    raise SystemExit("the replica did not start")
        yield process, json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def measure(model_path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    async with started(model_path) as (process, said), fleet(settings_of(model_path)) as linked:
        linked.client.set_members([Lease("a", "replica", MODEL, "127.0.0.1", said["port"], epoch=1, pid=process.pid)])
        while not linked.client.is_ready():
            await asyncio.sleep(0.1)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        used_s = sum(sum(p.cpu_times()[:2]) for p in family)
        load = Load(linked, random.Random(arguments.seed))
        with throttled([p.pid for p in family], arguments.share) as means:
            began = time.monotonic()
            playing = asyncio.create_task(load.run(int(arguments.overload * MAX_NUM_SEQS), began + 60 * arguments.minutes))
            dying = asyncio.create_task(process.wait())
            await asyncio.wait({playing, dying}, return_when=asyncio.FIRST_COMPLETED)
            lasted_s = time.monotonic() - began
            ejected, links_lost = dying.done(), describe(linked.client.fleet)["resumptions"]
            for task in (playing, dying):
                task.cancel()
            await asyncio.gather(playing, dying, return_exceptions=True)
        share = 0.0 if ejected else (sum(sum(p.cpu_times()[:2]) for p in family) - used_s) / lasted_s
    return {
        "ejected": ejected,
        "resumptions": links_lost,
        "errors": load.errors[:3],
        "lasted_s": round(lasted_s, 1),
        "throttled_by": means,
        "cpu_share_used": round(share, 3),
        "finished_requests": load.finished,
        "longest_silence_s": round(load.longest_silence_s, 2),
        "own_longest_stall_s": round(load.longest_stall_s, 2),
        "seed": arguments.seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=0.2, help="of one core, for supervisor and engine together")
    parser.add_argument(
        "--overload", type=float, default=3.0, help="unfinished requests, in multiples of what the engine runs at once"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        asyncio.run(replica(arguments.replica))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(str(make_tiny_llama(Path(folder) / MODEL)), arguments))
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["ejected"] or result["resumptions"] or result["errors"]))


if __name__ == "__main__":
    main()
