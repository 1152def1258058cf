"""`FleetKeeper` holds the fleet that a machine's pipelines share; ``python -m serve_app.batch.fleet_keeper FOLDER`` runs it.

The first worker process that needs the fleet starts the keeper (`shared_fleet.py`). The keeper starts the fleet as its child, writes the
fleet's URL into ``FOLDER/state``, starts the fleet again when it ends or is stuck, and ends it with the last worker process. A worker
process counts as long as it holds a shared lock on ``FOLDER/users``, which the kernel releases also when the process is killed. The fleet's
configuration comes on standard input, as JSON.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from serve_app.batch.fleet_process import FleetProcess
from serve_app.batch.fleet_watch import FleetWatch, Keep, Look
from serve_app.errors import ServingError

logger = logging.getLogger(__name__)

STATE, USERS, LOCK, LOG = "state", "users", "keeper.lock", "keeper.log"
_LOOK_S = 1.0
_PROBE_S = 5.0
_PORT_LIMIT_S = 60.0
_OLD_S = 7 * 86400.0
"""The folder of an unused fleet is removed when none of its files was written for so long."""
_END_LIMIT_S = 60.0
"""Longest time, in seconds, that an unused fleet may take to end. It has no streams to wait for."""


@dataclass(frozen=True)
class KeeperReport:
    """What a keeper reports to the worker processes, in ``FOLDER/state``."""

    number: int = 0
    """The number of the keeper: each new keeper of the folder takes the next number."""
    status: Literal["none", "starting", "ready", "failed"] = "none"
    url: str = ""
    port: int = 0
    why: str = ""
    """Why the fleet was last started again, or given up."""
    num_starts: int = 0
    fleet: tuple[int, float] = (0, 0.0)
    """Process id and creation time of the fleet's process."""

    @classmethod
    def read(cls, folder: Path) -> "KeeperReport":
        """Return the last keeper's report; if the file is missing or damaged, the report before the first keeper."""
        try:
            values: dict[str, Any] = json.loads((folder / STATE).read_text())
            return cls(**{**values, "fleet": tuple(values["fleet"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, folder: Path) -> None:
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(folder / STATE)


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Take the lock unless another process holds it; return whether it was taken."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


class FleetKeeper:
    """The keeper of one folder. Its process holds the folder's lock."""

    _fleet: FleetProcess

    def __init__(self, folder: Path, configuration: Mapping[str, Any], keep: Keep, command: list[str]) -> None:
        self._folder, self._configuration, self._keep, self._command = folder, configuration, keep, command
        self._before = KeeperReport.read(folder)
        self._report = KeeperReport(self._before.number + 1, "starting", port=self._before.port)

    def run(self) -> None:
        """Keep the fleet until no worker process uses it, or until it is given up."""
        self._report.write(self._folder)
        try:
            self._run()
        except (ServingError, OSError) as exc:
            self._change(status="failed", why=str(exc))
        except Exception as exc:  # without this report each worker process would start the next keeper, endlessly
            logger.exception("the keeper failed")
            self._change(status="failed", why=f"{type(exc).__name__}: {exc}")

    def _run(self) -> None:
        _end_fleet_of_before(self._before)
        with (self._folder / USERS).open("ab") as users, self._ended():
            self._start()
            watch = FleetWatch(self._keep, time.monotonic())
            while True:
                look = self._look(users)
                action = watch.handle(look, now=time.monotonic())
                if action == "end":
                    if not try_lock(users):  # a worker process came within this instant
                        continue
                    self._change(status="none", why="")
                    return  # the lock on `users` is held until the fleet has ended: a worker process that comes now waits
                if action == "give up":
                    self._fleet.kill()
                    self._change(status="failed", why=watch.why)
                    return
                if action == "restart":
                    self._fleet.kill()
                    self._change(status="starting", why=watch.why)
                    self._start()
                    watch.started(time.monotonic())
                elif look.ready and self._report.status != "ready":
                    self._change(status="ready")
                time.sleep(_LOOK_S)

    def _start(self) -> None:
        """Start the fleet at its earlier port, whose URL the worker processes know; at another port if that one is taken."""
        if not _becomes_free(self._fleet.address):
            self._fleet = self._fleet_at(0)
        self._fleet.start()
        process = self._fleet.pid, psutil.Process(self._fleet.pid).create_time()
        self._change(url=self._fleet.url, port=self._fleet.address[1], fleet=process, num_starts=self._report.num_starts + 1)

    def _fleet_at(self, port: int) -> FleetProcess:
        return FleetProcess(self._configuration, port=port, command=self._command)

    def _look(self, users: IO[bytes]) -> Look:
        has_users = not try_lock(users)
        if not has_users:
            fcntl.flock(users, fcntl.LOCK_UN)
        try:
            self._fleet.refuse_end()
        except ServingError as exc:
            return Look(ended=str(exc), answers=False, ready=False, has_users=has_users)
        status = self._fleet.status(min(_PROBE_S, self._keep.stuck_s))
        return Look(answers=status > 0, ready=status == 200, has_users=has_users)

    def _change(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)
        self._report.write(self._folder)

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Prepare a fleet without starting it, and stop it at the end of the block."""
        self._fleet = self._fleet_at(self._report.port)
        try:
            yield
        finally:
            self._fleet.stop(_END_LIMIT_S)


def _end_fleet_of_before(report: KeeperReport) -> None:
    """Kill the fleet of a killed keeper: that fleet drains, and would hold its GPUs for as long as streams may take."""
    pid, created = report.fleet
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if pid and abs(process.create_time() - created) < 1.0:
            process.kill()
            process.wait(_PORT_LIMIT_S)


def sweep(folders: Path, now: float) -> None:
    """Remove the folders of unused fleets: each configuration, version and boot of the machine makes a folder of its own.

    Args:
        now: Seconds since 1970.
    """
    for folder in folders.iterdir():
        with contextlib.suppress(OSError):  # another keeper may sweep at the same time
            if now - max(file.stat().st_mtime for file in (folder, *folder.iterdir())) < _OLD_S:
                continue
            with (folder / LOCK).open("ab") as lock, (folder / USERS).open("ab") as users:
                if try_lock(lock) and try_lock(users):
                    shutil.rmtree(folder)


def _becomes_free(address: tuple[str, int]) -> bool:
    """Return whether the address is free; waits up to `_PORT_LIMIT_S` for a process that is ending."""
    deadline = time.monotonic() + _PORT_LIMIT_S
    while True:
        with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                sock.bind(address)
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)


def main() -> None:
    """Run a keeper. Arguments: the folder, `Keep` as JSON, and the command that serves. If the folder has a keeper, end at once."""
    folder, keep, command = Path(sys.argv[1]), Keep(**json.loads(sys.argv[2])), sys.argv[3:]
    configuration = json.load(sys.stdin)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    with (folder / LOCK).open("ab") as lock:
        if try_lock(lock):
            with (folder / LOG).open("w") as log:
                os.dup2(log.fileno(), 2)
            sweep(folder.parent, time.time())
            FleetKeeper(folder, configuration, keep, command).run()


if __name__ == "__main__":
    main()
