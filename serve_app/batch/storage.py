"""Where files, batches and answers are: in one folder, or in a database and an object store that several ingresses share."""

import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serve_app.batch.claims import Claims, FolderClaims
from serve_app.batch.database import Database
from serve_app.batch.folder import Folder
from serve_app.batch.leases import Leases
from serve_app.batch.sqlite_database import SqliteDatabase
from serve_app.batch.store import Store
from serve_app.config import BatchSettings
from serve_app.errors import ConfigError


class Contents(Protocol):
    """The bytes of files: a `Folder`, or a `Bucket`."""

    def keep(self, part: Path, file_id: str) -> None:
        """Make a whole part, which is in the scratch folder, the file of that id, durably."""
        ...

    def on_disk(self, file_id: str) -> AbstractContextManager[Path]:
        """Lend the file on this machine's disk; `FileNotFoundError` comes from this call or from opening the path."""
        ...

    def remove(self, file_ids: Iterable[str]) -> None: ...

    def sweep(self, file_ids: Collection[str], open_batches: Collection[str]) -> None:
        """Remove what was left behind: all but these files, and the journals of these batches."""
        ...


@dataclass(frozen=True)
class Storage:
    """``scratch`` has parts of files and journals of this machine; ``name`` is for the log."""

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
    database = SqliteDatabase(folder.database)
    return Storage(str(root), folder, folder, Store(database), FolderClaims(folder), database.close)


def shared(url: str, files: str, *, lease_s: float) -> Storage:
    """Return the storage of several ingresses; neither the database at ``url`` nor the object store at ``files`` has to answer yet.

    Raises:
        ConfigError: The extra `shared-batches` is not installed.
    """
    try:
        from serve_app.batch.bucket import Bucket
        from serve_app.batch.postgres import PostgresDatabase
    except ImportError as exc:
        raise ConfigError("ingress.batch", f"needs {exc.name}", "install serve-app[shared-batches]") from exc
    scratch = tempfile.TemporaryDirectory(prefix="serve-app-batches-")
    folder = Folder(Path(scratch.name))
    database: Database = PostgresDatabase(url)

    def close() -> None:
        database.close()
        scratch.cleanup()

    leases = Leases(database, folder, lease_s=lease_s)
    return Storage("the shared database", folder, Bucket(files, folder), Store(database), leases, close)


def open_storage(settings: BatchSettings) -> Storage:
    """Return the storage that the settings name.

    Raises:
        ConfigError: It cannot be used.
    """
    if settings.dir is not None:
        return in_folder(settings.dir)
    assert settings.files is not None
    return shared(settings.database_url(), settings.files, lease_s=settings.lease_s)
