"""The reaper outlives ``serve-app up``, even a killed one: it ends what is left of the Ray cluster, and removes the cluster's folder.

Ray's own processes end with the driver, except two agents that first try for five minutes to report it to a dead GCS (Ray 2.60,
``process_watcher.report_raylet_error_logs``). The folder would stay for ever.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

_END_GRACE_S = 10.0
_ORPHAN_GRACE_S = 5.0  # workers without a raylet end within 2.5 s
_EXIT_LIMIT_S = 30.0


class Reaper:
    """The reaper process, which waits for this process to end. ``finish`` makes it clean up now."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "serve_app.cli.reaper", str(folder)]
        # A session of its own: Ctrl-C reaches the whole process group of the terminal.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def others(self) -> list[psutil.Process]:
        """Return the processes that this process has started, directly or not, without the reaper."""
        return [p for p in psutil.Process().children(recursive=True) if p.pid != self._process.pid]

    def finish(self) -> None:
        """Make the reaper clean up, and wait for its end."""
        self._process.communicate(timeout=_EXIT_LIMIT_S)


def end_processes(processes: list[psutil.Process], *, grace_s: float = _END_GRACE_S) -> None:
    """Wait ``grace_s`` for these processes to end; SIGKILL those that are left."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_GRACE_S)


def users_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a file open below ``folder``. Every process of a Ray cluster writes its log there."""
    users = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                users.append(process)
    return users


def main() -> None:
    """Clean up the folder of argument 1 when standard input closes, as it does when the process at its other end is gone."""
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    starter = os.getppid()  # it still runs if it called `finish`, and has its own logs open
    end_processes([p for p in users_of(folder) if p.pid != starter], grace_s=_ORPHAN_GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
