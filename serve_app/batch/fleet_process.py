"""`FleetProcess` is a fleet for one job: ``serve-app up`` as a child on a free port, which ends with the job, even a killed one.

The fleet has a Ray cluster of its own, or is an application on a running cluster. In that case its ingress has to be on this machine.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import requests
import yaml

from serve_app.config import Settings, mapping_in, parse_settings, read_text
from serve_app.environment import as_typed
from serve_app.errors import BatchError

UP = (sys.executable, "-m", "serve_app.cli.main", "up", "-f", "-")
"""The command that serves the configuration from its standard input."""
_POLL_S = 0.5
_HERE_S = 30.0
"""Longest time until the URL answers, once Ray Serve reports that the application runs; then the ingress must be on another machine."""
_END_LIMIT_S = 120.0
_PR_SET_PDEATHSIG = 1


class FleetProcess:
    """A fleet that is started and ready within its ``with`` block. The process's main thread must start it.

    Linux sends the child SIGTERM when the thread that started it ends, for whatever reason; ``serve-app up`` then stops as at Ctrl-C.
    """

    def __init__(
        self,
        config: Path | Mapping[str, Any],
        *,
        port: int = 0,
        command: Sequence[str] = UP,
        address: str = "",
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Read the configuration's file, or take its content. Its name and port are replaced; ``port`` 0: a free port.

        Args:
            address: The address of a running Ray cluster; "": the fleet starts a cluster of its own.
            on_progress: Gets the child's newest line about its start whenever that line changes, until the ``with`` block is entered.

        Raises:
            ConfigError: ``serve-app up`` would refuse the configuration.
        """
        mapping = config if isinstance(config, Mapping) else mapping_in(read_text(config), config)
        self._mapping, settings = _own(mapping, port)
        self.url, self.address = settings.ingress.local_url, (settings.ingress.host, settings.ingress.port)
        self.name = settings.name
        self._called = "the fleet" if isinstance(config, Mapping) else f"the fleet of {config}"
        self._drain_s = settings.timeouts.drain_s
        self._cluster, self._command = address, [*command, *(("--address", address) if address else ())]
        self._on_progress = on_progress
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - without a name, so that it cannot outlive this process
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The child's process id, 0 when none runs."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> Self:
        """Start the fleet, and wait until its URL reports ready. The child itself gives up a fleet that cannot start.

        Raises:
            BatchError: The fleet did not start; the message holds the child's own reason.
        """
        try:
            self.start()
            runs_since, reported = math.inf, ""
            while self.status() != 200:
                has_ended = self._process is not None and self._process.poll() is not None
                if (line := _progress(self._words())) != reported:  # of a child that has ended, these are all of its words
                    self._on_progress(line)
                    reported = line
                if has_ended:
                    self.refuse_end()
                if runs_since == math.inf and self._cluster and f" at {self.url}\n" in self._words():
                    runs_since = time.monotonic()
                if time.monotonic() - runs_since > _HERE_S:
                    problem = f"{self._called} runs on {self._cluster}, and nothing answers at {self.url}"
                    hint = f"its ingress is on another machine: run this there, or start the fleet with {as_typed()} up and give --url"
                    raise BatchError(problem, hint)
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    def start(self) -> None:
        """Start the child; return at once."""
        # Remove the output of an earlier child. Children write at this file's position: past the file's end there would be NUL bytes.
        self._log.seek(0)
        self._log.truncate()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(yaml.safe_dump(self._mapping).encode())

    def status(self, timeout_s: float = 2.0) -> int:
        """Return the HTTP status of the fleet's `/readyz`, 200 when it is ready; 0 when nothing answers within ``timeout_s``."""
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/readyz", timeout=timeout_s).status_code
        return 0

    def __exit__(self, *_: object) -> None:
        self.stop()

    def refuse_end(self) -> None:
        """Raise BatchError if the fleet has ended, with the last lines of its output."""
        if self._process is not None and (code := self._process.poll()) is not None:
            hint = "fix the cause and run the same command: what was answered is kept"
            raise BatchError(f"{self._called} ended with status {code}: {self._last_words()}", hint)

    def stop(self, limit_s: float | None = None) -> None:
        """End the fleet as Ctrl-C would. A second Ctrl-C kills it, and so does a stop that takes longer than ``limit_s``.

        On a cluster that ran before, the child is first asked to cut its streams and to remove the application.

        Args:
            limit_s: None: ``timeouts.drain_s`` of the configuration plus two minutes.
        """
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(self._drain_s + _END_LIMIT_S if limit_s is None else limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            if self._cluster:
                self._cut()
            self.kill()
        self._process = None

    def _cut(self) -> None:
        """Send the second Ctrl-C, at which ``serve-app up`` no longer waits for streams, and wait for the end."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_END_LIMIT_S)

    def kill(self) -> None:
        """Kill the fleet without a drain. The reaper of its own Ray cluster ends the cluster's processes and removes the cluster's files.

        On a cluster that ran before, the application stays.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _words(self) -> str:
        """Return the child's output so far. The child writes at the position of this file, which `pread` does not move."""
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def _last_words(self) -> str:
        lines = self._words().splitlines()
        begin = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
        return " ".join(lines[max(begin, 0) :]).removeprefix("error: ") or "it printed nothing"


def _progress(words: str) -> str:
    """Return the last line of ``serve-app up`` about its start; "" before the first line.

    Lines about the start are indented. After "ready after 20 s" an indented line is part of an example.
    """
    lines = re.findall(r"^  (.+)\n", re.split(r"^ready after ", words, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)
    return lines[-1] if lines else ""


def _own(mapping: Mapping[str, Any], port: int) -> tuple[dict[str, Any], Settings]:
    """Return the configuration as a mapping and checked, under a name of this process, with ``port`` (0: a free port) and without pages."""
    settings = parse_settings(mapping)
    if not port:
        with socket.socket(socket.AF_INET6 if ":" in settings.ingress.host else socket.AF_INET) as sock:
            sock.bind((settings.ingress.host, 0))  # one of the kernel's ephemeral ports, which begin above Ray's
            port = sock.getsockname()[1]
    ingress = {**(mapping.get("ingress") or {}), "port": port}
    own = {**mapping, "name": f"batch-{os.getpid()}-{port}", "ingress": ingress}
    own.pop("ui", None)  # no user would open the pages, and `make run` beside this fleet may have their port
    return own, parse_settings(own)


def _end_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_for_a_signal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's background job ignores it, and `stop` needs it
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)

    return ask_for_a_signal
