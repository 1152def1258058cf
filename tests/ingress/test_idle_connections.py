"""Connections between two requests end after the keep-alive time, whatever comes on them, and no limit of one request cuts the next."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from serve_app.ingress.http.connection import LimitedHttpProtocol
from tests.doubles.fleet import in_loop
from tests.ingress.test_listener import HEAD, Impatient, answer, connection, size


class Brief(LimitedHttpProtocol):
    """A connection with a shorter keep-alive time than uvicorn's whole seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.timeout_keep_alive = 0.05  # type: ignore[assignment]
        super().connection_made(transport)


async def closes_within(reader: asyncio.StreamReader, limit_s: float) -> bool:
    """Return whether the server ends the connection within the time, without another byte."""
    try:
        async with asyncio.timeout(limit_s):
            assert await reader.read() == b""
    except TimeoutError:
        return False
    return True


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body, as for a wrong key."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("last", [b"{}", b"{}\r\n", b"{}\r"])
@in_loop
async def test_a_connection_is_idle_also_after_bytes_that_came_behind_its_answer(last: bytes) -> None:
    """A body behind the answer that refused it, or line ends before the next head, must not make a connection that nothing ends."""
    async with connection(refuse, protocol=Brief) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n")
        assert await answer(reader) == b"no"
        writer.write(last)
        assert await closes_within(reader, 10.0)


@in_loop
async def test_a_request_that_began_before_the_end_of_an_answer_is_not_cut_after_the_keep_alive_time() -> None:
    release, began = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            began.set()
            await release.wait()
        await refuse(scope, receive, send)

    async with connection(app, protocol=Brief) as (reader, writer):
        writer.write(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\nGET /slow HTTP/1.1\r\n")
        assert await answer(reader) == b"no"
        writer.write(b"Host: a\r\n\r\n")
        await began.wait()
        assert not await closes_within(reader, 0.2)
        release.set()
        assert await answer(reader) == b"no"


@in_loop
async def test_the_body_of_a_request_behind_an_answer_has_the_time_of_a_body() -> None:
    """The limit for the rest of a body that no application reads is not for the body of the next request."""
    read, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/first":
            await release.wait()
            await refuse(scope, receive, send)
        else:
            read.set()
            await size(scope, receive, send)

    async with connection(app, protocol=Impatient) as (reader, writer):
        writer.write(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD + b"Content-Length: 4\r\n\r\nab")
        await writer.drain()
        release.set()
        assert await answer(reader) == b"no"
        await read.wait()
        assert not await closes_within(reader, 0.2)
        writer.write(b"cd")
        assert await answer(reader) == b"4"
