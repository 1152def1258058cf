"""The listener limits what a client that never finishes may hold, and for how long. Over real connections."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from prometheus_client import REGISTRY
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.host import descriptors
from serve_app.host.descriptors import SPARE
from serve_app.ingress.http.connection import GONE, MAX_HEAD_BYTES, MAX_PIPELINED, STALLED, LimitedHttpProtocol
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.http.loop_lag import LATE_LOOKS
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fleet import in_loop, settings, until
from tests.ingress.fake_fronts import front
from tests.ports import free_port

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


class Impatient(LimitedHttpProtocol):
    head_timeout_s = 0.02
    unread_body_timeout_s = 0.02
    crowded_timeout_s = 0.02


async def size(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of bytes of the body."""
    num_bytes, more = 0, True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    body = str(num_bytes).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def connection(
    app: ASGIApp = size, *, protocol: type[asyncio.Protocol] = LimitedHttpProtocol, **ingress: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    values = settings(ingress={"port": free_port(), **ingress}).ingress
    listener = Listener(app, values, connection=protocol)
    await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", values.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await listener.stop()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer whose head has its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.mark.parametrize("part", [b"X-Long: " + b"x" * MAX_HEAD_BYTES, b"X: y\r\n" * (MAX_HEAD_BYTES // 6)])
@in_loop
async def test_a_head_over_the_limit_is_refused_before_more_of_it_is_read(part: bytes) -> None:
    async with connection() as (reader, writer):
        writer.write(HEAD + part + b"X" * (32 << 10))
        assert (await reader.read()).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


@in_loop
async def test_a_head_of_half_the_limit_and_a_body_over_it_are_taken_also_in_one_piece_with_the_next_request() -> None:
    body = b"x" * (4 * MAX_HEAD_BYTES)
    request = HEAD + b"X: %s\r\nContent-Length: %d\r\n\r\n" % (b"x" * (MAX_HEAD_BYTES // 2), len(body)) + body
    async with connection() as (reader, writer):
        writer.write(request * 3)
        assert [await answer(reader) for _ in range(3)] == [b"%d" % len(body)] * 3


@in_loop
async def test_a_head_counts_by_its_bytes_and_not_by_the_pieces_it_comes_in() -> None:
    pieces = 0

    class Counted(LimitedHttpProtocol):
        def data_received(self, data: bytes) -> None:
            nonlocal pieces
            super().data_received(data)
            pieces += 1

    async with connection(protocol=Counted) as (reader, writer):
        for sent, piece in enumerate([HEAD, *[b"X: y\r\n"] * 9, b"Content-Length: 1\r\n\r\nx"], 1):
            writer.write(piece)
            await until(partial(reached, lambda: pieces, sent))
        assert await answer(reader) == b"1"


def reached(count: Callable[[], int], wanted: int) -> bool:
    return count() >= wanted


@in_loop
async def test_a_head_that_does_not_end_is_given_up() -> None:
    async with connection(protocol=Impatient) as (reader, writer):
        writer.write(HEAD)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@in_loop
async def test_the_head_of_a_later_request_that_does_not_end_is_given_up() -> None:
    async with connection(protocol=Impatient) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1\r\n\r\nx")
        assert await answer(reader) == b"1"
        writer.write(HEAD)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@in_loop
async def test_an_answer_on_its_way_is_not_cut_for_the_unfinished_head_behind_it() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await size(scope, receive, send)

    late = asyncio.Event()

    class Watched(Impatient):
        def _head_is_late(self) -> None:
            super()._head_is_late()
            late.set()

    async with connection(slow, protocol=Watched) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1\r\n\r\nx" + HEAD)
        await late.wait()
        go_on.set()
        assert await answer(reader) == b"1"
        assert (await reader.read()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@in_loop
async def test_a_connection_on_which_nothing_comes_is_closed_after_the_keep_alive_time() -> None:
    async with connection(keep_alive_s=0.1) as (reader, _):
        assert await reader.read() == b""


@in_loop
async def test_a_body_that_does_not_end_is_given_up_and_no_longer_counted() -> None:
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=1000, body_timeout_s=0.02), version={})
    async with connection(app) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 9\r\n\r\nx")
        head, body = (await reader.read()).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"the request body was not complete within 0.02 s" in body
        await until(lambda: app.num_running == 0)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 40_000, b"a: " + b"b" * 200_000])
