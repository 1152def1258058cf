"""`Database` is what the records of files and batches need of a database: reads, and changes in transactions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Result(Protocol):
    """What a statement found."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Transaction(Protocol):
    """One change, which is kept as a whole or not at all."""

    def execute(self, sql: str, values: Sequence[object], /) -> Result: ...

    def lock(self, name: str) -> None:
        """Wait until no other transaction has the lock of that name; it is given back at this transaction's end."""
        ...


class Database(Protocol):
    """Any thread may call it.

    Raises:
        StorageAway: The database does not answer now. It is of the shared storage only.
    """

    def read(self, sql: str, *values: object) -> list[Any]: ...

    def change(self, change: Callable[[Transaction], T]) -> T:
        """Call ``change`` in a transaction, and keep what it did unless it raises."""
        ...

    def close(self) -> None: ...
