"""The outer application limits bodies, and notices clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.routes.bodies import tokenizer_bytes
from tests.doubles.fleet import in_loop, until
from tests.ingress.fake_fronts import MAX_BODY_BYTES, error, front, ingress, post

# Limits.


def test_an_announced_body_over_the_limit_is_refused_unread() -> None:
    response = post(ingress(), content=b"x" * (MAX_BODY_BYTES + 1))
    message = "the request has at least 1001 bytes, limit 1000"
    assert (response.status_code, response.json()) == (413, error(message, response.json()["error"]["type"], 413))


def test_a_chunked_body_is_refused_as_soon_as_it_is_over_the_limit() -> None:
    given = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(100):
            given += 1
            yield b"x" * 400

    response = post(ingress(), content=chunks())
    assert response.status_code == 413
    assert "has at least 1200 bytes, limit 1000" in response.json()["error"]["message"]
    assert given < 100


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_tokenizers_routes_take_less_so_that_no_chat_waits_long_for_it(path: str) -> None:
    limits = AppLimits(4 << 20)
    app = IngressApp({"tiny": front("tiny")}, limits, version={})
    small, large = (json.dumps({"prompt": "a" * size}).encode() for size in (tokenizer_bytes(2048) - 50, tokenizer_bytes(2048)))
    assert post(app, path, content=small).status_code == 200
    refused = post(app, path, content=large)
    assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")
    assert str(tokenizer_bytes(2048)) in refused.json()["error"]["message"]
    assert post(app, "/v1/completions", content=large).status_code == 200


def test_a_model_with_a_long_context_has_a_longer_limit_for_them() -> None:
    assert tokenizer_bytes(1 << 20) > 8 * (1 << 20)


def test_a_chunked_body_within_the_limit_arrives_whole() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"model": ', b'"tiny"', b"}"):
            yield part

    assert post(ingress(), content=chunks()).json()["body"] == '{"model": "tiny"}'


# Clients that go away.


def asgi_call(app: IngressApp, receive: Callable[[], Awaitable[Message]], sent: list[Message]) -> Awaitable[None]:
    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    return app(scope, receive, send)


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("never set")


@in_loop
async def test_a_client_that_goes_away_before_its_body_is_read_gets_nothing() -> None:
    messages: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    app = ingress()
    await asgi_call(app, receive, sent)
    assert (sent, app.num_running) == ([], 0)


@in_loop
async def test_a_request_that_is_cancelled_while_its_body_is_read_or_answered_is_no_longer_counted() -> None:
    reached = asyncio.Event()

    async def answers_never(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reached.set()
        await receive()

    async def no_body() -> Message:
        reached.set()
        return await nothing()

    messages: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def body_and_no_more() -> Message:
        return messages.pop() if messages else await nothing()

    app = ingress(front("tiny", answers_never))
    for receive in (no_body, body_and_no_more):
        reached.clear()
        task = asyncio.ensure_future(asgi_call(app, receive, []))
        await until(reached.is_set)
        assert app.num_running == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert app.num_running == 0


@in_loop
async def test_an_app_sees_a_disconnect_after_the_body_it_was_given() -> None:
    seen: list[str] = []

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    messages: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    await asgi_call(ingress(front("tiny", reader)), receive, [])
    assert seen == ["http.request", "http.disconnect"]