@in_loop
async def test_trailers_over_the_limit_of_a_head_are_refused(trailers: bytes) -> None:
    async with connection() as (reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n0\r\n" + trailers)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


@in_loop
async def test_a_body_in_the_smallest_chunks_and_short_trailers_are_taken() -> None:
    async with connection() as (reader, writer):
        writer.write((CHUNKED + b"1\r\na\r\n" * 100_000 + b"0\r\na: b\r\n\r\n") * 2)
        assert [await answer(reader) for _ in range(2)] == [b"100000"] * 2


@in_loop
async def test_bytes_that_are_no_request_end_the_connection_without_a_word_inside_of_an_answer() -> None:
    go_on = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        await go_on.wait()

    async with connection(stream) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        await reader.readuntil(b"3\r\nabc\r\n")
        writer.write(b"}\r\n")
        assert await reader.read() == b""
        go_on.set()


@in_loop
async def test_bytes_that_are_no_request_are_refused_where_no_answer_has_begun() -> None:
    async with connection() as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1\r\n\r\nx")
        assert await answer(reader) == b"1"
        writer.write(b"}\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@in_loop
async def test_a_connection_that_queues_requests_without_end_is_closed() -> None:
    answered = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        await answered.wait()
        await size(scope, receive, send)

    async with connection(held) as (reader, writer):
        writer.write((HEAD + b"Content-Length: 0\r\n\r\n") * (MAX_PIPELINED + 2))
        assert await reader.read() == b""
        answered.set()


@in_loop
async def test_as_many_requests_in_a_row_as_may_wait_are_all_answered() -> None:
    async with connection() as (reader, writer):
        writer.write((HEAD + b"Content-Length: 1\r\n\r\nx") * MAX_PIPELINED)
        assert [await answer(reader) for _ in range(MAX_PIPELINED)] == [b"1"] * MAX_PIPELINED


@in_loop
async def test_a_client_that_leaves_is_gone_for_the_request_that_runs_also_with_others_behind_it() -> None:
    seen: list[str] = []

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        while (message := await receive())["type"] != "http.disconnect":
            pass
        seen.append(message["type"])

    async with connection(watching) as (_, writer):
        writer.write((HEAD + b"Content-Length: 0\r\n\r\n") * 3)
        await until(lambda: seen)
        writer.transport.abort()
        await until(lambda: len(seen) > 1)
    assert seen == ["/v1/completions", "http.disconnect"]


@in_loop
async def test_a_client_that_leaves_behind_a_large_body_is_gone_for_an_application_that_waits_for_nothing_more() -> None:
    gone, read = asyncio.Event(), asyncio.Event()

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][GONE] = gone.set
        while (await receive())["more_body"]:
            pass
        read.set()
        await gone.wait()

    async with connection(busy) as (_, writer):
        writer.write(HEAD + b"Content-Length: 4000000\r\n\r\n" + bytes(4_000_000))
        await until(read.is_set)
        writer.transport.abort()
        try:
            await until(gone.is_set)
        finally:
            gone.set()


MUCH = 8 << 20  # more than the kernel takes for a client that does not read


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.create_task(leaves())
    while not gone.done():
        await send({"type": "http.response.body", "body": bytes(MUCH), "more_body": True})


async def long(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % MUCH)]})
    await send({"type": "http.response.body", "body": bytes(MUCH)})


