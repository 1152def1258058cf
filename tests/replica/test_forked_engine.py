"""Simulated engines are forks of one process, and none of them outlives its supervisor, whichever process is killed."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.replica.hanging import FILE
from tests.replica.test_hung_engine import Pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def supervisor(*arguments: str, file: Path) -> Iterator[Pair]:
    command = [sys.executable, "-m", "tests.replica.supervised", *arguments]
    environment = {**os.environ, FILE: str(file), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            pair = Pair(process, file)
            pair.engine_pid = int(pair.hears("engine").split()[1])
            yield pair
        finally:
            process.kill()


def test_forks_work_and_end_with_their_supervisors_and_without_their_server(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    with ExitStack() as stack:
        raylet = stack.enter_context(subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE))
        node = (str(model), uuid.uuid4().hex, str(raylet.pid))
        pairs = [stack.enter_context(supervisor(*node, file=tmp_path / "hang")) for _ in range(3)]
        for pair in pairs:
            pair.hears("ready")
        lost, stopped, killed = pairs
        (server,) = {psutil.Process(pair.engine_pid).ppid() for pair in pairs}
        assert "serve_app.replica.engine" in " ".join(psutil.Process(lost.engine_pid).cmdline())
        killed.work()

        os.kill(lost.engine_pid, signal.SIGKILL)
        assert lost.supervisor.stdout is not None
        assert "lost engine_dead\n" in lost.supervisor.stdout
        lost.until_gone()

        stopped.supervisor.send_signal(signal.SIGSTOP)  # its engine kills it, and ends
        assert stopped.supervisor.wait() == -signal.SIGKILL
        stopped.until_gone()

        os.kill(server, signal.SIGKILL)
        killed.hears("step")
        killed.supervisor.kill()
        killed.until_gone()
