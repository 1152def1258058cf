"""`BatchLeases` are claims of several ingresses on the batches of one database: they end by the database's clock, and each has a fence.

An ingress renews its leases each second. If it has not renewed a lease for the length of a lease, because it was killed, hangs or has lost
the database, any other ingress may take the batch over. The new lease has a larger fence. Writes of the old runner are refused by their
fence, in the transaction that would have stored them. So no clock but the database's has to be right.

Answers are published to the database as they arrive, some hundred lines at a time; each runner has a journal of its own on its disk.
"""

import json
import secrets
import zlib
from collections.abc import Collection, Iterator

from serve_app.batch.database import Database, Transaction
from serve_app.batch.folder import Folder
from serve_app.batch.journal import Journal, JournalLine
from serve_app.batch.store import OPEN_SQL
from serve_app.errors import LeaseLost

_READ_ROWS = 4
"""Rows of answers that are read at a time: a row holds the lines of one publication, up to some megabytes."""
_UNTIL = "now() + ? * interval '1 second'"
_TAKE = f"""
INSERT INTO leases (batch, holder, fence, ends_at) VALUES (?, ?, 1, {_UNTIL})
ON CONFLICT (batch) DO UPDATE SET holder = excluded.holder, fence = leases.fence + 1, ends_at = excluded.ends_at
WHERE leases.ends_at < now() RETURNING fence
"""


class BatchLeases:
    """The leases of this process, under a random name of the holder. A lease ends ``lease_s`` after its last renewal."""

    def __init__(self, database: Database, scratch: Folder, *, lease_s: float) -> None:
        self._db, self._scratch, self._lease_s = database, scratch, lease_s
        self._holder = secrets.token_hex(8)

    def renew(self, running: Collection[str]) -> Collection[str]:
        """Renew leases; return the batches whose leases hold. A lease whose time is over is renewed, too, if no other ingress took it."""
        if not running:
            return running

        def renew(db: Transaction) -> Collection[str]:
            # Renew only running batches: a lease whose `close` did not reach the database would live for ever, and its batch stand still.
            sql = f"UPDATE leases SET ends_at = {_UNTIL} WHERE holder = ? AND batch = ANY(?) RETURNING batch"
            return {batch for (batch,) in db.execute(sql, (self._lease_s, self._holder, list(running)))}

        return self._db.change(renew)

    def taken(self) -> Collection[str]:
        return {batch for (batch,) in self._db.read("SELECT batch FROM leases WHERE ends_at >= now()")}

    def take(self, batch_id: str) -> "BatchLease | None":
        def take(db: Transaction) -> int | None:
            db.lock(batch_id)
            found = db.execute(_TAKE, (batch_id, self._holder, self._lease_s)).fetchone()
            return None if found is None else int(found[0])

        fence = self._db.change(take)
        return None if fence is None else BatchLease(self._db, self._scratch, batch_id, fence)

    def clean(self) -> None:
        def clean(db: Transaction) -> None:
            db.lock("files")  # no batch is added while this lock is held
            for table in ("answers", "leases"):
                db.execute(f"DELETE FROM {table} WHERE batch NOT IN (SELECT id FROM batches WHERE status IN ({OPEN_SQL}))", ())

        self._db.change(clean)

    def close(self) -> None:
        """Do nothing: each lease is given back by its own `close`, or ends by itself."""


class BatchLease:
    """The right to run one batch until another ingress has taken it over."""

    def __init__(self, database: Database, scratch: Folder, batch_id: str, fence: int) -> None:
        self.fence = fence
        self._db, self._scratch, self._batch_id = database, scratch, batch_id
        self._is_restored = False

    def check(self, db: Transaction) -> None:
        """Raise LeaseLost unless this is still the batch's lease.

        Call it after `db.lock(batch)`, so that no new lease begins before this transaction ends.
        """
        if db.execute("SELECT 1 FROM leases WHERE batch = ? AND fence = ?", (self._batch_id, self.fence)).fetchone() is None:
            raise LeaseLost(f"the lease on {self._batch_id} is over", "another ingress continues the batch")

    def open_journal(self) -> Journal:
        journal = Journal(self._scratch.journal(self._batch_id, self.fence), notes_recorded=True)
        try:
            if not self._is_restored:
                journal.restore(self._published())
                journal.commit()
                self._is_restored = True
        except BaseException:
            journal.close()
            raise
        return journal

    def publish(self, lines: Collection[JournalLine]) -> None:
        data = zlib.compress(json.dumps(lines).encode(), 1)

        def publish(db: Transaction) -> None:
            db.lock(self._batch_id)
            self.check(db)
            db.execute("INSERT INTO answers (batch, lines) VALUES (?, ?)", (self._batch_id, data))

        self._db.change(publish)

    def forget_journal(self) -> None:
        self._scratch.remove_journal(self._batch_id, self.fence)

        def forget(db: Transaction) -> None:
            db.lock(self._batch_id)
            db.execute("DELETE FROM answers WHERE batch = ?", (self._batch_id,))

        self._db.change(forget)

    def close(self) -> None:
        """Let another ingress take the batch over at once. The fence stays in the database, so that the next fence is larger."""
        self._scratch.remove_journal(self._batch_id, self.fence)

        def end(db: Transaction) -> None:
            sql = "UPDATE leases SET holder = '', ends_at = '-infinity' WHERE batch = ? AND fence = ?"
            db.execute(sql, (self._batch_id, self.fence))

        self._db.change(end)

    def _published(self) -> Iterator[JournalLine]:
        last, sql = 0, f"SELECT number, lines FROM answers WHERE batch = ? AND number > ? ORDER BY number LIMIT {_READ_ROWS}"
        while found := self._db.read(sql, self._batch_id, last):
            for _, data in found:
                yield from (JournalLine(*line) for line in json.loads(zlib.decompress(data)))
            last = found[-1][0]
