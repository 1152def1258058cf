"""This module ends all processes of one engine together: its engine core, which leads a group of its own, and vLLM's workers.

A worker that outlives its engine core holds its GPU's memory, and the next engine there cannot start.
"""

import contextlib
import os
import time
from typing import NoReturn

import psutil

from serve_app.core.health import ProcessUse

_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_END_S = 5.0  # a worker may be inside a call of the GPU driver that no signal interrupts
_POLL_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def end_group(leader: int) -> bool:
    """Kill the group of the engine core process ``leader``, except the calling process. Return whether there was a process to kill.

    Python's resource tracker is spared, too: it ends by itself after the others, and removes their shared memory. A process that was
    about to fork when it was killed may have left a child, so this function looks again until it finds no new process.
    """
    killed: set[int] = set()
    while members := [process for process in psutil.process_iter() if process.pid not in killed and _is_to_end(process, leader)]:
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
            killed.add(process.pid)
    return bool(killed)


def group_use(leader: int) -> dict[int, ProcessUse]:
    """Return the processes of the group that ``leader`` leads, by process id.

    Read from /proc directly, because this runs twice a second: psutil would make an object of every process of the machine.

    Raises:
        OSError: /proc cannot be read, for example because this process has no file descriptor left.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
                if os.getpgid(int(name)) == leader:
                    found[int(name)] = _use_of(name)
    return found


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, as by SIGSTOP; OSError: it has ended."""
    return _use_of(str(pid)).stopped


def _use_of(pid: str) -> ProcessUse:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # after the name, which may hold spaces: state, parent, ...
    user_ticks, system_ticks = fields[11], fields[12]
    return ProcessUse((int(user_ticks) + int(system_ticks)) / _TICKS_PER_S, fields[0] in "Tt")


def end_own_group(status: int) -> NoReturn:
    """Kill the workers of this engine core process, then end it with ``status``.

    An engine core process that ends by itself ends here, whatever the reason. If a signal ends it, its supervisor kills the group.
    vLLM's workers watch their engine core only once they have loaded, and a worker that hangs does not watch at all.
    """
    deadline = time.monotonic() + _END_S
    try:
        while end_group(os.getpid()) and time.monotonic() < deadline:  # again, because another thread may be starting workers
            time.sleep(_POLL_S)
    finally:
        os._exit(status)


def _is_to_end(process: psutil.Process, leader: int) -> bool:
    try:
        return (
            os.getpgid(process.pid) == leader
            and process.pid != os.getpid()
            and process.status() != psutil.STATUS_ZOMBIE
            and _RESOURCE_TRACKER not in " ".join(process.cmdline())
        )
    except (psutil.Error, ProcessLookupError):
        return False  # the process has ended meanwhile
