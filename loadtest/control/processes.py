"""This module starts Locust's processes as children of this process, sends them messages, watches them and ends them."""

import errno
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loadtest.errors import InvalidRun, UsageError
from loadtest.records import read_manifest
from loadtest.wire.target import API_KEY_VARIABLE, Target

POLL_S = 0.1
END_S = 5.0
"""Time for processes to end after they were asked to; then they are killed."""
CONNECT_S = 120
"""Time for all workers to connect to the master; then the master gives up and reports it."""
LOCUST = (sys.executable, "-P", "-m", "loadtest.control.locust_command", "-f", str(Path(__file__).with_name("locustfile.py")))
"""Locust's command with this kit loaded."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GAVE_UP = "Gave up waiting for workers"
"""Locust's own log message."""


@contextmanager
def caught_signals() -> Iterator[list[str]]:
    """Collect the names of SIGINT and SIGTERM instead of ending. Outside the main thread the signals cannot be caught."""
    caught: list[str] = []
    first_at = 0.0

    def catch(number: int, _: object) -> None:
        nonlocal first_at
        first_at = first_at or time.perf_counter()
        if not caught or time.perf_counter() - first_at > 1.0:  # some senders signal the process and then its group
            caught.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, catch) for number in _SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Elsewhere:
    """Workers that other processes start, perhaps on other machines: the address at which the master waits for them, and how long."""

    host: str
    port: int
    wait_s: float

    @classmethod
    def at(cls, address: str, wait_s: float) -> Self:
        """Return the value for an address like ``0.0.0.0:5557``.

        Raises:
            UsageError: The text is no such address, or no process can listen there.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError("--bind", f"{address!r} is not like 0.0.0.0:5557")
        try:
            socket.create_server((host, int(port))).close()
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                way_out = "take another port, or an address of this machine"
                raise UsageError("--bind", f"{address}: {os.strerror(exc.errno)}; {way_out}") from exc
        return cls(host, int(port), wait_s)


class Generator:
    """Locust's processes: one, or a master and its workers, on loopback or elsewhere."""

    def __init__(self, num_workers: int, target: Target, out: Path, elsewhere: Elsewhere | None = None) -> None:
        common = ["--host", target.base_url, "--obey-stdin", "--loglevel", "WARNING"]
        head = [*common, "--headless", "--only-summary", "--run-folder", str(out)]
        self._commands, self._num_workers, self._listen = [head], num_workers, elsewhere
        if elsewhere or num_workers > 1:
            listen = elsewhere or Elsewhere("127.0.0.1", _free_port(), CONNECT_S)
            bind = ["--master", "--master-bind-host", listen.host, "--master-bind-port", str(listen.port)]
            expect = ["--expect-workers", str(num_workers), "--expect-workers-max-wait", str(math.ceil(listen.wait_s))]
            self._commands = [[*head, *bind, *expect]]
            worker = [*common, "--worker", "--master-host", listen.host, "--master-port", str(listen.port)]
            self._commands += [] if elsewhere else [worker] * num_workers
        self._environment = {**os.environ, API_KEY_VARIABLE: target.api_key}
        self._out = out
        self._children: list[Child] = []
        self._told: set[str] = set()
        self._at_once = False
        self.killed_by = ""
        """The signal that killed the processes: the first signal before the start, or a second signal after it."""

    def __enter__(self) -> Self:
        self._children = [Child(command, self._environment) for command in self._commands]
        return self

    def __exit__(self, *_: object) -> None:
        """Return when all processes are gone. Processes that were asked to end get time for it; without a master, no worker was asked."""
        until = time.perf_counter() + (0.0 if self._children[0].status or self._at_once else END_S)
        for child in self._children:
            child.end(until)

    def wait(
        self, signals: list[str], *, limit_s: float, on_start: Sequence[Callable[[float], None]], each: Callable[[], None]
    ) -> None:
        """Return when the master has ended. ``on_start`` are called with the epoch in Unix time, ``each`` every 0.1 s.

        Raises:
            InvalidRun: A worker ended before the run began, so that the run cannot begin; or the run lasts longer than ``limit_s``.
        """
        master, *workers = self._children
        started = False
        until = math.inf
        while not master.ended(POLL_S):
            if not started and (epoch_unix_s := read_manifest(self._out).epoch_unix_s):
                started, until = True, time.perf_counter() + limit_s
                for begin in on_start:
                    begin(epoch_unix_s)
            if time.perf_counter() > until:
                self._at_once = True
                raise InvalidRun([f"the generator did not end within {limit_s:g} s of the start"])
            for number, worker in enumerate(workers):
                if worker.ended(0) and not started:
                    if worker.status == 0 and master.ended(END_S):  # the master ended it and knows why
                        return
                    raise InvalidRun([f"worker process {number} ended before the start: {worker.last_words()}"])
                if worker.ended(0):
                    self._tell(f"lost worker process {worker.pid} ended: {worker.last_words()}")
            if signals:
                self._tell(f"interrupt {signals[0]}")
            if len(signals) > 1 or (signals and not started):
                self._at_once, self.killed_by = True, signals[-1]
                return
            each()

    def dismiss(self, signals: list[str]) -> None:
        """Tell the workers that there is no run and no folder; return when they know, or when a signal came."""
        while not signals and not self._children[0].ended(POLL_S):
            pass

    def _tell(self, order: str) -> None:
        if order not in self._told:
            self._told.add(order)
            self._children[0].tell(order)

    def last_words(self) -> list[str]:
        """Return why the master failed; empty if it did not."""
        master = self._children[0]
        if not master.status:
            return []
        words = f"killed at {self.killed_by}" if self.killed_by else master.last_words()
        if self._listen and _GAVE_UP in words:
            place, wait_s = f"{self._listen.host}:{self._listen.port}", self._listen.wait_s
            words = f"not all {self._num_workers} workers connected to {place} within {wait_s:g} s; start them, or raise --wait-s"
        return [f"the generator: {words}"]


class Child:
    """One of our Locust processes, in its own session: only the owner receives a Ctrl-C at the terminal."""

    def __init__(self, options: list[str], environment: dict[str, str]) -> None:
        command = [*LOCUST, *options]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._lines: deque[str] = deque(maxlen=40)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.decode(errors="replace").rstrip())

    def ended(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended
            self._process.stdin.write(f"{order}\n".encode())
            self._process.stdin.flush()

    def last_words(self) -> str:
        self._reader.join(1.0)
        status = self._process.poll()
        how = f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"exit status {status}"
        return ": ".join([how, *[line for line in self._lines if line][-1:]])

    def end(self, until: float) -> None:
        """Return when the process is gone; it is killed at ``until`` (``time.perf_counter()``)."""
        if not self.ended(max(0.0, until - time.perf_counter())):
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        with suppress(BrokenPipeError):
            self._process.communicate()
