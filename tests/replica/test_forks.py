"""Supervisors get their processes from one fork server for each environment. The processes are real; vLLM is not imported."""

import asyncio
import json
import os
import select
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
from serve_app.replica.forks import ForkServers, servers_here
from tests.doubles.fleet import in_loop, until
from tests.replica.test_process import environment as without_vllm

ARGUMENTS = ("-m", "tests.replica.forking")
OOM_SCORE_ADJ = int(Path("/proc/self/oom_score_adj").read_text())
SUPERVISOR = """
import asyncio, os, sys
from serve_app.replica.child import EngineChild
from serve_app.replica.forks import ForkServers

async def supervise(node, raylet, *arguments):
    child = EngineChild(print, print)
    await child.spawn(os.environ, ForkServers(node, int(raylet), arguments))
    await asyncio.Event().wait()

asyncio.run(supervise(*sys.argv[1:]))
"""
"""Asks for a process, and waits. Its arguments: a node, the raylet's process id, Python's arguments for a server."""


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

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this node's environment: supervisors, servers and engines."""
        of_all = psutil.process_iter(["environ"])
        return [process for process in of_all if (process.info["environ"] or {}).get("LOADS") == str(self.loads)]

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
                "shows_environment": True,
                "descriptors": 5,  # standard ones, the pipe, and the list itself
            }


@in_loop
async def test_another_environment_has_a_server_of_its_own(node: Node) -> None:
    async with node.engine() as one, node.engine(OMP_NUM_THREADS="7") as other:
        assert node.started() == [one.report["server"], other.report["server"]]


@in_loop
async def test_processes_that_start_at_once_share_a_server(node: Node) -> None:
    servers = set()

    async def another() -> None:
        async with node.engine() as engine:
            servers.add(engine.report["server"])

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(another())
    assert servers == set(node.started())
    assert len(servers) == 1


