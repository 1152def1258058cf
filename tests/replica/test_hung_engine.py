"""An engine that hangs is killed, a supervisor that hangs is, too, and an engine that only takes long is not. Real processes.

A test sleeps where an engine must be idle for a while, and between two looks at processes that are not its children.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.replica.hanging import FILE
from tests.replica.supervised import HEALTH
from tests.replica.tensor_parallel import living_group

pytestmark = pytest.mark.engine


@dataclass
class Pair:
    """A supervisor and its engine core, and the file that makes its steps hang."""

    supervisor: subprocess.Popen[str]
    file: Path
    engine_pid: int = 0

    def tell(self, *words: str) -> None:
        assert self.supervisor.stdin is not None
        print(*words, file=self.supervisor.stdin, flush=True)

    def hears(self, word: str) -> str:
        """Return the supervisor's next line that begins with ``word``; no earlier line may report a lost engine."""
        assert self.supervisor.stdout is not None
        for line in self.supervisor.stdout:
            if line.startswith(word):
                return line.strip()
            assert not line.startswith("lost"), line
        raise AssertionError(f"the supervisor ended without a line {word!r}")

    def work(self) -> None:
        """Begin a long request and wait until its steps are counted; those of probes are not."""
        self.tell("add", "r1")
        while int(self.hears("step").split()[1]) == 0:
            pass

    def until_gone(self) -> None:
        """Wait for the end of the engine's processes; the test's own limit ends the wait."""
        while living_group(self.engine_pid):
            time.sleep(0.05)


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    file = tmp_path / "hang"
    command = [sys.executable, "-m", "tests.replica.supervised", str(model)]
    environment = {**os.environ, FILE: str(file), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as supervisor:
        started = Pair(supervisor, file)
        try:
            started.engine_pid = int(started.hears("engine").split()[1])
            started.hears("ready")
            yield started
        finally:
            supervisor.kill()
            for process in living_group(started.engine_pid) if started.engine_pid else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def stop_engine_core(pair: Pair) -> None:
    os.kill(pair.engine_pid, signal.SIGSTOP)


def deadlock(pair: Pair) -> None:
    pair.file.write_text("deadlock")


@pytest.mark.slow
def test_an_engine_that_deadlocks_in_the_midst_of_a_request_is_killed(pair: Pair) -> None:
    pair.work()
    deadlock(pair)
    assert pair.hears("lost") == "lost engine_silent"
    pair.until_gone()


def test_an_engine_that_is_idle_or_slow_is_left_alone_and_killed_once_it_deadlocks(pair: Pair) -> None:
    time.sleep(2 * HEALTH.eject_after_s)  # idle

    pair.file.write_text("compute")
    pair.work()
    assert not pair.file.exists()

    deadlock(pair)
    assert pair.hears("lost") == "lost engine_silent"
    pair.until_gone()


def test_an_engine_core_leaves_ctrl_c_and_sigterm_to_its_supervisor_and_is_killed_once_it_is_stopped(pair: Pair) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pair.engine_pid, number)
    pair.work()

    stop_engine_core(pair)  # in the middle of the request
    assert pair.hears("lost") == "lost engine_stopped"
    pair.until_gone()


def test_an_engine_core_that_is_stopped_ends_with_its_supervisor(pair: Pair) -> None:
    stop_engine_core(pair)
    pair.supervisor.kill()
    pair.until_gone()


def block(pair: Pair) -> None:
    pair.tell("block")


def stop_supervisor(pair: Pair) -> None:
    os.kill(pair.supervisor.pid, signal.SIGSTOP)


@pytest.mark.parametrize("hang", [block, pytest.param(stop_supervisor, marks=pytest.mark.slow)])
def test_a_supervisor_that_hangs_is_killed_with_its_engine(pair: Pair, hang: Callable[[Pair], None]) -> None:
    hang(pair)
    assert pair.supervisor.wait() == -signal.SIGKILL
    pair.until_gone()
