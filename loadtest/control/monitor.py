"""The monitor samples a worker process while it makes load: read delays, CPU, garbage collection, throttling. Linux only.

`loadtest.judge.health` judges the samples.
"""

import ctypes
import gc
import os
import sys
import time
from pathlib import Path
from typing import Protocol

import gevent

from loadtest.judge.health import TICK_S
from loadtest.records import HealthSample

_CLOCK_MONOTONIC = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Ticking(Protocol):
    def start(self) -> None: ...

    def wait(self) -> list[float]:
        """Return, in seconds, how late each tick since the last call was read; waits for at least one tick."""
        ...

    def close(self) -> None: ...


class Ticker:
    """A kernel timer (timerfd) that becomes readable every `TICK_S`, as a socket does when an answer comes.

    The event loop polls the timer like its sockets, so the timer is read as late as they are. The kernel counts unread ticks, so no
    tick is lost while the loop is blocked. (A timer of the loop itself is served before all sockets, and is armed again only
    when the loop runs again.)
    """

    def start(self) -> None:
        """Start the timer.

        Raises:
            OSError: This process has reached its limit of open files.
        """
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        seconds, nanoseconds = divmod(round(TICK_S * 1e9), 10**9)
        period_and_first = (ctypes.c_long * 4)(seconds, nanoseconds, seconds, nanoseconds)
        self._due = time.perf_counter() + TICK_S
        if _LIBC.timerfd_settime(self._fd, 0, period_and_first, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._readable = gevent.get_hub().loop.io(self._fd, 1)

    def wait(self) -> list[float]:
        gevent.get_hub().wait(self._readable)
        num = int.from_bytes(os.read(self._fd, 8), sys.byteorder)
        now, due = time.perf_counter(), self._due
        self._due += num * TICK_S
        return [max(0.0, now - due - k * TICK_S) for k in range(num)]

    def close(self) -> None:
        self._readable.close()
        os.close(self._fd)


class Monitor:
    """A monitor of its own process.

    Spawn ``run`` as a greenlet: it reads the ticker. ``sample`` returns what was measured since the last sample. While ``run`` runs,
    the garbage collector is off and existing objects are frozen: a full collection of a large heap would stall the load generator.
    """

    def __init__(self, worker: int, *, epoch: float, ticker: Ticking) -> None:
        self._worker = worker
        self._epoch = epoch
        self._ticker = ticker
        self._late_s: list[float] = []
        self._gc_s = self._gc_began = 0.0
        self._at = time.perf_counter()
        self._cpu_s = time.process_time()
        self._cpu_stat = _cpu_stat_file()

    def run(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._on_gc)
        self._ticker.start()
        try:
            while True:
                late_s = self._ticker.wait()
                self._late_s += late_s  # not in one statement with the wait: `sample` may replace the list during the wait
        finally:
            self._ticker.close()
            gc.callbacks.remove(self._on_gc)
            gc.enable()
            gc.unfreeze()

    def sample(self, *, in_flight: int, num_sent: int, num_rows: int) -> HealthSample:
        now, cpu_s = time.perf_counter(), time.process_time()
        sample = HealthSample(
            t_s=now - self._epoch,
            worker=self._worker,
            cpu=(cpu_s - self._cpu_s) / max(now - self._at, 1e-6),
            lag_max_s=max(self._late_s, default=0.0),
            gc_s=self._gc_s,
            in_flight=in_flight,
            num_sent=num_sent,
            num_rows=num_rows,
            throttled=_num_throttled(self._cpu_stat),
            read_late_ms=[round(late_s * 1e3, 2) for late_s in self._late_s],
        )
        self._at, self._cpu_s, self._late_s, self._gc_s = now, cpu_s, [], 0.0
        return sample

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc_s += time.perf_counter() - self._gc_began


def _cpu_stat_file() -> Path | None:
    """Return the file in which this process' cgroup (version 2 or 1) counts throttled periods; None if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu", "cpu,cpuacct"):
            root = Path("/sys/fs/cgroup") / controllers
            # Inside a container, the container's own group is mounted as the root.
            for folder in (root / path.lstrip("/"), root):
                if (folder / "cpu.stat").is_file():
                    return folder / "cpu.stat"
    return None


def _num_throttled(cpu_stat: Path | None) -> int:
    try:
        words = cpu_stat.read_text().split() if cpu_stat else []
    except OSError:
        return 0
    return int(words[words.index("nr_throttled") + 1]) if "nr_throttled" in words else 0
