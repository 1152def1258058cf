"""`BlockingClient` asks a service for callers that have threads and no event loop, such as Beam's workers."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from serve_app.batch.client import BatchClient, Failure, Limits, Reply, connect, only_model
from serve_app.batch.connections import Connections
from serve_app.batch.requests import Request

_WATCH_S = 1.0


class BlockingClient:
    """A client of one service. All its threads share its connections and its places; an event loop in a thread of its own serves them.

    The thread and the connections end with the last reference to this object. The object cannot be pickled.
    """

    def __init__(self, url: str, key: str, limits: Limits) -> None:
        """Connect nothing yet: the first request connects."""
        self._url, self._key, self._limits = url, key, limits
        self._model = ""
        http = connect(url, key, limits)
        self._client = BatchClient(http, limits)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_serve, args=(self._loop, http), daemon=True, name="batch client").start()
        weakref.finalize(self, _stop, self._loop)

    def ask(self, requests: Sequence[Request], watch: Callable[[], object] | None = None) -> list[Reply | Failure]:
        """Return the outcomes in the order of ``requests``, as soon as the last outcome is there.

        Args:
            watch: Is called each second meanwhile; an exception of it ends the requests.

        Raises:
            ServiceAway: The service has answered nothing for too long; earlier outcomes of this call are dropped.
        """
        asked = asyncio.run_coroutine_threadsafe(_ask_all(self._client, requests), self._loop)
        try:
            while watch is not None and not wait([asked], _WATCH_S).done:
                watch()
            return asked.result()
        finally:
            asked.cancel()  # when the caller's thread was interrupted; else it has ended

    def only_model(self) -> str:
        """Return the name of the service's only model; asks the service once.

        Raises:
            ServiceAway: The service was away, or full, for ``limits.patience_s``.
            BatchError: The answer is not that of a service, the service refuses the key, or it has several models.
        """
        if not self._model:
            self._model = only_model(self._url, self._key, self._limits)
        return self._model


async def _ask_all(client: BatchClient, requests: Sequence[Request]) -> list[Reply | Failure]:
    tasks = [asyncio.create_task(_ask(client, request), name=request.key) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(client: BatchClient, request: Request) -> Reply | Failure:
    if request.body is None:
        return Failure("invalid_line", f"the prompt {request.problem}")
    return await client.ask(request.path, request.body)


def _serve(loop: asyncio.AbstractEventLoop, http: Connections) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(http.aclose())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(loop.stop)
