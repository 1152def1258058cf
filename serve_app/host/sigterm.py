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
    """The end of one deployment's process: its drain runs once, whether Serve's ``__del__``, SIGTERM or `begin` asks for it first.

    Ray sets its handler in the main thread, and Python lets no other thread set a handler. Serve runs deployments in another thread, so
    this class replaces the function that Ray's handler calls. If a later Ray calls another function there, SIGTERM ends the process at once
    again, and `tests/test_sigterm.py` fails.

    Args:
        drain: The deployment's drain.
        limit_s: Seconds after SIGTERM or `begin` at which the process ends even if the drain is not over or the event loop hangs.
    """

    def __init__(self, drain: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> None:
        self._drain = drain
        self._limit_s = limit_s
        self._limit: threading.Timer | None = None
        self._rays_own: object = None
        self._why = ""
        self._draining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin_at_sigterm(self) -> None:
        """From now on, let SIGTERM begin the drain in the running loop. When the drain is over, Ray ends the process."""
        loop, self._rays_own = asyncio.get_running_loop(), getattr(worker, RAYS_LAST_CALL)

        def begin(*_: object, **__: object) -> None:
            self._set_limit()
            loop.call_soon_threadsafe(self.begin, "SIGTERM has come")

        setattr(worker, RAYS_LAST_CALL, begin)

    def begin(self, why: str) -> None:
        """Drain, then let Ray end the process. Only after `begin_at_sigterm`; without effect if the end has begun."""
        self._set_limit()
        if self._ending is None:
            logger.warning("%s: draining before the end", why)
            self._why = why
            self._ending = asyncio.create_task(self._end(), name="orderly end")

    async def drained(self) -> None:
        """Drain, or wait for the end of a drain that already runs."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="drain")
        await asyncio.shield(self._draining)

    def check(self) -> None:
        """Fail Serve's health check after `begin`: Serve replaces a replica that fails three checks.

        Raises:
            RuntimeError: This process is about to end.
        """
        if self._ending is not None:
            raise RuntimeError(f"{self._why}: this process drains and then ends")

    def _set_limit(self) -> None:
        if self._limit is None:
            self._limit = threading.Timer(self._limit_s, os._exit, (1,))  # a thread, because the loop may hang
            self._limit.daemon = True
            self._limit.start()

    async def _end(self) -> None:
        try:
            await self.drained()
        finally:
            setattr(worker, RAYS_LAST_CALL, self._rays_own)
            os.kill(os.getpid(), signal.SIGTERM)
