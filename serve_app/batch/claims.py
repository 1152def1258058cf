"""A claim lets a process run one batch: a process runs a batch only under a claim, and each batch has one claim at a time.

`FolderClaims` is for one folder: the process that holds the folder's lock has the claims on all batches. leases.py is for several
ingresses.
"""

import os
from collections.abc import Collection
from typing import Protocol

from serve_app.batch.database import Transaction
from serve_app.batch.folder import Folder
from serve_app.batch.journal import Journal, JournalLine


class Claim(Protocol):
    """The right to run one batch. All but ``check`` and ``unpublished`` may wait for the storage."""

    @property
    def fence(self) -> int:
        """Larger than those of all earlier claims on the batch; always 0 in a folder, whose lock needs none."""
        ...

    def check(self, db: Transaction) -> None:
        """Raise `LeaseLost` unless the claim holds; within the transaction that changes the batch."""
        ...

    def open_journal(self) -> Journal:
        """Return the batch's journal with all that was published under this claim and earlier ones."""
        ...

    def publish(self, lines: Collection[JournalLine]) -> None:
        """Keep these lines where the next claim finds them.

        Raises:
            LeaseLost: Another process has the claim; nothing is kept.
            StorageAway: Call it again later.
        """
        ...

    def forget_journal(self) -> None:
        """The batch has ended: remove its answers from wherever they were kept before the output was written."""
        ...

    def close(self) -> None:
        """Give the claim back."""
        ...


class Claims(Protocol):
    def renew(self, running: Collection[str]) -> Collection[str] | None:
        """Keep the claims on these batches; return those that still hold. None: this process may run no batch now."""
        ...

    def taken(self) -> Collection[str]:
        """Return batches that some process has a claim on, so that `take` is not tried in vain for each."""
        ...

    def take(self, batch_id: str) -> Claim | None:
        """Return the claim, or None while another process has it."""
        ...

    def clean(self) -> None:
        """Remove what is left of batches that have ended."""
        ...

    def close(self) -> None: ...


class FolderClaims:
    """The kernel gives the folder's lock back when its process has ended, so that a successor waits for nothing."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock: int | None = None

    def renew(self, running: Collection[str]) -> Collection[str] | None:
        if self._lock is None:
            self._lock = self._folder.try_lock()
        return None if self._lock is None else running

    def taken(self) -> Collection[str]:
        """Return nothing: who holds the lock may run all."""
        return ()

    def take(self, batch_id: str) -> "FolderClaim":
        return FolderClaim(self._folder, batch_id)

    def clean(self) -> None:
        """Nothing: journals without a batch are swept with the folder."""

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


class FolderClaim:
    """Its journal is a file of the folder, which is durable by itself: nothing has to be published."""

    fence = 0

    def __init__(self, folder: Folder, batch_id: str) -> None:
        self._folder, self._batch_id = folder, batch_id

    def check(self, db: Transaction) -> None:
        """Nothing: the lock of the folder outlives each change."""

    def open_journal(self) -> Journal:
        return Journal(self._folder.journal(self._batch_id))

    def publish(self, lines: Collection[JournalLine]) -> None:
        """Nothing: see above."""

    def forget_journal(self) -> None:
        self._folder.remove_journal(self._batch_id)

    def close(self) -> None:
        """Nothing: the lock is of the folder, not of a batch."""
