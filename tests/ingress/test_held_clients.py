"""Clients understand a stream that was held: OpenAI's, `vllm bench serve`, and one that leaves.

Connections are real. The app waits until the test lets it continue, and counts the comments that were sent meanwhile.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import openai
import pytest
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from vllm.benchmarks.lib import endpoint_request_func as bench

from serve_app.errors import NoReplica
from serve_app.ingress.exchange.held_answer import HeldAnswer, current_exchange
from serve_app.ingress.http.error_answers import FleetError
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fleet import in_loop, settings, until
from tests.ingress.fake_fronts import front
from tests.ingress.test_held_answer import OF_VLLM
from tests.ports import free_port

COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
AWAY = NoReplica(model="tiny", waited_s=30.0, retry_after_s=41.2)


def completion(text: str) -> bytes:
    return (
        b'data: {"id": "c", "object": "text_completion", "model": "tiny", "choices": [{"index": 0, "text": "%s"}]}\n\n'
        % text.encode()
    )


def chat(text: str) -> bytes:
    return b'data: {"id": "c", "model": "tiny", "choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n' % text.encode()


def delta(text: str) -> bytes:
    return b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "%s"}\n\n' % text.encode()


COMPLETED = b'event: response.completed\ndata: {"type": "response.completed", "response": {}}\n\n'


@dataclass
class Held:
    """vLLM's app with an answer that waits for ``go_on``, and the ingress in front of it."""

    chunks: list[bytes]
    raises: bool = False
    refused: bool = False
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_comments: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        limits = AppLimits(1000, stream_silence_s=0.001)
        self.ingress = IngressApp({"tiny": front("tiny", self._vllm)}, limits, version={})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            self.num_comments += message.get("body") == COMMENT
            await send(message)

        await self.ingress(scope, receive, counted)

    async def _vllm(self, scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(self._answer(), media_type="text/event-stream")(scope, receive, send)

    async def _answer(self) -> AsyncIterator[bytes]:
        exchange = current_exchange()
        assert exchange is not None
        try:
            await self.go_on.wait()
            exchange.error = AWAY if self.refused else None
            if self.raises:
                raise FleetError(AWAY)
            for chunk in self.chunks:
                yield chunk
        finally:
            self.ended.set()

    async def comments(self, count: int) -> None:
        await until(lambda: self.num_comments >= count)

    async def go_on_after_comments(self) -> None:
        await self.comments(2)
        self.go_on.set()


@contextlib.asynccontextmanager
async def listening(held: Held) -> AsyncIterator[Listener]:
    values = settings(ingress={"port": free_port()}).ingress
    listener = Listener(held, values)
    await listener.start()
    held.url = f"http://127.0.0.1:{values.port}"
    try:
        yield listener
    finally:
        await listener.stop()


@contextlib.asynccontextmanager
async def openai_client(held: Held) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{held.url}/v1", api_key="k", max_retries=0) as client:
        yield client


async def texts_of_openai(client: openai.AsyncOpenAI) -> list[str]:
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    return [chunk.choices[0].text async for chunk in stream]


@in_loop
async def test_the_openai_client_reads_over_comments() -> None:
    held = Held([completion("a"), completion("b"), DONE])
    async with listening(held), openai_client(held) as client, asyncio.TaskGroup() as tasks:
        texts = tasks.create_task(texts_of_openai(client))
        await held.go_on_after_comments()
        assert await texts == ["a", "b"]


@in_loop
async def test_the_openai_client_gets_the_time_of_a_refusal_after_comments() -> None:
    held = Held([OF_VLLM, DONE], refused=True)
    async with listening(held), openai_client(held) as client, asyncio.TaskGroup() as tasks:
        texts = tasks.create_task(expect_refusal(texts_of_openai(client)))
        await held.go_on_after_comments()
        told = cast(dict[str, Any], (await texts).body)
        assert (told["type"], told["code"], told["retry_after_s"]) == ("no_replica", 503, 42)


@in_loop
async def test_the_openai_client_gets_the_time_of_a_refused_stream_of_responses() -> None:
    held = Held([], refused=True, raises=True)
    async with listening(held), openai_client(held) as client, asyncio.TaskGroup() as tasks:
        stream = tasks.create_task(client.responses.create(model="tiny", input="a", stream=True))
        await held.go_on_after_comments()
        (event,) = [event async for event in await stream]
        assert (event.type, event.model_extra) == ("error", {"retry_after_s": 42})


async def expect_refusal(call: Awaitable[object]) -> openai.APIError:
    with pytest.raises(openai.APIError) as refusal:
        await call
    return refusal.value


async def benchmarked(ask: Callable[..., Awaitable[Any]], path: str, chunks: list[bytes]) -> Any:
    """Return what `vllm bench serve` takes from a stream that began with comments."""
    held = Held(chunks)
    async with listening(held), aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        request = bench.RequestFuncInput(prompt="a", api_url=held.url + path, prompt_len=1, output_len=2, model="tiny")
        answer = tasks.create_task(cast(Any, ask(request, session)))
        await held.go_on_after_comments()
        return await answer


@pytest.mark.parametrize(
    ("ask", "path", "chunks"),
    [
        (bench.async_request_openai_completions, "/v1/completions", [completion("a"), completion("b"), DONE]),
        (bench.async_request_openai_chat_completions, "/v1/chat/completions", [chat("a"), chat("b"), DONE]),
        (bench.async_request_openai_responses, "/v1/responses", [delta("a"), delta("b"), COMPLETED]),
    ],
    ids=["completions", "chat", "responses"],
)
@in_loop
async def test_vllms_benchmark_client_reads_over_comments(
    ask: Callable[..., Awaitable[Any]], path: str, chunks: list[bytes]
) -> None:
    output = await benchmarked(ask, path, chunks)
    assert (output.success, output.generated_text, output.error) == (True, "ab", "")


@in_loop
async def test_vllms_benchmark_client_still_needs_a_comment_in_one_piece_with_the_event_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeldAnswer, "_after_a_filler", lambda self, form, message: message)
    chunks = [completion("a"), completion("b"), DONE]
    output = await benchmarked(bench.async_request_openai_completions, "/v1/completions", chunks)
    assert output.generated_text == "b", "vLLM's client reads comments now: remove HeldAnswer._after_a_filler"


@in_loop
async def test_a_client_that_leaves_while_it_is_held_costs_nothing_more() -> None:
    held = Held([completion("a"), DONE])
    async with listening(held), aiohttp.ClientSession() as session:
        async with session.post(f"{held.url}/v1/completions", json={"stream": True}) as response:
            assert (response.status, await response.content.readuntil(b"\n\n")) == (200, COMMENT)
        response.close()
        await held.ended.wait()
        await until(lambda: held.ingress.num_running == 0)
        assert [t.get_name() for t in asyncio.all_tasks() if t.get_name() == "fill silences"] == []


@in_loop
async def test_a_listener_that_stops_waits_for_a_stream_that_is_held() -> None:
    held = Held([completion("a"), DONE])
    async with listening(held) as listener, openai_client(held) as client, asyncio.TaskGroup() as tasks:
        texts = tasks.create_task(texts_of_openai(client))
        await held.comments(1)
        stop = tasks.create_task(listener.stop())
        await held.comments(held.num_comments + 2)
        assert not stop.done()
        held.go_on.set()
        assert await texts == ["a"]
