"""`SqliteDatabase` has the records of one ingress's files and batches, in a SQLite file of its folder.

An ingress and its successor may have the file open at the same time.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from serve_app.batch.database import Transaction
from serve_app.errors import ConfigError

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
  num_bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, record BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
  input TEXT NOT NULL, ended_at INTEGER, record BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_in ON batches (status, number);
CREATE TABLE IF NOT EXISTS tenant_days (tenant TEXT PRIMARY KEY, day INTEGER NOT NULL, tokens INTEGER NOT NULL) STRICT;
"""
T = TypeVar("T")


class SqliteDatabase:
    """The database at ``path``, which is made if it is missing.

    Raises:
        ConfigError: The database cannot be used.
    """

    def __init__(self, path: Path, make_room: Callable[[], bool] = lambda: False) -> None:
        """Open the database.

        Args:
            make_room: Frees some room on a full disk and returns whether it did. Even opening the database needs room.
        """
        self._lock, self._path = threading.Lock(), path
        try:
            try:
                self._db = _open(path)
            except sqlite3.Error as exc:
                if not (_needs_room(exc) and make_room()):
                    raise
                self._db = _open(path)
        except sqlite3.Error as exc:
            room = "make room on its disk; if the disk has room, check the disk for faults"
            hint = room if _needs_room(exc) else "remove it, or choose another folder"
            raise ConfigError("ingress.batch.dir", f"{path} cannot be used: {exc}", hint) from exc
        self._opened = path.stat()

    def read(self, sql: str, *values: object) -> list[Any]:
        self._require_file()
        with self._lock, closing(self._db.execute(sql, values)) as found:
            return found.fetchall()

    def change(self, change: Callable[[Transaction], T]) -> T:
        self._require_file()
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = change(_SqliteTransaction(self._db))
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return result

    def now(self) -> None:
        return None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _require_file(self) -> None:
        """Refuse a database whose file was removed: SQLite would continue to write into it, and the next process would not find it.

        Raises:
            sqlite3.OperationalError: The database was removed, or another file is in its place. A job would take a FileNotFoundError for
                the loss of its input.
        """
        try:
            is_there = os.path.samestat(self._opened, self._path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise sqlite3.OperationalError(f"{self._path} was removed while it was in use; restart the ingress")


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
    try:
        db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, _FORMAT):
            problem = f"{path} is of format {found}, not {_FORMAT}"
            raise ConfigError("ingress.batch.dir", problem, "use the version of serve-app that wrote it, or another folder")
        if found != _FORMAT:  # writing the same number again would need room on the disk
            db.execute(f"PRAGMA user_version={_FORMAT}")
    except BaseException:
        db.close()
        raise
    return db


def _needs_room(exc: sqlite3.Error) -> bool:
    """Return whether the disk may be full. If a file beside the database finds no room, SQLite reports an I/O error."""
    return "disk is full" in str(exc) or "disk I/O" in str(exc)


class _SqliteTransaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, values: Sequence[object], /) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def lock(self, name: str) -> None:
        """Do nothing: BEGIN IMMEDIATE lets one transaction at a time change the database."""
