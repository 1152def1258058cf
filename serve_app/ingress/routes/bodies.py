"""The body of a request is read once, within limits, and given to vLLM's app again."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from serve_app.errors import BodyTooSlow, RequestTooLarge

SMALL_BYTES = 256 << 10
"""A body of up to this size is read whatever others are being read."""
ROOM_BYTES = 32 << 20
"""Memory for larger bodies that are being read; a model's front end has its own limits for those that have been read."""
FAIR_S = 10.0
"""A body that others wait for must be there within this time: 10 MiB in it are 8 Mbit/s."""
_BYTES_PER_TOKEN = 16
_TOKENIZED_BYTES = 256 << 10


class Bodies:
    """Reads bodies. Large ones share `ROOM_BYTES`: where there is no room, a body waits while the connection is not read.

    A tenant gets at most half of the room, so that others find some.

    Args:
        limit: The most bytes of a body.
        timeout_s: The longest time from the head of a request to the end of its body.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit, self._timeout_s = limit, timeout_s
        self._room = max(ROOM_BYTES, limit)
        self._freed = asyncio.Event()
        self._taken: Counter[str] = Counter()  # by tenant
        self._lines: dict[str, deque[asyncio.Timeout]] = {}  # those that wait, by tenant
        self._reading: dict[asyncio.Timeout, float] = {}  # large bodies: when each got its room

    async def read(self, scope: Scope, receive: Receive, tenant: str = "") -> bytes:
        """Return the body. ``tenant``: "" where no key is required.

        Raises:
            RequestTooLarge: The body is longer than the limit, or announces that it will be.
            BodyTooSlow: The body did not come in time.
            ClientDisconnect: The client has gone before the end.
        """
        announced = dict(scope["headers"]).get(b"content-length", b"")
        size = int(announced) if announced.isdigit() else None
        if size is not None and size > self._limit:
            raise RequestTooLarge(size_bytes=size, limit_bytes=self._limit)
        began_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                body = bytearray()  # one block of memory: many small pieces would leave holes in the heap
                try:
                    if not await self._read_to(SMALL_BYTES, body, receive):
                        async with self._room_for(self._limit if size is None else size, tenant, limit):
                            await self._read_to(self._limit, body, receive)
                    return bytes(body)
                finally:
                    body.clear()  # an error keeps the frame with this name until Python's garbage collection finds both
        except TimeoutError:
            if not limit.expired():
                raise
            raise BodyTooSlow(limit_s=round((limit.when() or began_at) - began_at, 2)) from None

    async def _read_to(self, most: int, body: bytearray, receive: Receive) -> bool:
        """Read on until the body is longer than ``most`` bytes, and return whether it is complete before that."""
        while len(body) <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise RequestTooLarge(size_bytes=len(body), limit_bytes=self._limit)
            if not message.get("more_body", False):
                return True
        return False

    @contextlib.asynccontextmanager
    async def _room_for(self, size: int, tenant: str, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Wait until there is room for a tenant's large body, in the order of arrival, and keep the room during the block."""
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(tenant, deque())
        line.append(limit)
        try:
            while line[0] is not limit or not self._has_room(size, tenant):
                self._hurry(loop.time())
                await self._freed.wait()
        finally:
            line.remove(limit)
            if not line and self._lines.get(tenant) is line:
                del self._lines[tenant]
            self._wake()
        self._taken[tenant] += size
        self._reading[limit] = loop.time()
        try:
            yield
        finally:
            del self._reading[limit]
            self._taken[tenant] -= size
            self._wake()

    def _wake(self) -> None:
        """Let all that wait look whether they have room now."""
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def _has_room(self, size: int, tenant: str) -> bool:
        of_one = self._room // 2 if tenant else self._room
        fits = self._taken.total() + size <= self._room and (self._taken[tenant] + size <= of_one or not self._taken[tenant])
        return fits or not self._reading

    def _hurry(self, now: float) -> None:
        """Give the bodies that are being read the time of `FAIR_S`, because others wait."""
        for limit, began_at in self._reading.items():
            until = max(now, began_at + FAIR_S)
            if (when := limit.when()) is not None and until < when:
                limit.reschedule(until)


def tokenizer_bytes(max_model_len: int) -> int:
    """Return the largest body for the routes of the tokenizer, in bytes: several times the text for which the context has room.

    A model has one tokenizer, which takes one text after the other. A text of 4 MiB kept all chats of the model waiting for 25 s.
    """
    return max(_TOKENIZED_BYTES, _BYTES_PER_TOKEN * max_model_len)


def replay(body: bytes, receive: Receive, gone: Callable[[], None]) -> Receive:
    """Return a receive that gives the body again, then the client's messages. ``gone`` is called when the client disconnects."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone()
            return message
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
