"""`InProcess` sends the requests of the ingress's own batches to the ingress's application, without a connection.

A batch runs in a thread with an event loop of its own (`worker.py`), and the application in the ingress's event loop. When a request is
given up, the application sees a disconnect, as from a client that has gone: vLLM then stops the request in its engine.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from serve_app.batch.records import Owner

logger = logging.getLogger(__name__)

Application = Callable[[Scope, Receive, Send, Owner], Awaitable[None]]
"""The ingress's ASGI application behind its check of API keys: its fourth argument is the owner of the batch."""

_GOODBYE_S = 5.0
"""Longest time that the application may take to notice that its client has gone."""


class InProcess(httpx.AsyncBaseTransport):
    """A transport to ``application``, which runs in ``loop``.

    ``concurrency`` is the most requests at once. ``timeout_s`` is the time limit of one request, without its wait for a place.
    """

    def __init__(
        self,
        application: Application,
        loop: asyncio.AbstractEventLoop,
        *,
        owner: Owner,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self._application, self._loop = application, loop
        self._owner, self._places, self._timeout_s = owner, asyncio.Semaphore(concurrency), timeout_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        async with self._places:
            asked = asyncio.run_coroutine_threadsafe(self._ask(request.url.path, body), self._loop)
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return await _answer_of(asked, request)
            except TimeoutError as exc:
                if not limit.expired():
                    raise
                raise httpx.ReadTimeout("the ingress gave no answer", request=request) from exc

    async def _ask(self, path: str, body: bytes) -> httpx.Response:
        """Run the application on one request. This runs in the application's event loop."""
        call = _AsgiCall(body)
        answering = asyncio.create_task(self._run(path, call), name=f"batch {path}")  # not awaited: see below
        try:
            # A cancelled `wait` leaves the task alone. The disconnect ends the task: cancelling it would leave vLLM's request running.
            await asyncio.wait([answering])
        finally:
            if not answering.done():
                call.gone.set()
                await asyncio.wait([answering], timeout=_GOODBYE_S)
                answering.cancel()
        answering.result()
        return httpx.Response(call.status, headers=call.headers, content=b"".join(call.parts))

    async def _run(self, path: str, call: "_AsgiCall") -> None:
        try:
            await self._application(_scope(path, len(call.body)), call.receive, call.send, self._owner)
        except Exception:  # as a server does: one line's error is no reason to stop the others
            logger.exception("a request of a batch to %s failed inside the server", path)
            call.fail()


async def _answer_of(asked: "Future[httpx.Response]", request: httpx.Request) -> httpx.Response:
    try:
        return await asyncio.wrap_future(asked)
    except asyncio.CancelledError as exc:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise httpx.ReadError(
            "the ingress cancelled the request", request=request
        ) from exc  # as a broken connection: asked again


class _AsgiCall:
    """One request and its answer, as ASGI messages."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.gone = asyncio.Event()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self._given = False

    def fail(self) -> None:
        """Answer 500 in place of what was sent so far."""
        said = {"error": {"message": "the request failed inside the server, whose log has the cause"}}
        self.status, self.headers, self.parts = 500, [], [json.dumps(said).encode()]

    async def receive(self) -> Message:
        if self._given:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self._given = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        else:
            self.parts.append(message.get("body", b""))


def _scope(path: str, num_bytes: int) -> dict[str, Any]:
    headers = [
        (b"host", b"ingress"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % num_bytes),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "server": ("ingress", 80),
        "client": None,
        "state": {},
    }
