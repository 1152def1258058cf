"""`PostgresDatabase` has the records of several ingresses' files and batches. Needs the extra `serve-app[shared-batches]`.

Nothing is sent to the database before the first call, so an ingress starts and serves chats while the database is away.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg_pool import ConnectionPool

from serve_app.batch.database import Result, Transaction
from serve_app.config.batch_urls import masked
from serve_app.errors import StorageAway, StorageFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS serve_app_format (format bigint NOT NULL);
INSERT INTO serve_app_format SELECT {format} WHERE NOT EXISTS (SELECT 1 FROM serve_app_format);
CREATE TABLE IF NOT EXISTS serve_app_identity (id text NOT NULL);
INSERT INTO serve_app_identity SELECT gen_random_uuid()::text WHERE NOT EXISTS (SELECT 1 FROM serve_app_identity);
CREATE TABLE IF NOT EXISTS files (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, owner text NOT NULL, purpose text NOT NULL,
  num_bytes bigint NOT NULL, expires_at bigint NOT NULL, record bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, owner text NOT NULL, status text NOT NULL,
  input text NOT NULL, ended_at bigint, record bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_in ON batches (status, number);
CREATE TABLE IF NOT EXISTS tenant_days (tenant text PRIMARY KEY, day bigint NOT NULL, tokens bigint NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
  batch text PRIMARY KEY, holder text NOT NULL, fence bigint NOT NULL, ends_at timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS answers (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, batch text NOT NULL, lines bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_of ON answers (batch, number);
"""
_NUM_CONNECTIONS = 8
_WAIT_S = 3.0
"""Longest time, in seconds, for which a call waits for a connection."""
_STATEMENT_S = 10
_CONNECTION: dict[str, Any] = {
    "connect_timeout": 3,
    "application_name": "serve-app batches",
    # A server that vanished silently is noticed within about 10 s, also while this client waits for its answer.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # ms
    "prepare_threshold": None,  # a pooler in between, such as PgBouncer, may give each transaction another server process
}
_RETRY_AFTER_S = 5.0


class PostgresDatabase:
    """The database at ``url``. libpq's variables (`PGPASSWORD`, `PGPASSFILE`, ...) complete the URL and the password."""

    def __init__(self, url: str) -> None:
        self._pool = ConnectionPool(
            url,
            kwargs=_CONNECTION,
            min_size=0,
            max_size=_NUM_CONNECTIONS,
            timeout=_WAIT_S,
            # One try to connect for each call that finds no connection. With more tries the pool would pause ever longer between them, and
            # would notice that late that the server is back.
            reconnect_timeout=0.1,
            check=ConnectionPool.check_connection,
            configure=_configure,
            open=True,  # with min_size 0 this connects nothing
            name="batches",
        )
        self._url = url
        self._is_prepared = self._is_away = False
        self._is_read_only = False
        """Whether the server counts as away because it took no writes. It may still answer reads."""

    def read(self, sql: str, *values: object) -> list[Any]:
        with self._connection() as db:
            return db.execute(_postgres(sql), values).fetchall()

    def change(self, change: Callable[[Transaction], T]) -> T:
        with self._connection(writes=True) as db:
            return change(_PostgresTransaction(db))

    def identity(self) -> str:
        """Return the database's unique identity, which the first ingress drew at random."""
        return str(self.read("SELECT id FROM serve_app_identity")[0][0])

    def now(self) -> float:
        return float(self.read("SELECT extract(epoch FROM clock_timestamp())")[0][0])

    def close(self) -> None:
        self._pool.close()

    @contextmanager
    def _connection(self, *, writes: bool = False) -> "Iterator[psycopg.Connection[Any]]":
        """Lend a connection with a transaction, which is committed at the end, or undone by an exception.

        Raises:
            StorageAway: There is no connection, a time limit was reached, or the server is full or takes no writes.
            StorageFailed: psycopg raised another error.
        """
        try:
            if self._is_away and not self._is_read_only:
                # This call fails at once if the server refuses; the pool would wait for its own time limit.
                psycopg.connect(self._url, **_CONNECTION).close()
            if not self._is_prepared:
                self._prepare()
            with self._pool.connection() as db:
                yield db
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction) as exc:
            # A server takes no writes for a moment when another server takes over.
            if not self._is_away:
                logger.warning("the database of batches does not answer: %s", masked(str(exc)))
            self._is_away = True
            self._is_read_only = isinstance(exc, psycopg.errors.ReadOnlySqlTransaction)
            raise StorageAway(retry_after_s=_RETRY_AFTER_S) from exc
        except psycopg.Error as exc:
            logger.error("the database of batches refused a statement: %s", masked(str(exc)))
            raise StorageFailed from exc
        if self._is_away and (writes or not self._is_read_only):
            logger.info("the database of batches answers again")
            self._is_away = self._is_read_only = False

    def _prepare(self) -> None:
        """Make the tables. Several threads and processes may do so at the same time."""
        with self._pool.connection() as db:
            _PostgresTransaction(db).lock("schema")
            db.execute(_SCHEMA.format(format=_FORMAT).encode())
            found = db.execute("SELECT max(format) FROM serve_app_format").fetchone()
        if found != (_FORMAT,):
            logger.error("the database of batches is of format %s, not %d: use the serve-app that made it", found, _FORMAT)
            raise StorageFailed
        self._is_prepared = True


class _PostgresTransaction:
    def __init__(self, db: "psycopg.Connection[Any]") -> None:
        self._db = db

    def execute(self, sql: str, values: Sequence[object], /) -> Result:
        return self._db.execute(_postgres(sql), values)

    def lock(self, name: str) -> None:
        self._db.execute(b"SELECT pg_advisory_xact_lock(hashtextextended('serve-app ' || %s, 0))", (name,))


def _configure(db: "psycopg.Connection[Any]") -> None:
    db.execute(f"SET statement_timeout = '{_STATEMENT_S}s'".encode())
    db.commit()


def _postgres(sql: str) -> bytes:
    """Return the statement with psycopg's placeholders, as bytes, because psycopg's type for texts takes only literals."""
    return sql.replace("?", "%s").encode()
