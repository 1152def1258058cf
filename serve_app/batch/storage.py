"""`Storage` says where files, batches and answers are: in one folder, or in a database and an object store that several ingresses share."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serve_app.batch.claims import Claims, FolderClaims
from serve_app.batch.folder import Folder
from serve_app.batch.leases import BatchLeases
from serve_app.batch.sqlite_database import SqliteDatabase
from serve_app.batch.store import Store
from serve_app.config import BatchSettings
from serve_app.errors import ConfigError

_SCRATCH = "serve-app-batches-"
"""The prefix of scratch folders' names, in the folder of the machine's temporary files."""
_STARTING_S = 60.0
"""A younger lock file may belong to an ingress that starts and does not hold the lock yet."""


class Contents(Protocol):
    """The bytes of files: a `Folder`, or a `Bucket`."""

    def keep(self, part: Path, file_id: str) -> None:
        """Make a complete part, which is in the scratch folder, the file of that id, durably."""
        ...

    def on_disk(self, file_id: str) -> AbstractContextManager[Path]:
        """Lend the file on this machine's disk; this call, or opening the path, raises `FileNotFoundError` if there is no file."""
        ...

    def remove(self, file_ids: Iterable[str]) -> None: ...

    def sweep(self, file_ids: Collection[str], open_batches: Collection[str]) -> None:
        """Remove leftovers: all but the given files, and the journals of the given batches."""
        ...


@dataclass(frozen=True)
class Storage:
    """The storage of an ingress. ``scratch`` has parts of files and journals of this machine; ``name`` is for the log."""

    name: str
    scratch: Folder
    contents: Contents
    store: Store
    claims: Claims
    close: Callable[[], None]


def in_folder(root: Path) -> Storage:
    """Return the storage of one ingress.

    Raises:
        ConfigError: The folder cannot be used.
    """
    folder = Folder(root)
    database = SqliteDatabase(folder.database, folder.reserve.free)
    return Storage(str(root), folder, folder, Store(database), FolderClaims(folder), database.close)


def shared(url: str, files: str, *, lease_s: float) -> Storage:
    """Return the storage of several ingresses. Neither the database at ``url`` nor the object store at ``files`` has to answer yet.

    Raises:
        ConfigError: The extra `shared-batches` is not installed.
    """
    try:
        from serve_app.batch.bucket import Bucket
        from serve_app.batch.postgres import PostgresDatabase
    except ImportError as exc:
        raise ConfigError("ingress.batch", f"needs {exc.name}", "install serve-app[shared-batches]") from exc
    _remove_scratch_of_killed()
    scratch = tempfile.TemporaryDirectory(prefix=_SCRATCH)
    folder = Folder(Path(scratch.name))
    lock = folder.try_lock()
    database = PostgresDatabase(url)

    def close() -> None:
        database.close()
        scratch.cleanup()
        if lock is not None:
            os.close(lock)

    leases, store = BatchLeases(database, folder, lease_s=lease_s), Store(database)
    bucket = Bucket(files, folder, database.identity, store.has_files)
    return Storage("the shared database", folder, bucket, store, leases, close)


def _remove_scratch_of_killed() -> None:
    """Remove scratch folders whose ingress was killed: the kernel has freed their locks."""
    for root in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # the folder is another user's, or was removed meanwhile
            descriptor = os.open(
                root / "lock", os.O_RDWR | os.O_CLOEXEC
            )  # without O_CREAT: an ingress that starts has no lock yet
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An ingress that starts makes the lock file before it takes the lock for good.
                if os.fstat(descriptor).st_mtime < time.time() - _STARTING_S:
                    shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(descriptor)


def open_storage(settings: BatchSettings) -> Storage:
    """Return the storage that the settings name.

    Raises:
        ConfigError: The storage cannot be used.
    """
    if settings.dir is not None:
        return in_folder(settings.dir)
    assert settings.files is not None
    return shared(settings.database_url(), settings.files, lease_s=settings.lease_s)
