"""At the end of an ingress's drain, each running request gets one error: the server stops. Over real connections."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.runtime import IngressRuntime
from tests.doubles.fleet import in_loop, settings, until
from tests.ingress.fake_fronts import front
from tests.ingress.test_listener import HEAD
from tests.ports import free_port

EVENT = b'data: {"choices": []}\n\n'
STOPPING = {
    "message": "this server is stopping and could not finish the answer in time; send the request again in 1.0 s",
    "type": "server_stopping",
    "param": None,
    "code": 503,
    "retry_after_s": 1,
}


async def never_done(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a stream of the media type that the body names, `events` of it at once and the rest never; without one, with nothing."""
    body = json.loads((await receive())["body"])

    async def events() -> AsyncIterator[bytes]:
        for _ in range(body["events"]):
            yield EVENT
        await asyncio.Event().wait()

    if body["stream"]:
        await StreamingResponse(events(), media_type=body["stream"])(scope, receive, send)
        return
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:  # as vLLM does
        await JSONResponse({"error": "Client disconnected"}, 400)(scope, receive, send)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[IngressRuntime, httpx.AsyncClient]]:
    app = IngressApp({"tiny": front("tiny", never_done)}, AppLimits(max_body_bytes=1000), version={})
    values = settings(ingress={"port": free_port()}).ingress
    runtime = IngressRuntime(app, Listener(app, values), {}, GrammarCompiler())
    await runtime.listener.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{values.port}") as client:
        yield runtime, client


TOLD = json.dumps({"error": STOPPING}).encode()


@pytest.mark.parametrize(
    ("ask", "status", "content"),
    [
        ({"stream": "text/event-stream", "events": 2}, 200, EVENT * 2 + b"data: %s\n\n" % TOLD),
        ({"stream": "application/x-ndjson", "events": 2}, 200, EVENT * 2 + TOLD + b"\n"),
        ({"stream": "application/x-nul-json", "events": 2}, 200, EVENT * 2 + TOLD + b"\0"),
        ({"stream": "text/event-stream", "events": 0}, 503, TOLD),
        ({"stream": ""}, 503, TOLD),
    ],
    ids=["stream", "lines", "values before NUL", "stream not begun", "no stream"],
)
@in_loop
async def test_what_still_runs_at_the_end_of_a_drain_ends_by_one_error(ask: object, status: int, content: bytes) -> None:
    async with serving() as (runtime, client), asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(client.post("/v1/completions", json=ask))
        await until(lambda: runtime.app.num_running == 1)
        await runtime.drain(limit_s=0.05)
        told = await answer
        assert (told.status_code, told.content, runtime.app.num_running) == (status, content, 0)


@in_loop
async def test_a_body_that_is_still_on_its_way_at_the_end_of_a_drain_is_refused() -> None:
    async with serving() as (runtime, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(HEAD + b"Content-Length: 9\r\n\r\n{")
        await until(lambda: runtime.app.num_running == 1)
        await runtime.drain(limit_s=0.0)
        head, body = (await reader.read()).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body) == {"error": STOPPING}
        writer.close()


@in_loop
async def test_a_request_behind_the_one_that_a_drain_has_ended_is_refused_too() -> None:
    async with serving() as (runtime, client):
        runtime.app.end_all()
        assert (await client.post("/v1/completions", json={"stream": True})).json() == {"error": STOPPING}
        await runtime.drain(limit_s=1.0)
