"""This module starts the two nodes of an engine on this machine, by ``tests.replica.sharded``, and ends single processes of them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.replica.tensor_parallel import living_group, until_gone


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


@contextlib.contextmanager
def two_nodes(model: Path, request: Path, environment: Mapping[str, str] | None = None, *, stages: int = 1) -> Iterator[Nodes]:
    """Two nodes that have joined and load the engine, which will run the request."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Node:
            command = [sys.executable, "-m", "tests.replica.sharded", *arguments]
            node = Node(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)))
            stack.callback(end, node)
            return node

        first = start("first", str(model), str(stages), str(request))
        second = start("second", str(model), str(stages), *first.hears("summons"))
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


def until_all_gone(nodes: Nodes) -> None:
    for node in nodes:
        until_gone(node.engine_pid)
