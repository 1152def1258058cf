"""An engine over two nodes answers as one on one node does, and ends as a whole, whichever of its processes ends or stops.

Both nodes are this machine. A test sleeps between two looks at processes that are not its children.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.checkpoints import make_tiny_llama
from tests.replica.answering import NUM_TOKENS, PROMPT, greedy
from tests.replica.tensor_parallel import ATTEMPT_ID, living_group, until_gone

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass
class Node:
    """A supervisor, and the process that leads its part of the engine."""

    supervisor: subprocess.Popen[str]
    engine_pid: int = 0
    heard: list[str] = field(default_factory=list)

    def hears(self, word: str) -> list[str]:
        """Return the words after ``word`` in the supervisor's next line that begins with it."""
        assert self.supervisor.stdout is not None
        for line in self.supervisor.stdout:
            self.heard.append(line)
            if line.split()[:1] == [word]:
                return line.split()[1:]
        raise AssertionError(f"the supervisor ended without a line {word!r}: {self.heard}")

    def workers(self) -> list[int]:
        return [p.pid for p in living_group(self.engine_pid) if p.pid != self.engine_pid and is_worker(p)]

    def worker(self) -> int:
        """Wait for the node's only worker; return its process."""
        while not (workers := self.workers()):
            time.sleep(0.05)
        return workers[0]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


Nodes = tuple[Node, Node]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("shards") / "model")


@pytest.fixture
def nodes(model: Path) -> Iterator[Nodes]:
    """Two nodes that have joined and load the engine, which then runs one request of 2000 tokens."""
    request = EngineCoreRequest(
        request_id=ATTEMPT_ID,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    (encoded,) = MsgpackEncoder().encode(request)
    (model / "request").write_bytes(encoded)
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Node:
            command = [sys.executable, "-m", "tests.replica.sharded", *arguments]
            node = Node(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(end, node)
            return node

        first = start("first", str(model), str(model / "request"))
        second = start("second", str(model), *first.hears("summons"))
        for node in (first, second):
            node.engine_pid = int(node.hears("engine")[0])
        yield first, second


def end(node: Node) -> None:
    node.supervisor.kill()
    for process in living_group(node.engine_pid) if node.engine_pid else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


VICTIMS: dict[str, Callable[[Nodes], int]] = {
    "first supervisor": lambda nodes: nodes[0].supervisor.pid,
    "engine core": lambda nodes: nodes[0].engine_pid,
    "first worker": lambda nodes: nodes[0].worker(),
    "second supervisor": lambda nodes: nodes[1].supervisor.pid,
    "headless executor": lambda nodes: nodes[1].engine_pid,
    "second worker": lambda nodes: nodes[1].worker(),
}
each_process = pytest.mark.parametrize("victim", VICTIMS)


def until_all_gone(nodes: Nodes) -> None:
    for node in nodes:
        until_gone(node.engine_pid)


def test_greedy_answers_are_those_of_one_process(nodes: Nodes, model: Path) -> None:
    ids: list[int] = []
    while len(ids) < NUM_TOKENS:
        ids += map(int, nodes[0].hears("tokens"))
    assert ids[:NUM_TOKENS] == greedy(model)


@each_process
def test_nothing_is_left_of_a_serving_engine_that_lost_a_process(nodes: Nodes, victim: str) -> None:
    nodes[0].hears("tokens")
    os.kill(VICTIMS[victim](nodes), signal.SIGKILL)
    until_all_gone(nodes)


@each_process
def test_nothing_is_left_of_a_loading_engine_that_lost_a_process(nodes: Nodes, victim: str) -> None:
    for node in nodes:
        node.worker()
    os.kill(VICTIMS[victim](nodes), signal.SIGKILL)
    until_all_gone(nodes)


@each_process
def test_a_serving_engine_with_a_stopped_process_ends_as_a_whole(nodes: Nodes, victim: str) -> None:
    nodes[0].hears("tokens")
    os.kill(VICTIMS[victim](nodes), signal.SIGSTOP)
    for node in nodes:
        node.supervisor.wait()
    until_all_gone(nodes)