@in_loop
async def test_a_process_takes_over_what_its_supervisor_has_and_its_server_has_not(
    node: Node, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_order(adjustment: int) -> None:
        Path("/proc/self/oom_score_adj").write_text(str(adjustment))

    with capfd.disabled():
        async with node.engine():
            pass
    monkeypatch.chdir(tmp_path)
    set_order(OOM_SCORE_ADJ + 1)
    try:
        async with node.engine() as engine:
            assert len(node.started()) == 1
            assert engine.report["folder"] == str(tmp_path)
            assert engine.report["oom_score_adj"] == OOM_SCORE_ADJ + 1
            assert capfd.readouterr().err == "written to standard error\n"
    finally:
        set_order(OOM_SCORE_ADJ)


@in_loop
async def test_after_an_upgrade_there_is_another_server(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "upgraded.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "_IMPORTED", ("upgraded",))
    async with node.engine() as one, node.engine() as same:
        assert same.report["server"] == one.report["server"]
        (tmp_path / "new.py").write_text("")
        (tmp_path / "new.py").rename(tmp_path / "upgraded.py")
        async with node.engine() as other:
            assert node.started() == [one.report["server"], other.report["server"]]


@in_loop
async def test_several_wait_for_the_end_of_one_process(node: Node) -> None:
    async with node.engine() as engine:
        process = engine.child._process
        assert process is not None
        given_up, *waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        given_up.cancel()
        engine.child.kill()
        await asyncio.gather(*waiting)
        assert given_up.cancelled()


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


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"FAILS": "1"}, "no such library"),
        ({"CUDA": "initialized"}, "vLLM's import has initialized CUDA, which a fork cannot use: set warm_start: false"),
        ({}, "No such process"),
        ({}, "another user or container"),
    ],
)
@in_loop
async def test_where_no_server_makes_a_process_an_engine_starts_as_usual(
    own: dict[str, str],
    why: str,
    node: Node,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The usual engine reports that its import of vLLM fails."""
    if why == "No such process":
        node.raylet.kill()
        node.raylet.wait()
    elif why == "another user or container":
        monkeypatch.setattr(pipe, "peer_of", lambda sock: pipe.Peer(0, os.getuid()))
    node.environment |= without_vllm(tmp_path, "raise RuntimeError('this is no vLLM')")
    node.environment["PYTHONPATH"] += f":{os.getcwd()}"
    async with node.engine(**own) as engine:
        assert engine.heard == ["RuntimeError: this is no vLLM"]
    assert "this engine starts as a new process" in caplog.text
    assert why in caplog.text


@in_loop
async def test_a_server_whose_import_leaves_cuda_alone_makes_processes(node: Node) -> None:
    async with node.engine(CUDA="left alone") as engine:
        assert node.started() == [engine.report["server"]]


@in_loop
async def test_a_stopped_server_is_killed_and_the_next_start_makes_another(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that loads has more time. An engine that starts as usual reports that its import of vLLM fails."""
    monkeypatch.setattr(forks, "FORK_S", 0.01)
    node.environment |= without_vllm(tmp_path, "raise RuntimeError('this is no vLLM')")
    node.environment["PYTHONPATH"] += f":{os.getcwd()}"
    async with node.engine() as first:
        (server,) = node.started()
        os.kill(server, signal.SIGSTOP)
        async with node.engine() as second:
            assert second.heard == ["RuntimeError: this is no vLLM"]
            assert "it did not answer within 0.01 s, and was killed" in caplog.text
        await until(lambda: not runs(server))
        async with node.engine() as third:
            assert runs(first.child.pid or 0)
            assert node.started() == [server, third.report["server"]]


@in_loop
async def test_a_server_that_answered_while_the_loop_stood_still_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.engine() as engine:
        ends = socket.socketpair()
        with ends[0], ends[1], node.servers.ask(node.environment, [ends[0].fileno(), 0, 1, 2]) as conn:
            assert select.select([conn], [], [], 60)[0]
            monkeypatch.setattr(forks, "FORK_S", 0.0)
            process = await node.servers.forked(conn)
        await process.wait()
        assert runs(engine.report["server"])


@in_loop
async def test_a_server_that_fails_says_so_to_each(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node.environment |= without_vllm(tmp_path, "raise RuntimeError('this is no vLLM')")
    node.environment["PYTHONPATH"] += f":{os.getcwd()}"
    for number in (1, 2):
        async with node.engine(FAILS="1"):
            assert len(node.started()) == 1
            assert caplog.text.count("no such library") == number


@in_loop
async def test_a_start_without_any_process_fails_with_the_reason(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.raylet.kill()
    node.raylet.wait()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    async with node.engine() as engine:
        assert "/no/such/python" in engine.heard[0]
        await engine.closed.wait()
        assert engine.child.pid is None


@pytest.mark.parametrize(("pid", "other_user", "is_own"), [(7, 0, True), (0, 0, False), (7, 1, False)])
def test_only_this_user_and_container_is_served(pid: int, other_user: int, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "peer_of", lambda sock: pipe.Peer(pid, os.getuid() + other_user))
    with socket.socket() as sock:
        assert pipe.is_own(sock) is is_own


@pytest.mark.parametrize(
    ("begins", "whose", "said"), [("thread", "self", "threads"), ("", "parent", "raylet has adopted"), ("", "self", "")]
)
def test_a_server_with_threads_or_below_the_raylet_does_not_fork(begins: str, whose: str, said: str) -> None:
    """In a process of its own, because the one of the tests has threads."""
    code = "import os, threading; from serve_app.replica.fork_server import why_not_to_fork\nwait = threading.Event()\n"
    code += "threading.Thread(target=wait.wait).start()\n" if begins else ""
    code += f"print(why_not_to_fork(os.pidfd_open(os.get{'p' if whose == 'parent' else ''}pid()))); wait.set()"
    environment = {**os.environ, **forks._DEFAULTS}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert said in answer
    assert bool(answer) is bool(said)


@in_loop
async def test_a_fork_that_nobody_takes_ends(node: Node) -> None:
    async with node.engine() as engine:
        server = psutil.Process(engine.report["server"])
        ends = socket.socketpair()
        conn = node.servers.ask(node.environment, [ends[0].fileno(), 0, 1, 2])
        await until(lambda: len(server.children()) == 2)
        conn.close()  # its message lies unread
        await until(lambda: [child.pid for child in server.children()] == [engine.child.pid])
        server.suspend()
        node.servers.ask(node.environment, [ends[0].fileno(), 0, 1, 2]).close()
        server.resume()
        async with node.engine() as another:  # the server takes one after the other
            await until(lambda: {child.pid for child in server.children()} == {engine.child.pid, another.child.pid})
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


@pytest.mark.parametrize("ends_with", ["linger", "raylet"])
@in_loop
async def test_a_supervisor_killed_while_its_server_loads_leaves_nothing(ends_with: str, node: Node, tmp_path: Path) -> None:
    """The server ends as one without a process does: it had none."""
    os.mkfifo(until_written := tmp_path / "until")
    node.environment |= {"UNTIL": str(until_written), "LINGER_S": "0.01" if ends_with == "linger" else "600"}
    command = [sys.executable, "-c", SUPERVISOR, uuid.uuid4().hex, str(node.raylet.pid), *ARGUMENTS]
    supervisor = await asyncio.create_subprocess_exec(*command, env=node.environment)
    await until(node.started)
    supervisor.kill()
    await supervisor.wait()
    if ends_with == "raylet":
        node.raylet.kill()
    assert [process.pid for process in node.processes()] == node.started()
    until_written.write_text("loaded")
    await until(lambda: not node.processes())


def test_where_ray_kills_what_outlives_a_worker_there_are_no_servers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert servers_here("node") is not None
    monkeypatch.setenv(forks._SUBREAPER, "true")
    assert servers_here("node") is None
    assert "warm_start has no effect" in caplog.text
