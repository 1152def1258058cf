"""This module injects a scenario's faults on time: it kills or stops processes, cuts the relay's connections, runs commands.

A process is killed or stopped only below a root that the scenario names, and only if it is the only match. A stopped process
continues after its time even if this process is killed: a shell at the other end of a pipe continues it when the pipe closes.
"""

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import psutil

from loadtest.errors import UsageError
from loadtest.plan.scenario import Fault, Scenario
from loadtest.records import RunEvent
from loadtest.wire.relay import Relay

# A rollout by kubectl takes longer than for_s, which is the length of a pause for the other actions.
MIN_COMMAND_LIMIT_S = 60.0
_MAX_OUTPUT = 300


class _NotInjected(Exception):
    """A fault did not happen, or not as planned."""


def relay_needed(scenario: Scenario) -> bool:
    """Return whether the load must pass a `loadtest.wire.relay.Relay` because a fault cuts connections."""
    return any(fault.action == "cut-link" for fault in scenario.faults)


def below(faults: Sequence[Fault], pid: int | None) -> tuple[Fault, ...]:
    """Return the faults with the root ``pid`` added where they have none: a scenario file cannot know process ids."""
    return tuple(f if f.below_pid is not None else f.model_copy(update={"below_pid": pid}) for f in faults)


def check_faults(faults: Sequence[Fault], longest_s: float) -> None:
    """Check the faults before the run, except that `process` matches exactly one process: that is known only at the fault's time.

    Raises:
        UsageError: A fault has no process, root or command, or its root or program does not exist; or its time is after the end of the
            run, which lasts ``longest_s`` at most.
    """
    for index, fault in enumerate(faults):
        where = f"faults.{index}"
        if fault.at_s >= longest_s:
            ends = f"{fault.at_s:g} is not before duration_s and drain_s together, {longest_s:g}, so the fault would never happen"
            raise UsageError(f"{where}.at_s", f"{ends}; lower at_s or raise duration_s")
        if fault.action in ("kill", "stop"):
            _check_process(where, fault)
        elif fault.action == "command":
            if not fault.command:
                raise UsageError(f"{where}.command", "action: command needs a program and its arguments, as a list")
            if shutil.which(fault.command[0]) is None:
                raise UsageError(f"{where}.command", f"no program {fault.command[0]!r} here or on PATH")


def _check_process(where: str, fault: Fault) -> None:
    if not fault.process:
        raise UsageError(f"{where}.process", f"action: {fault.action} needs a part of the command line of one process")
    if fault.below_pid is None:
        raise UsageError(f"{where}.below_pid", "give the process id below which the process runs; no other is ever touched")
    if not psutil.pid_exists(fault.below_pid):
        raise UsageError(f"{where}.below_pid", f"no process {fault.below_pid} is running")


def find_process(fault: Fault) -> psutil.Process:
    """Return the one process below ``below_pid`` whose command line has one of the texts; the root and this process never match.

    Raises:
        _NotInjected: No process matches, or several do.
    """
    assert fault.below_pid is not None  # checked before the run
    try:
        tree = psutil.Process(fault.below_pid).children(recursive=True)
    except psutil.NoSuchProcess as exc:
        raise _NotInjected(f"below_pid {fault.below_pid} is not running any more") from exc
    fitting = []
    for process in tree:
        with contextlib.suppress(psutil.Error):  # the process has just ended
            line = shlex.join(process.cmdline())
            if process.pid != os.getpid() and any(text in line for text in fault.process.split("|")):
                fitting.append(process)
    if len(fitting) != 1:
        pids = ", ".join(str(process.pid) for process in fitting) or "none"
        raise _NotInjected(f"exactly one process below {fault.below_pid} must fit {fault.process!r}, fitting: {pids}")
    return fitting[0]


