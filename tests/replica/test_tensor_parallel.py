"""However a tensor-parallel engine ends, none of its processes outlives it: each would hold the memory of a GPU.

A test sleeps between two looks at processes that are not its children.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.checkpoints import make_tiny_llama
from tests.replica.tensor_parallel import ATTEMPT_ID, living_group, until_gone

pytestmark = pytest.mark.engine

NUM_WORKERS = 2


def command_line(process: psutil.Process) -> str:
    """Return a process's command line, empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@dataclass
class Engine:
    """A supervisor that runs, and the processes of its engine."""

    supervisor: subprocess.Popen[str]
    pid: int

    def group(self) -> list[psutil.Process]:
        """Return the living processes of the engine core's group."""
        return living_group(self.pid)

    def workers(self) -> list[psutil.Process]:
        return [p for p in self.group() if p.pid != self.pid and "resource_tracker" not in command_line(p)]

    def hears(self, word: str) -> str:
        """Return the supervisor's next line that begins with ``word``."""
        assert self.supervisor.stdout is not None
        for line in self.supervisor.stdout:
            if line.startswith(word):
                return line.strip()
        raise AssertionError(f"the supervisor ended without a line {word!r}")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of the program: a checkpoint, and a request that runs as long as a test."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    request = EngineCoreRequest(
        request_id=ATTEMPT_ID,
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=2000, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    (encoded,) = MsgpackEncoder().encode(request)
    (folder / "request").write_bytes(encoded)
    return [str(make_tiny_llama(folder / "model")), str(folder / "request")]


@pytest.fixture
def engine(arguments: list[str]) -> Iterator[Engine]:
    command = [sys.executable, "-m", "tests.replica.tensor_parallel", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        started = Engine(supervisor, 0)
        try:
            started.pid = int(started.hears("engine").split()[1])
            yield started
        finally:
            supervisor.kill()
            for process in started.group() if started.pid else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def kill_supervisor(engine: Engine) -> None:
    engine.supervisor.kill()


def kill_engine_core(engine: Engine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def kill_worker(engine: Engine) -> None:
    engine.workers()[-1].kill()


def hang_workers(engine: Engine) -> None:
    for worker in engine.workers():
        worker.suspend()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_supervisor, kill_engine_core, kill_worker])
def test_nothing_is_left_of_an_engine_that_was_loading(engine: Engine, kill: Callable[[Engine], None]) -> None:
    while len(engine.workers()) < NUM_WORKERS:
        time.sleep(0.05)
    kill(engine)
    until_gone(engine.pid)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_supervisor, kill_engine_core])
def test_nothing_is_left_of_an_engine_that_was_serving_with_workers_that_hang(
    engine: Engine, kill: Callable[[Engine], None]
) -> None:
    engine.hears("tokens")
    hang_workers(engine)
    kill(engine)
    until_gone(engine.pid)
    if kill is kill_engine_core:
        assert engine.hears("died") == "died the engine core died: the engine core process ended without a message (killed?)"


def test_nothing_is_left_of_a_serving_engine_that_lost_a_worker_and_the_supervisor_knows(engine: Engine) -> None:
    engine.hears("tokens")
    kill_worker(engine)
    engine.hears("died")
    until_gone(engine.pid)
