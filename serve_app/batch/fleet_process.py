"""A fleet for one job: ``serve-app up`` as a child on a free port, which ends when the job does, however that ends."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import requests
import yaml

from serve_app.config import Settings, mapping_in, parse_settings, read_text
from serve_app.errors import BatchError

_POLL_S = 0.5
_END_LIMIT_S = 120.0
_PR_SET_PDEATHSIG = 1


class FleetProcess:
    """Started and ready within its ``with`` block. The thread that enters the block must be the process's main thread.

    Linux sends the child SIGTERM when its parent's thread ends, whatever ends it; ``serve-app up`` then stops as at Ctrl-C.
    """

    def __init__(self, file: Path) -> None:
        """Read the configuration, whose name and port are replaced.

        Raises:
            ConfigError: As ``serve-app up`` would refuse it.
        """
        self._mapping, settings = _own(mapping_in(read_text(file), file))
        self.url = settings.ingress.local_url
        self._file, self._drain_s = file, settings.timeouts.drain_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - nameless, so that nothing of it outlives this process
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it, and wait until its URL says that it is ready; the child itself gives up what cannot start.

        Raises:
            BatchError: The fleet did not start; the message holds its own reason.
        """
        command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", "-"]
        ended_with = _end_with(os.getpid())
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, start_new_session=True, preexec_fn=ended_with
            )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(yaml.safe_dump(self._mapping).encode())
            while not self._is_ready():
                self.refuse_end()
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def refuse_end(self) -> None:
        """Raise BatchError when the fleet has ended, with its last words."""
        if self._process is not None and (code := self._process.poll()) is not None:
            hint = "mend what it says and run the same command: what was answered is kept"
            raise BatchError(f"the fleet of {self._file} ended with status {code}: {self._last_words()}", hint)

    def stop(self) -> None:
        """End it as Ctrl-C would. A second Ctrl-C, or a stop that takes too long, kills it, and its reaper removes what is left."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(self._drain_s + _END_LIMIT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        self._process = None

    def _is_ready(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/readyz", timeout=2.0).status_code == 200
        return False

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        begin = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
        return " ".join(lines[max(begin, 0) :]).removeprefix("error: ") or "it said nothing"


def _own(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
    """Return the configuration under a name of this process, with a free port and without pages, as a mapping and checked."""
    settings = parse_settings(mapping)
    with socket.socket(socket.AF_INET6 if ":" in settings.ingress.host else socket.AF_INET) as sock:
        sock.bind((settings.ingress.host, 0))  # of the kernel's ephemeral ports, which begin above Ray's
        port = sock.getsockname()[1]
    ingress = {**(mapping.get("ingress") or {}), "port": port}
    own = {**mapping, "name": f"batch-{os.getpid()}-{port}", "ingress": ingress}
    own.pop("ui", None)  # nobody would look, and `make run` beside it may have the pages' port
    return own, parse_settings(own)


def _end_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_a_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)

    return ask_for_a_signal
