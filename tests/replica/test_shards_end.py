"""An engine over two nodes ends as a whole, whichever of its processes is killed. Real supervisors, and engines without vLLM."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app
from serve_app.config import ProtocolSettings
from serve_app.engine_args import NodeOfEngine
from serve_app.errors import EngineDied, EngineOutOfMemory
from serve_app.replica import shard as shard_module
from serve_app.replica.group import ReadyPort, first_draining
from serve_app.replica.members import Members
from serve_app.replica.oom_kills import OomKills
from serve_app.replica.shard import Shard, Summons
from tests.doubles.fleet import in_loop, until
from tests.replica.nodes import VICTIMS, Nodes, two_nodes, until_all_gone
from tests.replica.sharded import HERE, model_of

ROOT = Path(serve_app.__path__[0]).parent

ENGINE = """
import socket, subprocess, sys
import msgspec
from serve_app.core.load import EngineLoad
from serve_app.links.protocol.messages import Capabilities
from serve_app.replica import pipe
from serve_app.replica.cold_start import EnginePhases
end = pipe.EngineEnd(socket.socket(fileno=int(sys.argv[1])))
rank = msgspec.json.decode(sys.stdin.buffer.read())["engine_args"]["node_rank"]
worker = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
if rank == 0:
    end.send(pipe.EngineReady("0.32.0", "f" * 16, Capabilities(2048, 128, 512, ("generate",), "w" * 16), 8, EnginePhases(0.0, 0.0, 0.0)))
    end.send(pipe.StepOutputs(pipe.PROBE_SLOT, EngineLoad(1), 0.0, ["probe"], b"", 1))
worker.wait()
raise RuntimeError("a worker has ended")
"""
"""Takes the place of vLLM: has one worker on each node, is ready, and ends with its worker."""

KILLED = "the engine core process ended without a message (killed?)"
WORKER_ENDED = "RuntimeError: a worker has ended"
LOST = "node 1 of the engine: its connection "
REASONS = {
    "engine core": [KILLED],
    "first worker": [WORKER_ENDED],
    "second supervisor": [f"{LOST}ended", f"{LOST}was lost: "],  # lost, if the killed process had not read all that had come
    "headless executor": [f"node 1 of the engine: {KILLED}"],
    "second worker": [f"node 1 of the engine: {WORKER_ENDED}"],
}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "vllm.py").write_text(ENGINE)
    (tmp_path / "request").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with two_nodes(tmp_path, tmp_path / "request", environment) as started:
        yield started


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left_on_either_node_when_one_process_is_killed(nodes: Nodes, victim: str) -> None:
    first, second = nodes
    first.hears("ready")
    second.worker()
    os.kill(VICTIMS[victim](nodes), signal.SIGKILL)
    until_all_gone(nodes)
    if victim in REASONS:
        assert " ".join(first.hears("died")).startswith(tuple(f"the engine core died: {reason}" for reason in REASONS[victim]))


def cgroup(folder: Path, num_kills: int) -> None:
    (folder / "memory.events").write_text(f"oom_kill {num_kills}\n")


@pytest.mark.parametrize("num_kills", [0, 1])
@in_loop
async def test_a_shard_whose_process_the_kernel_killed_says_so(
    num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE)
    (tmp_path / "cgroup").write_text("0::/\n")
    cgroup(tmp_path, 0)
    monkeypatch.setattr(shard_module, "OomKills", lambda: OomKills(tmp_path, tmp_path))
    members, losses = Members(1, silence_s=60.0), list[EngineDied]()
    port = await members.listen(HERE)
    summons = Summons(NodeOfEngine(1, HERE, HERE, 1), port, members.secret, 60.0)
    shard = Shard(model_of(str(tmp_path)), summons, {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    running = asyncio.create_task(shard.run())
    await members.all_joined()
    members.watch(losses.append)
    await until(lambda: shard.pid)
    cgroup(tmp_path, num_kills)
    assert shard.pid is not None
    os.kill(shard.pid, signal.SIGKILL)
    await running
    await until(lambda: losses)
    reason = "the kernel killed a process of the engine: out of memory" if num_kills else KILLED
    lost_as = EngineOutOfMemory if num_kills else EngineDied
    assert [(type(loss), loss.reason) for loss in losses] == [(lost_as, f"node 1 of the engine: {reason}")]
    members.close()


@in_loop
async def test_a_shard_is_found_at_the_fixed_port_of_replicas_only_once_the_engine_serves() -> None:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    ready = ReadyPort(ProtocolSettings(host=HERE, port=port))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HERE, port)
    ready.open()
    assert ready._opening is not None
    server = await ready._opening
    reader, writer = await asyncio.open_connection(HERE, port)
    assert await reader.read() == b""
    writer.close()
    server.close()


@in_loop
async def test_without_a_fixed_port_a_shard_does_not_listen() -> None:
    ready = ReadyPort(ProtocolSettings())
    ready.open()
    assert ready._opening is None


@in_loop
async def test_a_member_whose_node_ray_drains_is_found_also_after_a_look_that_failed() -> None:
    looks: list[dict[str, int] | OSError] = [{"other": 0}, OSError("no head"), {"other": 0, "second": 1}]

    def look() -> dict[str, int]:
        seen = looks.pop(0)
        if isinstance(seen, OSError):
            raise seen
        return seen

    assert await first_draining({"second", "third"}, look, every_s=0.0) == ("second", 1)
    assert not looks