class FaultRunner:
    """A runner that injects each fault at its time, from a thread of its own; with Locust's gevent the thread is a greenlet.

    Args:
        now: Seconds from the run's epoch, the clock of ``at_s``.
        emit: Receives each event; called from the faults' threads, one call at a time.
        relay: The relay that ``cut-link`` cuts; required if `relay_needed`.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        now: Callable[[], float],
        emit: Callable[[RunEvent], None],
        *,
        relay: Relay | None = None,
    ) -> None:
        self.problems: list[str] = []
        """Faults that did not happen as planned; they make the run invalid, because it is not the run that was planned."""
        self.not_begun: list[str] = []
        """Faults whose time had not come at `stop`. They are problems too, unless the run was interrupted."""
        self._now = now
        self._emit = emit
        self._relay = relay
        self._emitting = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(fault,), daemon=True) for fault in faults]

    def start(self) -> None:
        atexit.register(self.stop)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End running faults: continue stopped processes, kill commands. Faults whose time has not come never happen;
        `not_begun` lists them."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        atexit.unregister(self.stop)

    def _run(self, fault: Fault) -> None:
        if self._stopping.wait(max(0.0, fault.at_s - self._now())):
            self.not_begun.append(f"{_name(fault)} at {fault.at_s:g} s: the run ended before its time, after {self._now():.1f} s")
            return
        act = {"kill": self._kill, "stop": self._stop, "cut-link": self._cut_link, "command": self._command}[fault.action]
        try:
            act(fault)
        except (_NotInjected, psutil.Error, OSError) as exc:
            self.problems.append(f"{_name(fault)} at {fault.at_s:g} s: {exc}")
            self._say("note", f"fault failed: {self.problems[-1]}")

    def _kill(self, fault: Fault) -> None:
        process = find_process(fault)
        process.kill()
        self._say("fault", f"{_name(fault)}: killed process {process.pid}")

    def _stop(self, fault: Fault) -> None:
        process = find_process(fault)
        with _continued(process):
            process.suspend()
            self._say("fault", f"{_name(fault)}: stopped process {process.pid}")
            self._stopping.wait(fault.for_s)
        self._say("fault-end", f"{_name(fault)}: continued process {process.pid}")

    def _cut_link(self, fault: Fault) -> None:
        if self._relay is None:
            raise _NotInjected("the load does not go through a relay")
        self._relay.cut(fault.for_s)
        self._say("fault", f"{_name(fault)}: cut")
        if fault.for_s > 0:
            self._stopping.wait(fault.for_s)
            self._say("fault-end", _name(fault))

    def _command(self, fault: Fault) -> None:
        limit_s = max(fault.for_s, MIN_COMMAND_LIMIT_S)
        deadline = self._now() + limit_s
        # A file, not a pipe: a process that the program leaves in the background would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                fault.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._say("fault", f"{_name(fault)}: {shlex.join(fault.command)}")
            while child.poll() is None and self._now() < deadline and not self._stopping.wait(0.05):
                pass
            unfinished = child.poll() is None
            if unfinished:
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
            output.seek(0)
            text = " ".join(output.read().decode(errors="replace").split())[-_MAX_OUTPUT:]
        self._say("fault-end", f"{_name(fault)}: exit status {status}: {text}")
        if unfinished or status != 0:
            why = f"killed before its end (limit {limit_s:g} s)" if unfinished else f"exit status {status}"
            raise _NotInjected(f"{shlex.join(fault.command)}: {why}: {text}")

    def _say(self, kind: Literal["fault", "fault-end", "note"], text: str) -> None:
        with self._emitting:
            self._emit(RunEvent(self._now(), kind, text))


@contextlib.contextmanager
def _continued(process: psutil.Process) -> Iterator[None]:
    """Continue the stopped process on leaving, and also if this process dies in any way."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -CONT "$0"', str(process.pid)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal must not end it
    )
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        guard.communicate()


def _name(fault: Fault) -> str:
    return fault.name or fault.action
