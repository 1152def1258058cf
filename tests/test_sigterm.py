"""SIGTERM reaches a worker of Ray that has an `OrderlyEnd`: Ray's own handler in a process of its own, without a cluster."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import worker

from serve_app.host.sigterm import RAYS_LAST_CALL, OrderlyEnd

LIMIT_S = 60.0
WORKER = """
import asyncio, itertools, sys, threading, time, types
from ray._private.worker import Worker
from serve_app.host.sigterm import OrderlyEnd

async def drain():
    print("draining", flush=True)
    if sys.argv[1] == "blocked":
        time.sleep(3600)
    print(await asyncio.to_thread(sys.stdin.readline), end="", flush=True)

async def serve():
    OrderlyEnd(drain, float(sys.argv[2])).begin_at_sigterm()
    print("serving", flush=True)
    await asyncio.Event().wait()

def run_task_loop():  # stands for Ray's, in C++, which looks for signals every few milliseconds
    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    for _ in itertools.count():
        time.sleep(0.01)

worker = Worker()
worker.core_worker = types.SimpleNamespace(run_task_loop=run_task_loop)
worker.main_loop()
"""


@contextlib.contextmanager
def serving(loop: str, *, limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """A worker that serves; its event loop is "free" while it drains, or "blocked"."""
    command = [sys.executable, "-c", WORKER, loop, str(limit_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        yield process


@pytest.mark.parametrize("loop", ["free", "blocked"])
def test_a_drain_that_does_not_end_is_cut_at_the_limit(loop: str) -> None:
    with serving(loop, limit_s=0.5) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 1


def test_sigterm_drains_a_worker_once_and_then_ends_it_as_ray_would() -> None:
    with serving("free", limit_s=3600.0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        process.stdin.write("the last stream has ended\n")
        process.stdin.flush()
        assert process.stdout.readline() == "the last stream has ended\n"
        assert process.wait(LIMIT_S) == 1
        assert process.stdout.read() == "", "another drain"


def test_serves_own_stop_waits_for_the_drain_that_runs() -> None:
    drains, may_end = list[str](), asyncio.Event()

    async def drain() -> None:
        drains.append("began")
        await may_end.wait()
        drains.append("ended")

    async def stop_twice() -> None:
        end = OrderlyEnd(drain, limit_s=3600.0)
        end.check()
        stops = [asyncio.create_task(end.drained()) for _ in range(2)]
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*stops)
        await end.drained()

    asyncio.run(stop_twice())
    assert drains == ["began", "ended"]


@pytest.mark.parametrize("why", ["SIGTERM has come", "a node drains"])
def test_serves_health_check_fails_from_the_begin_of_the_end(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[tuple[int, int]]()
    monkeypatch.setattr(worker, RAYS_LAST_CALL, lambda: None)
    monkeypatch.setattr("os.kill", lambda pid, number: ended.append((pid, number)))

    async def drain() -> None:
        pass

    async def terminate() -> None:
        end = OrderlyEnd(drain, limit_s=3600.0)
        end.begin_at_sigterm()
        if why == "SIGTERM has come":
            getattr(worker, RAYS_LAST_CALL)("The process receives a SIGTERM.", exit_code=1)
        else:
            end.begin(why)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=why):
            end.check()
        while not ended:
            await asyncio.sleep(0)

    asyncio.run(terminate())
    assert ended == [(os.getpid(), signal.SIGTERM)]
