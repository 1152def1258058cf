"""`Store` reads and changes the records of files and batches in a database.

`Store` is the whole interface to these records; tenants' tokens of the day are kept beside them. SQLite and PostgreSQL understand its SQL
(`sqlite_database.py`, `postgres.py`). Any thread may call it; each call waits for the database. Each change is one transaction, so several
processes may use one database.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from serve_app.batch.clock import BatchClock
from serve_app.batch.database import Database, Transaction
from serve_app.batch.records import OPEN, PURPOSES, STATUSES, Batch, File, is_id
from serve_app.errors import BadRequest, NotStored, StorageFull, TooManyBatches

OPEN_SQL = ", ".join(f"'{status}'" for status in OPEN)
"""The statuses of batches that have not ended, as an SQL list."""
_LEAST_BYTES = 4096
"""What a file counts at least: even an empty one takes an inode and a record, so that uploads of nothing would fill a disk."""
_HELD = f"SELECT coalesce(sum(CASE WHEN num_bytes < {_LEAST_BYTES} THEN {_LEAST_BYTES} ELSE num_bytes END), 0) FROM files"
_MAX_ENDED = 10_000
"""The most ended batches of one owner. A record has up to 30 KB of errors, and a wrong input ends a batch within a moment."""
_FILES = "files"
"""The lock under which files and batches are added and removed, so that limits hold and a batch's input stays."""
_RETRY_AFTER_S = 60.0


class Page(NamedTuple):
    """A page of a list. ``has_more``: there are records behind this page."""

    records: list[Any]
    has_more: bool


