"""`DiskThreads` wait for the disk in place of the event loop, apart from the threads in which vLLM tokenizes."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve_app.batch.folder import storage_error
from serve_app.errors import StorageFull

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NUM_THREADS = 8


class DiskThreads:
    """``make_room`` frees some room on a full disk, and returns whether it did: a second call at the same time finds the room made."""

    def __init__(self, make_room: Callable[[], bool]) -> None:
        self._make_room = make_room
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "batch-disk")

    async def run_when_full(self, call: Callable[[], T]) -> T:
        """Call it in a thread, and once more with the reserve's room if the disk is full: for calls that lead to more room.

        Raises:
            StorageFailed: In place of an error of the disk or of SQLite.
        """
        try:
            return await self.run(call)
        except StorageFull:
            await self.run(self._make_room)  # False is no reason to give up: another call may just have given the reserve's room
            return await self.run(call)

    async def run(self, call: Callable[[], T]) -> T:
        """Call it in a thread.

        Raises:
            StorageFailed: In place of an error of the disk or of SQLite.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (OSError, sqlite3.Error) as exc:
            logger.warning("the storage of files and batches failed: %s", exc)
            raise storage_error(exc) from exc
