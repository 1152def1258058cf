"""`SharedFleet` gives all worker processes of a machine that have the same configuration one fleet; this is the worker process's side.

A worker process that finds no keeper (`fleet_keeper.py`) starts one. A worker process only holds a shared lock while it uses the fleet, so
a killed worker process leaves nothing behind. Worker processes share a fleet if they have the same cache folder (``$SERVE_APP_CACHE``), the
same loopback interface and the same version of serve-app.
"""

import contextlib
import fcntl
import hashlib
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from serve_app.batch.fleet_keeper import LOCK, LOG, USERS, KeeperReport, try_lock
from serve_app.batch.fleet_process import UP
from serve_app.batch.fleet_watch import Keep
from serve_app.config import default_cache_dir
from serve_app.errors import BatchError

_POLL_S = 0.2
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


def folder_of(configuration: Mapping[str, Any]) -> Path:
    """Return the folder of the fleet that serves the configuration here: on this machine since it booted, and in this network namespace.

    The cache may be on a volume that several machines or containers mount, and a fleet's URL is one of the loopback interface.
    """
    parts = (configuration, _BOOT_ID.read_text(), _NETWORK.stat().st_ino, metadata.version("serve-app"))
    return default_cache_dir() / "fleets" / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class SharedFleet:
    """Of this machine. The fleet stays until the end of this object or of this process, however that ends."""

    def __init__(self, configuration: Mapping[str, Any], keep: Keep, command: Sequence[str] = ()) -> None:
        """Start nothing yet. ``keep`` counts if this process is the first one."""
        self._folder = folder_of(configuration)
        self._configuration, self._keep, self._command = json.dumps(configuration), keep, command or UP
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._number_before = 0
        """Of the last keeper that there was when this process began one."""
        self._wanted = 0
        """The least number of a keeper whose words count: an earlier one's failure is past."""
        self._join()

    def url(self) -> str:
        """Return the URL of the fleet once it is ready; starts it where nobody has.

        Raises:
            BatchError: It was given up; the next call begins anew.
        """
        while (state := self.look()).status != "ready":
            time.sleep(_POLL_S)
        return state.url

    def look(self) -> KeeperReport:
        """Return the keeper's last words. Starts a keeper where none lives.

        Raises:
            BatchError: The fleet was given up.
        """
        with self._lock:
            state = KeeperReport.read(self._folder)
            if state.number >= self._wanted and state.status == "failed":
                self._wanted = state.number + 1
                raise BatchError(f"the fleet of this worker machine was given up: {state.why}", "mend what it says")
            if state.number < self._wanted or not self._is_kept():
                self._begin(state)
                return KeeperReport(state.number, "starting")
            return state

    def _join(self) -> None:
        self._users = self._locked_users()
        weakref.finalize(self, self._users.close)
        state = KeeperReport.read(self._folder)
        self._wanted = state.number + int(state.status in ("none", "failed") or not self._is_kept())

    def _locked_users(self) -> IO[bytes]:
        """Return the file of the users with its lock, once a fleet has gone that is just being ended."""
        while True:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # a keeper removes the folder, which was old, at this moment
                users = (self._folder / USERS).open("ab")
                fcntl.flock(users, fcntl.LOCK_SH)
                if (self._folder / USERS).samefile(f"/proc/self/fd/{users.fileno()}"):
                    return users
                users.close()

    def _is_kept(self) -> bool:
        with (self._folder / LOCK).open("ab") as lock:
            return not try_lock(lock, shared=True)

    def _begin(self, state: KeeperReport) -> None:
        """Start a keeper, unless one of this process is about to begin; of two keepers one ends at once."""
        if not self._is_kept():
            self._wanted = max(self._wanted, state.number + 1)
        if self._keeper is not None:
            if (code := self._keeper.poll()) is None:
                return
            self._keeper = None
            if code > 0 and state.number == self._number_before:
                raise BatchError(
                    f"the keeper of the fleet did not start: status {code}", f"its words are in {self._folder / LOG}"
                )
        self._number_before = state.number
        arguments = [str(self._folder), json.dumps(asdict(self._keep)), *self._command]
        with contextlib.closing((self._folder / LOG).open("ab")) as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "serve_app.batch.fleet_keeper", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        assert self._keeper.stdin is not None
        # Not by a file, which would outlive a keeper that is killed: the environment of a fleet may hold tokens.
        with contextlib.suppress(BrokenPipeError), self._keeper.stdin as stdin:
            stdin.write(self._configuration.encode())