class Store:
    """The records in one database."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self.clock = BatchClock()

    def set_clock(self) -> None:
        """Set the clock by that of the database's server.

        Raises:
            StorageAway: The server does not answer now; the clock continues by itself.
        """
        if (now := self._db.now()) is not None:
            self.clock.follow(now)

    def check_room(self, num_bytes: int, *, limit: int) -> None:
        """Refuse uploads of ``num_bytes`` in total if the stored files leave no room for them.

        Raises:
            StorageFull: Stored files and uploads together would be above ``limit``.
        """
        (held,) = self._db.read(_HELD)[0]
        if held + num_bytes > limit:
            raise StorageFull(problem=f"{held} bytes are stored, uploads may bring {num_bytes}, and the limit is {limit}")

    def has_files(self) -> bool:
        """Return whether there is a record of any file, of any owner."""
        return bool(self._db.read("SELECT 1 FROM files LIMIT 1"))

    def add_file(self, file: File, *, limit: int) -> None:
        """Add the record of a file whose bytes are stored.

        Raises:
            StorageFull: The files together would be above ``limit``.
        """

        def insert(db: Transaction) -> None:
            db.lock(_FILES)
            (held,) = db.execute(_HELD, ()).fetchone()
            if held + max(file.num_bytes, _LEAST_BYTES) > limit:
                raise StorageFull(problem=f"{held} bytes are stored, and the limit is {limit}")
            _insert_file(db, file)

        self._db.change(insert)

    def file(self, file_id: str, owner: str) -> File:
        """Return the owner's file.

        Raises:
            NotStored: The owner has no such file, or its time is over.
        """
        sql = "SELECT record FROM files WHERE id = ? AND owner = ? AND expires_at > ?"
        if not is_id(file_id) or not (found := self._db.read(sql, file_id, owner, self.clock.time())):
            raise NotStored(kind="File", id=file_id)
        return msgspec.json.decode(found[0][0], type=File)

    def files(self, owner: str, *, purpose: str | None, after: str | None, limit: int, oldest_first: bool) -> Page:
        """Return the owner's files behind the file with the id ``after``.

        Raises:
            BadRequest: The owner has no file with the id ``after``.
        """
        where, values = "expires_at > ?", (self.clock.time(),)
        if purpose is not None:
            where += f" AND purpose = '{purpose}'" if purpose in PURPOSES else " AND FALSE"
        return self._page("files", File, owner, after, limit, oldest_first, where, values)

    def delete_file(self, file_id: str, owner: str) -> None:
        """Remove the record of the owner's file.

        Raises:
            NotStored: The owner has no such file.
            BadRequest: A batch that has not ended reads it.
        """

        def delete(db: Transaction) -> None:
            db.lock(_FILES)
            reader = db.execute(f"SELECT id FROM batches WHERE input = ? AND status IN ({OPEN_SQL})", (file_id,)).fetchone()
            if not db.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone():
                raise NotStored(kind="File", id=file_id)
            if reader:
                problem = f"{file_id} is the input of {reader[0]}, which has not ended; cancel that batch first"
                raise BadRequest(param="file_id", problem=problem)
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

        self._db.change(delete)

    def add_batch(self, batch: Batch, *, max_open: int) -> None:
        """Add a new batch. Of the owner's batches that have ended, those beyond `_MAX_ENDED` are forgotten, the oldest first.

        Raises:
            BadRequest: The owner has no file with the id of the batch's input.
            TooManyBatches: ``max_open`` batches of the owner have not ended.
        """

        def insert(db: Transaction) -> None:
            db.lock(_FILES)
            values = (batch.input_file_id, batch.owner, batch.created_at)
            sql = "SELECT 1 FROM files WHERE id = ? AND owner = ? AND expires_at > ? AND purpose = 'batch'"
            if not is_id(batch.input_file_id) or not db.execute(sql, values).fetchone():
                problem = f"{batch.input_file_id[:80]!r} is not a file with the purpose 'batch'; upload one with POST /v1/files"
                raise BadRequest(param="input_file_id", problem=problem)
            count = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({OPEN_SQL})"
            (num_open,) = db.execute(count, (batch.owner,)).fetchone()
            if num_open >= max_open:
                raise TooManyBatches(num_open=num_open, limit=max_open, retry_after_s=_RETRY_AFTER_S)
            row = (batch.id, batch.owner, batch.status, batch.input_file_id, msgspec.json.encode(batch))
            db.execute("INSERT INTO batches (id, owner, status, input, record) VALUES (?, ?, ?, ?, ?)", row)
            ended = f"owner = ? AND status NOT IN ({OPEN_SQL})"
            last = f"SELECT number FROM batches WHERE {ended} ORDER BY number DESC LIMIT 1 OFFSET {_MAX_ENDED}"
            db.execute(f"DELETE FROM batches WHERE {ended} AND number <= ({last})", (batch.owner, batch.owner))

        self._db.change(insert)

    def batch(self, batch_id: str, owner: str) -> Batch:
        """Return the owner's batch.

        Raises:
            NotStored: The owner has no such batch.
        """
        sql = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        if not is_id(batch_id) or not (found := self._db.read(sql, batch_id, owner)):
            raise NotStored(kind="Batch", id=batch_id)
        return msgspec.json.decode(found[0][0], type=Batch)

    def batches(self, owner: str, *, after: str | None, limit: int) -> Page:
        """Return the owner's batches, the newest first, behind the batch with the id ``after``.

        Raises:
            BadRequest: The owner has no batch with the id ``after``.
        """
        return self._page("batches", Batch, owner, after, limit, False, "TRUE", ())

    def open_batches(self) -> list[Batch]:
        """Return the batches of all owners that have not ended, the oldest first."""
        found = self._db.read(f"SELECT record FROM batches WHERE status IN ({OPEN_SQL}) ORDER BY number")
        return [msgspec.json.decode(record, type=Batch) for (record,) in found]

    def change(
        self,
        batch: Batch,
        change: Callable[[Batch], Batch],
        files: tuple[File, ...] = (),
        *,
        guard: Callable[[Transaction], None] | None = None,
    ) -> Batch:
        """Change the stored batch with the id of ``batch``, and add its new files, in one transaction; return the changed batch.

        Args:
            change: Gets the batch as it is stored now, which may differ from ``batch``.
            guard: Called within the transaction, before anything is changed. If it raises, nothing is changed.

        Raises:
            NotStored: The batch is not stored any more.
            ValueError: ``change`` raised it. Nothing is changed.
        """

        def update(db: Transaction) -> Batch:
            db.lock(batch.id)
            if guard is not None:
                guard(db)
            found = db.execute("SELECT record FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if found is None:
                raise NotStored(kind="Batch", id=batch.id)
            changed = change(msgspec.json.decode(found[0], type=Batch))
            for file in files:
                _insert_file(db, file)
            ended_at = None if changed.is_open else int(self.clock.time())
            row = (changed.status, ended_at, msgspec.json.encode(changed), batch.id)
            db.execute("UPDATE batches SET status = ?, ended_at = coalesce(ended_at, ?), record = ? WHERE id = ?", row)
            return changed

        return self._db.change(update)

    def count_batches(self) -> dict[str, int]:
        """Return how many batches are in each status."""
        found: dict[str, int] = dict(self._db.read("SELECT status, count(*) FROM batches GROUP BY status"))
        return {status: found.get(status, 0) for status in STATUSES}

    def forget_old(self, *, ended_before: float) -> set[str]:
        """Remove old batches, and expired files that no open batch reads; return the ids of the files that are left."""

        def forget(db: Transaction) -> set[str]:
            db.lock(_FILES)
            read = f"SELECT input FROM batches WHERE status IN ({OPEN_SQL})"
            db.execute(f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({read})", (self.clock.time(),))
            db.execute("DELETE FROM batches WHERE ended_at < ?", (ended_before,))
            return {file_id for (file_id,) in db.execute("SELECT id FROM files", ())}

        return self._db.change(forget)

    def file_ids(self) -> set[str]:
        """Return the ids of all files, of any owner."""
        return {file_id for (file_id,) in self._db.read("SELECT id FROM files")}

    def tenant_days(self) -> dict[str, tuple[int, int]]:
        """Return for each tenant the last day on which it was counted, from 1970, and its tokens."""
        return {tenant: (day, tokens) for tenant, day, tokens in self._db.read("SELECT tenant, day, tokens FROM tenant_days")}

    def keep_tenant_days(self, days: Mapping[str, tuple[int, int]]) -> None:
        """Keep for each tenant what is later: a day with more tokens, or a new day. A day far ahead is of a clock that was wrong."""

        def keep(db: Transaction) -> None:
            for tenant, (day, tokens) in sorted(days.items()):
                sql = (
                    "INSERT INTO tenant_days (tenant, day, tokens) VALUES (?, ?, ?) ON CONFLICT (tenant) DO UPDATE SET "
                    "day = excluded.day, tokens = excluded.tokens WHERE excluded.day > tenant_days.day "
                    "OR (excluded.day = tenant_days.day AND excluded.tokens > tenant_days.tokens) "
                    "OR tenant_days.day > excluded.day + 1"
                )
                db.execute(sql, (tenant, day, tokens))

        self._db.change(keep)

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
            if not is_id(after) or not (found := self._db.read(sql, after, owner)):
                raise BadRequest(param="after", problem=f"{after[:80]!r} is not among your {table}")
            bound = found[0][0]
        sql = f"SELECT record FROM {table} WHERE owner = ? AND number {side} ? AND {where} ORDER BY number {order} LIMIT ?"
        records: list[Any] = [
            msgspec.json.decode(record, type=kind) for (record,) in self._db.read(sql, owner, bound, *values, limit + 1)
        ]
        return Page(records[:limit], len(records) > limit)


def _insert_file(db: Transaction, file: File) -> None:
    row = (file.id, file.owner, file.purpose, file.num_bytes, file.expires_at, msgspec.json.encode(file))
    columns = ("owner", "purpose", "num_bytes", "expires_at", "record")
    again = ", ".join(f"{column} = excluded.{column}" for column in columns)
    sql = f"INSERT INTO files (id, {', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET {again}"
    db.execute(sql, row)
