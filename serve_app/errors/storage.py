"""These errors say that the storage of files and batches fails, is away, or is full."""

from dataclasses import dataclass, field
from typing import ClassVar

from serve_app.errors.base import ServingError


class StorageFailed(ServingError):
    """The folder or the database of files and batches cannot be used. The cause is only in the log, because it names paths."""

    code: ClassVar[str] = "storage_failed"

    def __str__(self) -> str:
        return "the storage of files and batches failed; the server's log has the cause"


@dataclass(eq=False)
class StorageAway(StorageFailed):
    """The shared database or object store does not answer now. The cause is only in the log, because it names hosts."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "storage_away"
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"the storage of files and batches does not answer; nothing is lost; retry in {self.retry_after_s:g} s"


@dataclass(eq=False)
class StorageFull(StorageFailed):
    """There is no room for a file; no part of it is kept."""

    http_status: ClassVar[int] = 507
    code: ClassVar[str] = "storage_full"
    problem: str

    def __str__(self) -> str:
        return f"there is no room: {self.problem}; delete files that are not needed any more"
