"""`OomOrder` sets the order in which the kernel ends our processes when a machine has run out of memory.

The kernel ends the process with the largest sum of its share of the memory, in thousandths, and its `oom_score_adj`. A process may
raise its own adjustment and lower it again to its initial value; only root may go below. Ray's controllers and our lease board and
ingresses keep their initial values. A replica adds to its own, and the processes that it starts inherit the sum.
"""

import contextlib
from pathlib import Path

import psutil

from serve_app.replica.process_group import group_use

ABOVE_FIRST = 200
"""Adjustment of the first replica of a model on a machine. The replica is killed before an ingress that has up to 20 % of the memory more
than its engine, and after a neighbour that has 20 % more than its engine."""

ABOVE_OTHERS = 300
"""Adjustment of the other replicas. They are killed before the first one, unless its engine has 10 % of the memory more than theirs."""

_MAX_ADJUSTMENT = 1000


class OomOrder:
    """Sets the place of one replica's processes in the kernel's order. Make it before the replica starts a process."""

    def __init__(self) -> None:
        self._inherited = int(_file(psutil.Process().pid).read_text())
        self._adjustment = self._inherited

    def set_rank(self, local_rank: int, engine: int | None = None) -> None:
        """Set the adjustment for the rank of this replica among those of its model on this machine, from 0.

        Args:
            engine: The process that leads the engine's group. It may be no child of this one.
        """
        above = ABOVE_FIRST if local_rank == 0 else ABOVE_OTHERS
        adjustment = min(self._inherited + above, _MAX_ADJUSTMENT)
        if adjustment == self._adjustment:
            return
        self._adjustment = adjustment
        own = psutil.Process()
        pids = {own.pid} | {process.pid for process in own.children(recursive=True)}
        with contextlib.suppress(OSError):  # no free file descriptor
            pids |= set() if engine is None else group_use(engine).keys()
        for pid in pids:
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                _file(pid).write_text(str(adjustment))


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")
