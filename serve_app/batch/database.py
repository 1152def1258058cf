"""`Database` is what the records of files and batches need of a database: reads, and changes in transactions.

SQL has `?` where a value stands.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Result(Protocol):
    """The rows that a statement found or changed."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Transaction(Protocol):
    """One change, which is committed as a whole or not at all."""

    def execute(self, sql: str, values: Sequence[object], /) -> Result: ...

    def lock(self, name: str) -> None:
        """Wait until no other transaction has the lock of that name, and take it until this transaction ends."""
        ...


class Database(Protocol):
    """A database. Any thread may call its methods.

    Raises:
        StorageAway: The database does not answer now. Only a shared database raises it.
    """

    def read(self, sql: str, *values: object) -> list[Any]: ...

    def change(self, change: Callable[[Transaction], T]) -> T:
        """Call ``change`` in a transaction, and commit unless it raises."""
        ...

    def now(self) -> float | None:
        """Return the time of day of the database's server, in seconds since 1970; None where the server is this machine."""
        ...

    def close(self) -> None: ...
