"""Streams of vLLM's own front end are held while there is no replica; the engine that arrives at last is fake."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.config import Settings, parse_settings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.links.fingerprint import model_fingerprint
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import MODEL, FakeReplica, in_loop, start_replica, until
from tests.ingress.fronts import front_end

pytestmark = pytest.mark.engine

COMMENT = b": waiting\n\n"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/generate": {"prompt": "hello", "max_tokens": 3},
}
FILLERS = {path: b"\n" if path == "/generate" else COMMENT for path in BODIES}
_CHANGING = re.compile(
    rb"[0-9a-f]{16,}|\"created(_at)?\": ?[0-9.]+|\"completed_at\": ?[0-9.]+|\"(cmpl|chatcmpl|resp|msg)[-_][^\"]+\""
)
"""Ids and times, which differ between two answers to one request."""


@dataclass
class Ingress:
    """The application without its listener. ``num_fillers`` counts what was sent only to break a silence."""

    app: IngressApp
    front: FrontEnd
    settings: Settings
    num_fillers: int = 0

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def count(message: Message) -> None:
                await send(message)
                self.num_fillers += message.get("body") == FILLERS[path]

            await self.app(scope, receive, count)

        body = {"model": MODEL, "temperature": 0, **BODIES[path], **fields}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, counted)), base_url="http://a") as client:
            return await client.post(path, json=body)

    async def post_bytes(self, path: str, body: bytes) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, self.app)), base_url="http://a") as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    async def join(self) -> FakeReplica:
        engine = FakeEngine(fingerprint=model_fingerprint(self.front.engine.model_config))
        replica = await start_replica(self.settings, "a", engine=engine)
        self.front.client.set_members([replica.lease])
        return replica


@contextlib.asynccontextmanager
async def serving(model: Path, *, silence_s: float, **timeouts: float) -> AsyncIterator[Ingress]:
    tiny = {"model": str(model), "simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"max_model_len": 512}}
    values = parse_settings({"models": {MODEL: tiny}, "timeouts": timeouts, "protocol": {"heartbeat_timeout_s": 100.0}})
    client = FleetClient(values, values.models[MODEL], ingress_id="ingress-1", token=b"", tls=None)
    grammars = GrammarCompiler()
    front = await front_end(values.models[MODEL], str(model), client, grammars)
    app = IngressApp({MODEL: front}, AppLimits(100_000, stream_silence_s=silence_s), version={})
    running = asyncio.create_task(client.run())
    try:
        yield Ingress(app, front, values)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await grammars.close()
        front.engine.shutdown()


async def answered(replica: FakeReplica, answer: "asyncio.Task[httpx.Response]") -> httpx.Response:
    """Let the engine compute the whole answer in one step: how several are put together depends on time."""
    await until(lambda: replica.engine.running)
    replica.engine.step(3)
    return await answer


@in_loop
async def test_what_vllm_says_after_comments_is_what_it_says_without_them(model: Path) -> None:
    async with serving(model, silence_s=0.01) as held, serving(model, silence_s=1e6) as prompt, asyncio.TaskGroup() as tasks:
        there = await prompt.join()
        for path, filler in FILLERS.items():
            held.num_fillers = 0
            waiting = tasks.create_task(held.post(path, stream=True))
            await until(lambda: held.num_fillers >= 2)
            replica = await held.join()
            late = await answered(replica, waiting)
            await replica.close()
            await until(lambda: not held.front.client.fleet.replicas)
            soon = await answered(there, tasks.create_task(prompt.post(path, stream=True)))
            assert (late.status_code, late.headers) == (200, soon.headers)
            assert late.content.count(filler) > soon.content.count(filler), path
            assert _CHANGING.sub(b"", without(filler, late.content)) == _CHANGING.sub(b"", soon.content), path
        await there.close()


def without(filler: bytes, content: bytes) -> bytes:
    return content.lstrip(b"\n").replace(b"\n\n", b"\n") if filler == b"\n" else content.replace(filler, b"")


@in_loop
async def test_a_stream_for_which_no_replica_came_ends_as_its_api_says(model: Path) -> None:
    async with serving(model, silence_s=0.01, no_replica_s=0.0) as ingress:
        for path in BODIES:
            response = await ingress.post(path, stream=True)
            *_, last = [line for line in response.text.split("\n") if line and line != "data: [DONE]"]
            told = json.loads(last.removeprefix("data: "))
            told = told.get("error", told)
            assert response.status_code == 200, path
            assert (told["retry_after_s"], "no_replica" in (told["type"], told["code"])) == (5, True), path
            assert response.text.endswith("data: [DONE]\n\n") == ("completions" in path), path
            assert response.text.count("no_replica") == 1, path


@in_loop
async def test_without_stream_the_refusal_is_a_503_after_a_silence(model: Path) -> None:
    async with serving(model, silence_s=0.01, no_replica_s=0.0) as ingress:
        for path in BODIES:
            response = await ingress.post(path)
            assert (response.status_code, response.headers.get("retry-after")) == (503, "5"), (path, response.text)
            assert response.json()["error"]["type"] == "no_replica", path
            assert ingress.num_fillers == 0, path


@in_loop
async def test_a_request_that_vllm_refuses_has_its_status_also_with_a_long_limit_of_silence(model: Path) -> None:
    async with serving(model, silence_s=1e6) as ingress:
        for path in BODIES:
            response = await ingress.post(path, stream=True, temperature=-1)
            assert (response.status_code, response.json()["error"]["code"]) == (400, 400), path


@in_loop
async def test_a_stream_that_fails_before_its_first_event_is_refused_with_a_status(model: Path) -> None:
    async with serving(model, silence_s=1e6) as ingress:
        half_a_pair = b'{"model": "%b", "input": "hello", "stream": true, "metadata": {"a": "\\ud800"}}' % MODEL.encode()
        response = await ingress.post_bytes("/v1/responses", half_a_pair)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert "surrogates not allowed" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'"\xff"', "can't decode byte 0xff"),
        (b"9" * 5000, "4300 digits"),
        (b"[" * 5000 + b"]" * 5000, "recursion"),
    ],
    ids=["not UTF-8", "a long integer", "nested too deeply"],
)
@in_loop
async def test_a_body_that_python_cannot_parse_is_refused_in_the_form_of_all_errors(
    model: Path, path: str, value: bytes, said: str
) -> None:
    async with serving(model, silence_s=1e6) as ingress:
        body = b'{"model": "%b", "prompt": "a", "input": "a", "x": %b}' % (MODEL.encode(), value)
        response = await ingress.post_bytes(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, 400)
        assert said in response.json()["error"]["message"]
