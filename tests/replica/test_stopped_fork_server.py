"""A fork server that is stopped while it imports costs the supervisors that wait for it seconds, not the whole limit of the import."""

import os
import signal
from pathlib import Path

import pytest

from serve_app.replica.forks import ForkServers
from tests.doubles.fleet import in_loop, until
from tests.replica.test_forks import ARGUMENTS, Engine, Node, node, runs
from tests.replica.test_process import environment as without_vllm

__all__ = ["node"]


async def start(node: Node, servers: ForkServers) -> Engine:
    engine = Engine()
    await engine.child.spawn(node.environment, servers)
    engine.child.hand_over({"model": "tiny"})
    return engine


@in_loop
async def test_a_server_stopped_in_its_import_is_killed_and_all_that_wait_start_as_usual(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that starts as usual reports that its import of vLLM fails."""
    os.mkfifo(until_written := tmp_path / "until")
    node.environment |= without_vllm(tmp_path, "raise RuntimeError('this is no vLLM')")
    node.environment |= {"UNTIL": str(until_written), "PYTHONPATH": f"{node.environment['PYTHONPATH']}:{os.getcwd()}"}
    other = ForkServers(node.servers._node, node.raylet.pid, ARGUMENTS)
    engines = [await start(node, servers) for servers in (node.servers, other)]
    await until(node.started)
    (server,) = node.started()
    os.kill(server, signal.SIGSTOP)
    await until(lambda: all(engine.heard for engine in engines))
    assert [engine.heard for engine in engines] == [["RuntimeError: this is no vLLM"]] * 2
    assert caplog.text.count("it was stopped while it imported, and was killed") == 1
    assert caplog.text.count("this engine starts as a new process") == 2
    await until(lambda: not runs(server))
    for engine in engines:
        await engine.child.stop()


@in_loop
async def test_a_server_that_was_stopped_for_a_moment_still_makes_the_process(node: Node, tmp_path: Path) -> None:
    os.mkfifo(until_written := tmp_path / "until")
    node.environment |= {"UNTIL": str(until_written)}
    engine = await start(node, node.servers)
    await until(node.started)
    (server,) = node.started()
    os.kill(server, signal.SIGSTOP)
    os.kill(server, signal.SIGCONT)
    until_written.write_text("loaded")
    await until(lambda: engine.heard)
    assert engine.report["server"] == server
    await engine.child.stop()
