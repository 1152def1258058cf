"""The process that keeps the fleet which a machine's pipelines share: ``python -m serve_app.batch.keeper FOLDER``.

The first worker process that needs the fleet starts the keeper (`shared_fleet.py`). The keeper starts the fleet as its child, tells its
URL in ``FOLDER/state``, starts the fleet again when it ends or is stuck, and ends it with the last worker process. A worker process counts
as long as it holds a shared lock on ``FOLDER/users``, which the kernel releases also when the process is killed.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from serve_app.batch.fleet_process import FleetProcess
from serve_app.batch.keeping import Keep, Keeping, Look
from serve_app.errors import ServingError

CONFIG, STATE, USERS, LOCK, LOG = "config.yaml", "state", "users", "keeper.lock", "keeper.log"
_LOOK_S = 1.0
_PROBE_S = 5.0
_PORT_LIMIT_S = 60.0
_END_LIMIT_S = 60.0
"""Of a fleet that nobody uses, so that it has no streams to wait for."""


@dataclass(frozen=True)
class State:
    """What a keeper tells the worker processes, in ``FOLDER/state``."""

    number: int = 0
    """Of the keeper: each new one has the next number."""
    status: Literal["none", "starting", "ready", "failed"] = "none"
    url: str = ""
    port: int = 0
    why: str = ""
    """Why the fleet was started again, or given up, last."""
    num_starts: int = 0
    fleet: tuple[int, float] = (0, 0.0)
    """Process id and creation time of the fleet's process."""

    @classmethod
    def read(cls, folder: Path) -> "State":
        try:
            values: dict[str, Any] = json.loads((folder / STATE).read_text())
        except FileNotFoundError:
            return cls()
        return cls(**{**values, "fleet": tuple(values["fleet"])})

    def write(self, folder: Path) -> None:
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(folder / STATE)


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Take the lock if that needs no wait; return whether it was taken."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


class Keeper:
    """Holds the lock of its folder."""

    def __init__(self, folder: Path, keep: Keep, command: list[str]) -> None:
        self._folder, self._keep, self._command = folder, keep, command
        self._before = State.read(folder)
        self._state = State(self._before.number + 1, "starting", port=self._before.port)

    def run(self) -> None:
        """Keep the fleet until nobody uses it, or until it is given up."""
        self._state.write(self._folder)
        try:
            self._run()
        except (ServingError, OSError) as exc:
            self._tell(status="failed", why=str(exc))

    def _run(self) -> None:
        _end_fleet_of_before(self._before)
        fleet = self._fleet()
        with (self._folder / USERS).open("ab") as users, _ended(fleet):
            self._start(fleet)
            keeping = Keeping(self._keep, time.monotonic())
            while True:
                look = self._look(fleet, users)
                action = keeping.handle(look, now=time.monotonic())
                if action == "end":
                    if not try_lock(users):  # somebody has come within this instant
                        continue
                    self._tell(status="none", why="")
                    return  # the lock on `users` is held until the fleet has gone: who comes now waits
                if action == "give up":
                    fleet.kill()
                    self._tell(status="failed", why=keeping.why)
                    return
                if action == "restart":
                    fleet.kill()
                    self._tell(status="starting", why=keeping.why)
                    self._start(fleet)
                    keeping.started(time.monotonic())
                elif look.ready and self._state.status != "ready":
                    self._tell(status="ready")
                time.sleep(_LOOK_S)

    def _fleet(self) -> FleetProcess:
        """Return the fleet at the port of the keeper before, whose URL the worker processes know; at another one if that is taken."""
        config = self._folder / CONFIG
        if self._state.port:
            fleet = FleetProcess(config, port=self._state.port, command=self._command)
            if _becomes_free(fleet.address):
                return fleet
        return FleetProcess(config, command=self._command)

    def _start(self, fleet: FleetProcess) -> None:
        _becomes_free(fleet.address)
        fleet.start()
        process = fleet.pid, psutil.Process(fleet.pid).create_time()
        self._tell(url=fleet.url, port=fleet.address[1], fleet=process, num_starts=self._state.num_starts + 1)

    def _look(self, fleet: FleetProcess, users: IO[bytes]) -> Look:
        has_users = not try_lock(users)
        if not has_users:
            fcntl.flock(users, fcntl.LOCK_UN)
        try:
            fleet.refuse_end()
        except ServingError as exc:
            return Look(ended=str(exc), answers=False, ready=False, has_users=has_users)
        status = fleet.status(min(_PROBE_S, self._keep.stuck_s))
        return Look(answers=status > 0, ready=status == 200, has_users=has_users)

    def _tell(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._state.write(self._folder)


@contextlib.contextmanager
def _ended(fleet: FleetProcess) -> Iterator[None]:
    try:
        yield
    finally:
        fleet.stop(_END_LIMIT_S)


def _end_fleet_of_before(state: State) -> None:
    """Kill the fleet of a keeper that was killed: it drains, and would hold its GPUs for as long as streams may take."""
    pid, created = state.fleet
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if pid and abs(process.create_time() - created) < 1.0:
            process.kill()
            process.wait(_PORT_LIMIT_S)


def _becomes_free(address: tuple[str, int]) -> bool:
    """Return whether nothing listens at the address any more; waits for what is being ended."""
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
    """Arguments: the folder, `Keep` as JSON, and the command that serves. Another keeper of the folder makes this one end at once."""
    folder, keep, command = Path(sys.argv[1]), Keep(**json.loads(sys.argv[2])), sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    with (folder / LOCK).open("ab") as lock:
        if try_lock(lock):
            with (folder / LOG).open("w") as log:
                os.dup2(log.fileno(), 2)
            Keeper(folder, keep, command).run()


if __name__ == "__main__":
    main()
