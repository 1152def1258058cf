"""A claim lets a process run one batch: a process runs a batch only under a claim, and each batch has one claim at a time.

`FolderClaims` is for one folder: the process that holds the folder's lock has the claims on all batches. `leases.py` has the claims of
several ingresses.
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
        """A number larger than the fence of each earlier claim on the batch; always 0 in a folder, whose lock needs no fence."""
        ...

    def check(self, db: Transaction) -> None:
        """Raise `LeaseLost` unless the claim holds. Call it within the transaction that changes the batch."""
        ...

    def open_journal(self) -> Journal:
        """Return the batch's journal, with all lines that were published under this claim and earlier claims."""
        ...

    def publish(self, lines: Collection[JournalLine]) -> None:
        """Store these lines where the next claim finds them.

        Raises:
            LeaseLost: Another process has the claim; nothing is stored.
            StorageAway: The storage does not answer now; publish the lines again later.
        """
        ...

    def forget_journal(self) -> None:
        """Remove the journal of a batch that has ended, and the published answers with it."""
        ...

    def close(self) -> None:
        """Give the claim back."""
        ...


class Claims(Protocol):
    """The claims of one process on batches. The methods may wait for the storage."""

    def renew(self, running: Collection[str]) -> Collection[str] | None:
        """Renew the claims on these batches; return the batches whose claims still hold. None: this process may run no batch now."""
        ...

    def taken(self) -> Collection[str]:
        """Return batches on which some process has a claim, so that `take` is not tried in vain for each of them."""
        ...

    def take(self, batch_id: str) -> Claim | None:
        """Return the claim, or None while another process has it."""
        ...

    def clean(self) -> None:
        """Remove answers and claims that are left of batches that have ended."""
        ...

    def close(self) -> None: ...


class FolderClaims:
    """The claims of the process that holds the folder's lock.

    The kernel frees the lock when the process ends, so that a successor need not wait.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock: int | None = None

    def renew(self, running: Collection[str]) -> Collection[str] | None:
        if self._lock is None:
            self._lock = self._folder.try_lock()
        return None if self._lock is None else running

    def taken(self) -> Collection[str]:
        """Return no batch: the holder of the lock may run all."""
        return ()

    def take(self, batch_id: str) -> "FolderClaim":
        return FolderClaim(self._folder, batch_id)

    def clean(self) -> None:
        """Do nothing: journals without a batch are swept with the folder."""

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


class FolderClaim:
    """A claim in a folder. Its journal is a file of the folder, which is durable by itself: nothing has to be published."""

    fence = 0

    def __init__(self, folder: Folder, batch_id: str) -> None:
        self._folder, self._batch_id = folder, batch_id

    def check(self, db: Transaction) -> None:
        """Do nothing: the lock of the folder outlives each change."""

    def open_journal(self) -> Journal:
        return Journal(self._folder.journal(self._batch_id))

    def publish(self, lines: Collection[JournalLine]) -> None:
        """Do nothing: the journal is durable."""

    def forget_journal(self) -> None:
        self._folder.remove_journal(self._batch_id)

    def close(self) -> None:
        """Do nothing: the lock is of the folder, not of a batch."""
