"""`OrderlyEnd` lets SIGTERM begin the drain of a Ray Serve process; Ray itself would end the process at once and cut its streams."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ray._private import worker

logger = logging.getLogger(__name__)

RAYS_LAST_CALL = "raise_sys_exit_with_custom_error_message"
"""The function that Ray's handler of SIGTERM calls to end the process, by its name in `ray._private.worker`."""


class OrderlyEnd:
    """The end of one deployment's process: its drain runs once, whether Serve's ``__del__`` or SIGTERM asks for it first.

    Ray sets its handler in the main thread, and Python lets no other thread set a handler. Serve runs deployments in another thread, so
    this class replaces the function that Ray's handler calls. If a later Ray calls another function there, SIGTERM ends the process at once
    again, and `tests/test_sigterm.py` fails.

    Args:
        drain: The deployment's drain.
        limit_s: Seconds after SIGTERM at which the process ends even if the drain is not over or the event loop hangs.
    """

    def __init__(self, drain: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> None:
        self._drain = drain
        self._limit_s = limit_s
        self._limit: threading.Timer | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin_at_sigterm(self) -> None:
        """From now on, let SIGTERM begin the drain in the running loop. When the drain is over, Ray ends the process."""
        loop, rays_own = asyncio.get_running_loop(), getattr(worker, RAYS_LAST_CALL)

        def begin(*_: object, **__: object) -> None:
            if self._limit is None:
                self._limit = threading.Timer(self._limit_s, os._exit, (1,))  # a thread, because the loop may hang
                self._limit.daemon = True
                self._limit.start()
            loop.call_soon_threadsafe(self._begin, rays_own)

        setattr(worker, RAYS_LAST_CALL, begin)

    async def drained(self) -> None:
        """Drain, or wait for the end of a drain that already runs."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="drain")
        await asyncio.shield(self._draining)

    def check(self) -> None:
        """Fail Serve's health check after SIGTERM: Serve replaces a replica that fails three checks.

        Raises:
            RuntimeError: SIGTERM has come, so this process is about to end.
        """
        if self._ending is not None:
            raise RuntimeError("SIGTERM has come: this process drains and then ends")

    def _begin(self, rays_own: object) -> None:
        if self._ending is None:
            logger.warning("SIGTERM: draining before the end")
            self._ending = asyncio.create_task(self._end(rays_own), name="end at SIGTERM")

    async def _end(self, rays_own: object) -> None:
        try:
            await self.drained()
        finally:
            setattr(worker, RAYS_LAST_CALL, rays_own)
            os.kill(os.getpid(), signal.SIGTERM)
