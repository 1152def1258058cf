"""Requests may ask for another protocol on their connection: HTTP/2, websockets, a tunnel. Real connections."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from tests.doubles.fleet import in_loop
from tests.ingress.test_listener import HEAD, answer, connection, size

UPGRADE = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("pieces", [1, 2])
@in_loop
async def test_a_request_that_offers_http2_as_javas_client_does_is_answered_as_one_that_does_not(pieces: int) -> None:
    async with connection() as (reader, writer):
        head, body = UPGRADE + b"Content-Length: 38\r\n\r\n", b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\nabc"
        for piece in (head + body,) if pieces == 1 else (head, body):
            writer.write(piece)
            await asyncio.sleep(0.02)
        writer.write(UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nx")
        assert [await answer(reader) for _ in range(3)] == [b"38", b"2", b"1"]


@in_loop
async def test_an_application_sees_the_other_headers_of_a_request_that_offers_another_protocol() -> None:
    scopes = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await size(scope, receive, send)

    async with connection(note) as (reader, writer):
        writer.write(b"GET /a?b HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX: y\r\n\r\n")
        assert await answer(reader) == b"0"
    ((scope, headers),) = ((scope, scope["headers"]) for scope in scopes)
    assert (scope["method"], scope["path"], scope["query_string"]) == ("GET", "/a", b"b")
    assert headers == [(b"host", b"a"), (b"connection", b"Upgrade"), (b"x", b"y")]


@in_loop
async def test_a_request_for_a_tunnel_is_refused() -> None:
    async with connection() as (reader, writer):
        writer.write(b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
        told = await reader.read()
    assert (told[:12], told.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 501", 1)
