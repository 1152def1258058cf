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
    """Threads for calls that wait for the disk.

    ``make_room`` frees some room on a full disk, and returns whether it did: a second call at the same time finds the room already freed.
    """

    def __init__(self, make_room: Callable[[], bool]) -> None:
        self._make_room = make_room
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "batch-disk")

    async def run_when_full(self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread, and once more with the reserve's room if the disk is full. Use it for calls that free room.

        Raises:
            StorageFailed: The disk or SQLite failed.
        """
        try:
            return await self.run(call)
        except StorageFull:
            await self.run(self._make_room)  # try again even after False: another call may just have freed the reserve's room
            return await self.run(call)

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread.

        Raises:
            StorageFailed: The disk or SQLite failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (OSError, sqlite3.Error) as exc:
            logger.warning("the storage of files and batches failed: %s", exc)
            raise storage_error(exc) from exc
