"""Supervisors get their processes from one fork server for each environment. The processes are real; vLLM is not imported."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.replica import forks, pipe
from serve_app.replica.child import EngineChild
from serve_app.replica.forks import ForkServers, forked, servers_here
from tests.doubles.fleet import in_loop, until
from tests.replica.test_process import environment as without_vllm

ARGUMENTS = ("-m", "tests.replica.forking")
OOM_SCORE_ADJ = int(Path("/proc/self/oom_score_adj").read_text())


class Node:
    """A Ray node as fork servers see it: its raylet is a process that waits."""

    def __init__(self, folder: Path) -> None:
        self.raylet = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE)
        self.loads = folder / "loads"
        self.environment = {**os.environ, "LOADS": str(self.loads)}
        self.servers = ForkServers(uuid.uuid4().hex, self.raylet.pid, ARGUMENTS)

    def started(self) -> list[int]:
        """Return the servers that have loaded, in their order."""
        return [int(line) for line in self.loads.read_text().splitlines()] if self.loads.exists() else []

    @asynccontextmanager
    async def engine(self, **own: str) -> AsyncIterator["Engine"]:
        """Start a process with more variables, and wait for its report."""
        engine = Engine()
        await engine.child.spawn({**self.environment, **own}, self.servers)
        try:
            engine.child.hand_over({"model": "tiny"})
            await until(lambda: engine.heard)
            yield engine
        finally:
            await engine.child.stop()


class Engine:
    """A child and what it has said."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = asyncio.Event()
        self.child = EngineChild(self._hear, self.closed.set)

    def _hear(self, message: pipe.FromEngine) -> None:
        assert isinstance(message, pipe.EngineFailed)
        self.heard.append(message.reason)

    @property
    def report(self) -> Any:
        return json.loads(self.heard[0])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node
    finally:
        node.raylet.kill()
        node.raylet.wait()


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@in_loop
async def test_one_server_makes_all_processes_of_an_environment(node: Node) -> None:
    async with node.engine(VLLM_HOST_IP="10.0.0.1") as first, node.engine() as second:
        (server,) = node.started()
        for engine, address in ((first, "10.0.0.1"), (second, None)):
            assert engine.report == {
                "arguments": {"model": "tiny"},
                "server": server,
                "session": engine.child.pid,
                "address": address,
                "folder": os.getcwd(),
                "oom_score_adj": OOM_SCORE_ADJ,
                "descriptors": 5,  # standard ones, the pipe, and the list itself
            }


@in_loop
async def test_another_environment_has_a_server_of_its_own(node: Node) -> None:
    async with node.engine() as one, node.engine(OMP_NUM_THREADS="7") as other:
        assert node.started() == [one.report["server"], other.report["server"]]


@in_loop
async def test_processes_that_start_at_once_share_the_server_that_the_first_one_starts(node: Node) -> None:
    async with node.engine() as one, asyncio.TaskGroup() as group:

        async def another() -> None:
            async with node.engine() as engine:
                assert engine.report["server"] == one.report["server"]

        for _ in range(3):
            group.create_task(another())
    assert len(node.started()) == 1


@in_loop
async def test_a_process_writes_where_its_supervisor_does(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    async with node.engine():
        pass
    capfd.readouterr()
    async with node.engine():
        assert capfd.readouterr().err == "written to standard error\n"


@in_loop
async def test_a_process_ends_with_its_pipe_and_its_server_stays(node: Node) -> None:
    async with node.engine() as engine:
        pid = engine.child.pid
        assert pid is not None
    assert not runs(pid)
    async with node.engine() as another:
        assert another.report["server"] == engine.report["server"]


@in_loop
async def test_a_killed_process_closes_its_pipe(node: Node) -> None:
    async with node.engine() as engine:
        engine.child.kill()
        await engine.closed.wait()
        await until(lambda: not psutil.pid_exists(engine.child.pid or 0))  # the server leaves no zombie


@in_loop
async def test_processes_outlive_a_killed_server_and_the_next_one_gets_a_new_server(node: Node) -> None:
    async with node.engine() as engine:
        os.kill(engine.report["server"], signal.SIGKILL)
        await until(lambda: not runs(engine.report["server"]))
        async with node.engine() as another:
            assert runs(engine.child.pid or 0)
            assert another.report["server"] == node.started()[1]


@in_loop
async def test_a_server_ends_with_the_raylet(node: Node) -> None:
    async with node.engine() as engine:
        node.raylet.kill()
        await until(lambda: not runs(engine.report["server"]))


@in_loop
async def test_a_server_without_processes_ends_after_a_while(node: Node) -> None:
    async with node.engine(LINGER_S="0.01") as engine:
        server = engine.report["server"]
        assert runs(server)
    await until(lambda: not runs(server))


@pytest.mark.parametrize("why", ["the server fails", "the raylet has ended"])
@in_loop
async def test_where_no_server_makes_a_process_an_engine_starts_as_usual(
    why: str, node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The usual engine reports that its import of vLLM fails."""
    if why == "the raylet has ended":
        node.raylet.kill()
        node.raylet.wait()
    node.environment |= without_vllm(tmp_path, "raise RuntimeError('this is no vLLM')")
    node.environment["PYTHONPATH"] += f":{os.getcwd()}"
    async with node.engine(FAILS="1") as engine:
        assert engine.heard == ["RuntimeError: this is no vLLM"]
    assert "this engine starts as a new process" in caplog.text


@in_loop
async def test_a_server_that_is_too_late_makes_no_second_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.engine() as engine:
        server = psutil.Process(engine.report["server"])
        server.suspend()
        ends = socket.socketpair()
        conn = node.servers.ask(node.environment, [ends[0].fileno(), 0, 1, 2])
        with pytest.raises(TimeoutError):
            await forked(conn, limit_s=0.01)
        conn.close()
        server.resume()
        async with node.engine() as another:  # the server takes one after the other
            assert {child.pid for child in server.children()} == {engine.child.pid, another.child.pid}
        for end in ends:
            end.close()


@in_loop
async def test_a_start_that_is_given_up_while_the_server_loads_leaves_nothing(node: Node) -> None:
    engine = Engine()
    await engine.child.spawn(node.environment, node.servers)
    await engine.child.stop()
    assert engine.child.pid is None
    async with node.engine() as another:
        assert [child.pid for child in psutil.Process(another.report["server"]).children()] == [another.child.pid]


def test_where_ray_kills_what_outlives_a_worker_there_are_no_servers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert servers_here("node") is not None
    monkeypatch.setenv(forks._SUBREAPER, "true")
    assert servers_here("node") is None
    assert "warm_start has no effect" in caplog.text
