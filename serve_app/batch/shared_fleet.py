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
    """Return the folder of the fleet that serves the configuration on this machine, since its boot, in this network namespace.

    The cache may be on a volume that several machines or containers mount, and a fleet's URL is an address of the loopback interface.
    """
    parts = (configuration, _BOOT_ID.read_text(), _NETWORK.stat().st_ino, metadata.version("serve-app"))
    return default_cache_dir() / "fleets" / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class SharedFleet:
    """The shared fleet of this machine. It is in use until the end of this object or of this process, however the process ends."""

    def __init__(self, configuration: Mapping[str, Any], keep: Keep, command: Sequence[str] = ()) -> None:
        """Start nothing yet. ``keep`` is used if this process starts the keeper."""
        self._folder = folder_of(configuration)
        self._configuration, self._keep, self._command = json.dumps(configuration), keep, command or UP
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._number_before = 0
        """The number of the last keeper before this process started one."""
        self._wanted = 0
        """The smallest number of a keeper whose report counts: failures of earlier keepers are ignored."""
        self._join()

    def url(self) -> str:
        """Return the URL of the fleet once it is ready; starts the fleet if there is none.

        Raises:
            BatchError: The fleet was given up; the next call begins anew.
        """
        while (report := self.look()).status != "ready":
            time.sleep(_POLL_S)
        return report.url

    def look(self) -> KeeperReport:
        """Return the keeper's last report; starts a keeper if none runs.

        Raises:
            BatchError: The fleet was given up.
        """
        with self._lock:
            report = KeeperReport.read(self._folder)
            if report.number >= self._wanted and report.status == "failed":
                self._wanted = report.number + 1
                raise BatchError(f"the fleet of this worker machine was given up: {report.why}", "fix the cause")
            if report.number < self._wanted or not self._has_keeper():
                self._begin(report)
                return KeeperReport(report.number, "starting")
            return report

    def _join(self) -> None:
        self._users = self._locked_users()
        weakref.finalize(self, self._users.close)
        report = KeeperReport.read(self._folder)
        self._wanted = report.number + int(report.status in ("none", "failed") or not self._has_keeper())

    def _locked_users(self) -> IO[bytes]:
        """Return the file of the users with its lock. Waits for the end of a fleet that is just ending."""
        while True:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # a keeper may remove the folder as an old one at this moment
                users = (self._folder / USERS).open("ab")
                fcntl.flock(users, fcntl.LOCK_SH)
                if (self._folder / USERS).samefile(f"/proc/self/fd/{users.fileno()}"):
                    return users
                users.close()

    def _has_keeper(self) -> bool:
        with (self._folder / LOCK).open("ab") as lock:
            return not try_lock(lock, shared=True)

    def _begin(self, report: KeeperReport) -> None:
        """Start a keeper, unless a keeper of this process is just starting; of two keepers one ends at once."""
        if not self._has_keeper():
            self._wanted = max(self._wanted, report.number + 1)
        if self._keeper is not None:
            if (code := self._keeper.poll()) is None:
                return
            self._keeper = None
            if code > 0 and report.number == self._number_before:
                raise BatchError(
                    f"the keeper of the fleet did not start: status {code}", f"its output is in {self._folder / LOG}"
                )
        self._number_before = report.number
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
        # Not by a file, which would outlive a killed keeper: the environment of a fleet may hold tokens.
        with contextlib.suppress(BrokenPipeError), self._keeper.stdin as stdin:
            stdin.write(self._configuration.encode())
