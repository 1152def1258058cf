"""`Folder` keeps the bytes of files, answers and journals in a folder of this machine. A file is there whole or not at all.

Names are ids that this server has made, so no name that a client gives is ever part of a path. Several processes may share the folder: a
new ingress begins before the one that it replaces has ended.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.batch.output import put_in_place
from serve_app.batch.reserve import NO_ROOM, Reserve
from serve_app.errors import ConfigError, StorageFailed, StorageFull

LEFTOVER_S = 3600.0
"""A file that the database does not know and that was not written to for so long belongs to a killed process."""


class Folder:
    """The folder ``root``, which is made with its parents.

    Raises:
        ConfigError: The folder cannot be written to, or its file system has no locks.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files, self._work = root / "files", root / "work"
        self.reserve = Reserve(root / "reserve", self.part)
        try:
            for folder in (root, self._files, self._work):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.part()
            probe.touch(mode=0o600)
            probe.unlink()
            self._refuse_without_locks()
        except OSError as exc:
            problem = f"{root} cannot be written to: {exc.strerror or exc}"
            hint = "make room on its disk" if exc.errno in NO_ROOM else "name a folder that the ingress may write to"
            raise ConfigError("ingress.batch.dir", problem, hint) from exc

    def _refuse_without_locks(self) -> None:
        try:
            if (descriptor := self.try_lock()) is not None:
                os.close(descriptor)
        except OSError as exc:
            problem = f"{self.root / 'lock'} cannot be locked: {exc.strerror or exc}"
            raise ConfigError("ingress.batch.dir", problem, "name a folder on a file system that has flock") from exc

    def free_bytes(self) -> int:
        """Return the free bytes of the folder's disk, without the reserve."""
        return shutil.disk_usage(self.root).free

    @property
    def database(self) -> Path:
        return self.root / "batches.sqlite"

    def part(self) -> Path:
        """Return where a new file may be written until it is whole."""
        return self._work / f"{secrets.token_hex(8)}.part"

    def keep(self, part: Path, file_id: str) -> None:
        """Make a complete part the file of that id, durably."""
        with part.open("rb") as file:
            os.fsync(file.fileno())
        put_in_place(part, self.path(file_id))

    def path(self, file_id: str) -> Path:
        """Return where the file is. ``file_id`` comes from the database."""
        return self._files / file_id

    @contextmanager
    def on_disk(self, file_id: str) -> Iterator[Path]:
        """Lend the path of the file. Opening it raises `FileNotFoundError` if there is no file."""
        yield self.path(file_id)

    def journal(self, batch_id: str, fence: int = 0) -> Path:
        """Return where the runner with that fence keeps the batch's answers; the fence is 0 where a lock replaces fences."""
        return self._work / (f"{batch_id}.journal-{fence}" if fence else f"{batch_id}.journal")

    def remove(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)

    def remove_journal(self, batch_id: str, fence: int = 0) -> None:
        journal = self.journal(batch_id, fence)
        for suffix in ("", "-wal", "-shm"):
            journal.with_name(journal.name + suffix).unlink(missing_ok=True)

    def sweep(self, file_ids: Collection[str], open_batches: Collection[str]) -> None:
        """Remove leftovers of killed processes: all but the given files, and the journals of the given batches."""
        oldest = time.time() - LEFTOVER_S
        for path in [*self._files.iterdir(), *self._work.iterdir()]:
            if path.name in file_ids or path.name.partition(".journal")[0] in open_batches:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def try_lock(self) -> int | None:
        """Return a descriptor that holds the lock of the process that runs this folder's batches; None while another process has it.

        The kernel frees the lock when the descriptor is closed, or its process ends for whatever reason.
        """
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as exc:
            os.close(descriptor)
            if isinstance(exc, BlockingIOError):
                return None
            raise
        return descriptor


def storage_error(exc: Exception) -> StorageFailed:
    """Return the error for a client when the disk or SQLite failed."""
    if isinstance(exc, OSError) and exc.errno in NO_ROOM:
        return StorageFull(problem=os.strerror(exc.errno))
    if "disk is full" in str(exc):
        return StorageFull(problem="the database cannot grow")
    return StorageFailed()