@pytest.mark.parametrize("app", [endless, long])
@in_loop
async def test_a_client_that_never_reads_its_answer_is_dropped_and_counted(app: ASGIApp) -> None:
    counted = partial(REGISTRY.get_sample_value, "serve_app_stalled_clients_total")
    before, ended = counted(), asyncio.Event()
    told: dict[str, object] = {}

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        told.update((name, value) for name, value in scope["state"].items() if name == STALLED)
        ended.set()

    async with connection(watched, stalled_client_s=1.0) as (_, writer):
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        await until(lambda: counted() != before)
        await ended.wait()
    assert counted() == 1 + (before or 0)
    assert told == (
        {STALLED: True} if app is endless else {}
    )  # a whole answer that waits to be read has ended for its application


@in_loop
async def test_the_rest_of_a_body_that_was_refused_is_not_read_for_ever() -> None:
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=10), version={})
    async with connection(app, protocol=Impatient) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000000\r\n\r\nx")
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")


def leave(monkeypatch: pytest.MonkeyPatch, num_descriptors: int) -> int:
    """Lower the limit that `descriptors` reads so that about this many can still be opened; return the limit."""
    with open(os.devnull) as file:
        limit = file.fileno() + num_descriptors
    monkeypatch.setattr(descriptors, "limit", lambda: limit)
    return limit


crowded_connections = partial(REGISTRY.get_sample_value, "serve_app_crowded_connections_total")


@in_loop
async def test_one_of_the_last_descriptors_serves_a_probe_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=1000), version={})
    limit, before = leave(monkeypatch, SPARE), crowded_connections()
    got = {}
    for path, head in {
        "/readyz": b"GET /readyz",
        "/metrics": b"GET /metrics",
        "/v1/completions": b"POST /v1/completions",
    }.items():
        async with connection(app) as (reader, writer):
            writer.write(head + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end: the connection is closed
            got[path] = (head.split(b"\r\n")[0], body)
    assert got["/readyz"] == (b"HTTP/1.1 503 Service Unavailable", b'{"status":"crowded","file_descriptors":%d}' % limit)
    assert got["/metrics"][0] == b"HTTP/1.1 200 OK"
    assert f"serve_app_crowded_connections_total {(before or 0) + 2:.1f}\n".encode() in got["/metrics"][1]
    assert got["/v1/completions"][0] == b"HTTP/1.1 503 Service Unavailable"
    assert json.loads(got["/v1/completions"][1])["error"]["type"] == "too_many_connections"


@in_loop
async def test_an_ingress_that_is_far_behind_refuses_requests_and_serves_probes_until_it_has_caught_up() -> None:
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=1000), version={})

    async def answer_to(head: bytes) -> bytes:
        async with connection(app) as (reader, writer):
            writer.write(head + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
            return await reader.read()

    for _ in range(LATE_LOOKS):
        app.lag.note(app.lag.limit_s + 1)
    head, _, body = (await answer_to(b"POST /v1/completions")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["type"] == "ingress_overloaded"
    assert (await answer_to(b"GET /metrics")).startswith(b"HTTP/1.1 200")
    app.lag.note(0.0)
    assert (await answer_to(b"POST /v1/completions")).startswith(b"HTTP/1.1 200")


@in_loop
async def test_a_silent_connection_does_not_keep_one_of_the_last_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, SPARE)
    for begun in (b"", b"GET /rea"):
        async with connection(protocol=Impatient) as (reader, writer):
            writer.write(begun)
            assert (await reader.read())[:12] in (b"", b"HTTP/1.1 408")


@in_loop
async def test_of_the_last_descriptors_half_are_not_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, SPARE // 2)
    async with connection() as (reader, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


@in_loop
async def test_an_ingress_with_few_descriptors_is_ready_again_when_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=1000), version={})
    async with connection(app) as (reader, writer):
        for num_left, ready in ((SPARE - 1, b"503"), (SPARE + 20, b"200")):
            leave(monkeypatch, num_left)
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            assert head.split()[1] == ready
