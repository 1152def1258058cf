"""An engine over two nodes ends as a whole, whichever of its processes is killed. Real supervisors, and engines without vLLM."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app
from tests.replica.nodes import VICTIMS, Nodes, two_nodes, until_all_gone

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
REASONS = {
    "engine core": KILLED,
    "first worker": "RuntimeError: a worker has ended",
    "second supervisor": "node 1 of the engine: its connection ended",
    "headless executor": f"node 1 of the engine: {KILLED}",
    "second worker": "node 1 of the engine: RuntimeError: a worker has ended",
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
        assert " ".join(first.hears("died")) == f"the engine core died: {REASONS[victim]}"
