"""Files and batches in a SQLite database: what there is, whose it is, how it stands.

`Store` is the whole interface to it: another kind of database needs these methods and no others. Any thread may call them; each waits for
the disk. Each change is one transaction, so several processes may have the database open.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from serve_app.batch.records import OPEN, STATUSES, Batch, File, is_id
from serve_app.errors import BadRequest, ConfigError, NotStored, StorageFull, TooManyBatches

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
"""
_OPEN = ", ".join(f"'{status}'" for status in OPEN)
_HELD = "SELECT coalesce(sum(num_bytes), 0) FROM files"
_RETRY_AFTER_S = 60.0
T = TypeVar("T")


class Page(NamedTuple):
    """``has_more``: others come behind these."""

    records: list[Any]
    has_more: bool


class Store:
    """The records of one folder.

    Raises:
        ConfigError: The database cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._lock, self._path = threading.Lock(), path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found not in (0, _FORMAT):
                problem = f"{path} is of format {found}, not {_FORMAT}"
                raise ConfigError("ingress.batch.dir", problem, "use the version of serve-app that wrote it, or another folder")
            self._db.execute(f"PRAGMA user_version={_FORMAT}")
            self._opened = path.stat()
        except sqlite3.Error as exc:
            raise ConfigError(
                "ingress.batch.dir", f"{path} cannot be used: {exc}", "remove it, or choose another folder"
            ) from exc

    def check_room(self, num_bytes: int, *, limit: int) -> None:
        """Refuse uploads of ``num_bytes`` together beside the files that are there.

        Raises:
            StorageFull: All together would be above ``limit``.
        """
        (held,) = self._read(_HELD)[0]
        if held + num_bytes > limit:
            raise StorageFull(problem=f"{held} bytes are stored, uploads may bring {num_bytes}, and the limit is {limit}")

    def add_file(self, file: File, *, limit: int) -> None:
        """Note a file whose bytes are there.

        Raises:
            StorageFull: It and the others together would be above ``limit``.
        """

        def insert(db: sqlite3.Connection) -> None:
            (held,) = db.execute(_HELD).fetchone()
            if held + file.num_bytes > limit:
                raise StorageFull(problem=f"{held} bytes are stored, and the limit is {limit}")
            _insert_file(db, file)

        self._change(insert)

    def file(self, file_id: str, owner: str) -> File:
        """Return the owner's file.

        Raises:
            NotStored: The owner has no such file, or its time is over.
        """
        sql = "SELECT record FROM files WHERE id = ? AND owner = ? AND expires_at > ?"
        if not is_id(file_id) or not (found := self._read(sql, file_id, owner, time.time())):
            raise NotStored(kind="File", id=file_id)
        return msgspec.json.decode(found[0][0], type=File)

    def files(self, owner: str, *, purpose: str | None, after: str | None, limit: int, oldest_first: bool) -> Page:
        """Return the owner's files behind the one with the id ``after``.

        Raises:
            BadRequest: ``after`` is no file of the owner's.
        """
        where = "expires_at > ? AND (? IS NULL OR purpose = ?)"
        return self._page("files", File, owner, after, limit, oldest_first, where, (time.time(), purpose, purpose))

    def delete_file(self, file_id: str, owner: str) -> None:
        """Forget the owner's file.

        Raises:
            NotStored: The owner has no such file.
            BadRequest: A batch that has not ended reads it.
        """

        def delete(db: sqlite3.Connection) -> None:
            reader = db.execute(f"SELECT id FROM batches WHERE input = ? AND status IN ({_OPEN})", (file_id,)).fetchone()
            if not db.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone():
                raise NotStored(kind="File", id=file_id)
            if reader:
                problem = f"{file_id} is the input of {reader[0]}, which has not ended; cancel that batch first"
                raise BadRequest(param="file_id", problem=problem)
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

        self._change(delete)

    def add_batch(self, batch: Batch, *, max_open: int) -> None:
        """Note a new batch.

        Raises:
            BadRequest: Its input is no file of the owner's.
            TooManyBatches: ``max_open`` batches of the owner have not ended.
        """

        def insert(db: sqlite3.Connection) -> None:
            values = (batch.input_file_id, batch.owner, batch.created_at)
            sql = "SELECT 1 FROM files WHERE id = ? AND owner = ? AND expires_at > ? AND purpose = 'batch'"
            if not is_id(batch.input_file_id) or not db.execute(sql, values).fetchone():
                problem = f"{batch.input_file_id[:80]!r} is no file of the purpose 'batch'; upload one with POST /v1/files"
                raise BadRequest(param="input_file_id", problem=problem)
            count = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({_OPEN})"
            (num_open,) = db.execute(count, (batch.owner,)).fetchone()
            if num_open >= max_open:
                raise TooManyBatches(num_open=num_open, limit=max_open, retry_after_s=_RETRY_AFTER_S)
            row = (batch.id, batch.owner, batch.status, batch.input_file_id, msgspec.json.encode(batch))
            db.execute("INSERT INTO batches (id, owner, status, input, record) VALUES (?, ?, ?, ?, ?)", row)

        self._change(insert)

    def batch(self, batch_id: str, owner: str) -> Batch:
        """Return the owner's batch.

        Raises:
            NotStored: The owner has no such batch.
        """
        sql = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        if not is_id(batch_id) or not (found := self._read(sql, batch_id, owner)):
            raise NotStored(kind="Batch", id=batch_id)
        return msgspec.json.decode(found[0][0], type=Batch)

    def batches(self, owner: str, *, after: str | None, limit: int) -> Page:
        """Return the owner's batches, the newest first, behind the one with the id ``after``.

        Raises:
            BadRequest: ``after`` is no batch of the owner's.
        """
        return self._page("batches", Batch, owner, after, limit, False, "1", ())

    def open_batches(self) -> list[Batch]:
        """Return the batches of all owners that have not ended, the oldest first."""
        found = self._read(f"SELECT record FROM batches WHERE status IN ({_OPEN}) ORDER BY number")
        return [msgspec.json.decode(record, type=Batch) for (record,) in found]

    def change(self, batch: Batch, change: Callable[[Batch], Batch], files: tuple[File, ...] = ()) -> Batch:
        """Change the batch as it is now, whatever ``batch`` says, and note its new files, all at once; return it.

        Raises:
            NotStored: It is not there any more.
            ValueError: What ``change`` raises. Nothing is changed.
        """

        def update(db: sqlite3.Connection) -> Batch:
            found = db.execute("SELECT record FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if found is None:
                raise NotStored(kind="Batch", id=batch.id)
            changed = change(msgspec.json.decode(found[0], type=Batch))
            for file in files:
                _insert_file(db, file)
            ended_at = None if changed.is_open else int(time.time())
            row = (changed.status, ended_at, msgspec.json.encode(changed), batch.id)
            db.execute("UPDATE batches SET status = ?, ended_at = ?, record = ? WHERE id = ?", row)
            return changed

        return self._change(update)

    def count_batches(self) -> dict[str, int]:
        """Return how many batches are in each status."""
        found: dict[str, int] = dict(self._read("SELECT status, count(*) FROM batches GROUP BY status"))
        return {status: found.get(status, 0) for status in STATUSES}

    def forget_old(self, *, ended_before: float) -> set[str]:
        """Forget files whose time is over, unless an open batch reads them, and old batches; return the ids of files that are left."""

        def forget(db: sqlite3.Connection) -> set[str]:
            read = f"SELECT input FROM batches WHERE status IN ({_OPEN})"
            db.execute(f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({read})", (time.time(),))
            db.execute("DELETE FROM batches WHERE ended_at < ?", (ended_before,))
            return {file_id for (file_id,) in db.execute("SELECT id FROM files")}

        return self._change(forget)

    def _page(
        self,
        table: str,
        kind: type,
        owner: str,
        after: str | None,
        limit: int,
        oldest_first: bool,
        where: str,
        values: tuple[Any, ...],
    ) -> Page:
        order, side, bound = ("ASC", ">", 0) if oldest_first else ("DESC", "<", 1 << 62)
        if after is not None:
            sql = f"SELECT number FROM {table} WHERE id = ? AND owner = ?"
            if not is_id(after) or not (found := self._read(sql, after, owner)):
                raise BadRequest(param="after", problem=f"{after[:80]!r} is not among your {table}")
            bound = found[0][0]
        sql = f"SELECT record FROM {table} WHERE owner = ? AND number {side} ? AND {where} ORDER BY number {order} LIMIT ?"
        records: list[Any] = [
            msgspec.json.decode(record, type=kind) for (record,) in self._read(sql, owner, bound, *values, limit + 1)
        ]
        return Page(records[:limit], len(records) > limit)

    def _require_file(self) -> None:
        """SQLite writes on into a file that has no name any more, and the next process would find nothing of it.

        Raises:
            sqlite3.OperationalError: The database was removed, or another one is in its place. A FileNotFoundError would tell a job
                that its input is lost.
        """
        try:
            is_there = os.path.samestat(self._opened, self._path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise sqlite3.OperationalError(f"{self._path} was removed while it was in use; restart the ingress")

    def _read(self, sql: str, *values: object) -> list[Any]:
        self._require_file()
        with self._lock, closing(self._db.execute(sql, values)) as found:
            return found.fetchall()

    def _change(self, change: Callable[[sqlite3.Connection], T]) -> T:
        self._require_file()
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = change(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return result


def _insert_file(db: sqlite3.Connection, file: File) -> None:
    row = (file.id, file.owner, file.purpose, file.num_bytes, file.expires_at, msgspec.json.encode(file))
    sql = "INSERT OR REPLACE INTO files (id, owner, purpose, num_bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)"
    db.execute(sql, row)
