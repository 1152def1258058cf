"""This module reads what no error reports: how many threads the process may still start, and that its clock was set."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def free_threads(root: Path = _ROOT, process: Path = Path("/proc/self")) -> float:
    """Return how many threads and processes may still be started, by the limits of this process's cgroup and all its parents.

    A container sees its own cgroup as the root, whatever /proc says. The result is infinite if there is no limit or cgroups cannot be read.
    """
    left = math.inf
    for folder in _folders(root, process):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or its limit is "max"
            left = min(left, int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    return max(0.0, left)


def _folders(root: Path, process: Path) -> Iterator[Path]:
    """Yield the folders of cgroup v1 and v2 in which the kernel counts threads, from the innermost to the root."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("pids", ""):
            top = root / controllers
            own = top / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


class ClockSteps:
    """Measures how far the time of day has been set since this object was made, against the monotonic clock, which cannot be set."""

    def __init__(self) -> None:
        self._at_first = time.time() - time.monotonic()

    def seconds(self) -> float:
        """Return the sum of all steps, > 0 if the clock was put forward. Suspension of the machine counts, too: it stops monotonic time."""
        return time.time() - time.monotonic() - self._at_first
