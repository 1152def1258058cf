"""A client that disconnects gives back what its request had set aside of the tenant's quotas, and keeps what the request has used."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from serve_app.checkpoints import make_tiny_llama
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.serving import application
from tests.ingress.tenants import of_file
from tests.ingress.test_quotas import shown, tenants_file

PROMPT, LIMIT = 20, 1000
ASK = {"prompt": [5] * PROMPT, "max_tokens": 400, "ignore_eos": True}
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "one answer": ("/v1/completions", ASK, 1),
    "two answers": ("/v1/completions", ASK | {"n": 2}, 2),
    "generate": ("/generate", ASK, 1),
}
"""Route, body, and the number of its answers."""


async def leaving(app: IngressApp, path: str, body: dict[str, Any], leave: asyncio.Event, asked: list[Exchange]) -> None:
    """Ask as the tenant red, and disconnect at ``leave``. Until then ``asked`` gets the HTTP request as the ingress has it."""
    parts: list[Message] = [{"type": "http.request", "body": json.dumps({"model": MODEL, **body}).encode(), "more_body": False}]

    async def receive() -> Message:
        if not parts:
            if (exchange := current_exchange()) is not None:
                asked.append(exchange)
            await leave.wait()
            return {"type": "http.disconnect"}
        return parts.pop()

    async def send(_: Message) -> None:
        pass

    headers = [(name.encode(), value.encode()) for name, value in {**shown("red"), "content-type": "application/json"}.items()]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    await app({**scope, "http_version": "1.1", "state": {}}, receive, send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@in_loop
async def test_a_client_that_leaves_gets_back_what_its_request_had_set_aside(
    way: str, num_steps: int, stream: bool, tmp_path: Path
) -> None:
    path, body, num_answers = WAYS[way]
    limits = {"tokens_per_minute": LIMIT, "requests_per_minute": 10, "max_concurrent": 1}
    tenants, leave = of_file(tmp_path / "tenants.yaml", tenants_file(red=limits)), asyncio.Event()
    model = make_tiny_llama(tmp_path / "tiny")
    small: dict[str, Any] = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 10, "ignore_eos": True}
    async with (
        application(model, AppLimits(10 << 20), tenants=tenants, stepping=False) as (app, engine, _),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress", headers=shown("red")) as http,
    ):
        asked: list[Exchange] = []
        gone = asyncio.create_task(leaving(app, path, {**body, "stream": stream}, leave, asked))
        await until(lambda: len(engine.running) == num_answers)
        refused = await http.post("/v1/completions", json=small)
        assert refused.status_code == 429
        assert "the tenant 'red' has max_concurrent 1" in refused.text
        for _ in range(num_steps):
            engine.step()
        await until(lambda: asked and asked[0].requests.output_tokens == num_answers * num_steps)
        leave.set()
        await gone
        await until(lambda: not engine.running)
        answer = asyncio.create_task(http.post("/v1/completions", json=small))
        await until(lambda: engine.running or answer.done())
        for _ in range(small["max_tokens"]):
            engine.step()
        after = await answer
        assert after.status_code == 200, after.text
        used = PROMPT + num_answers * num_steps
        assert int(after.headers["x-ratelimit-remaining-tokens"]) == LIMIT - used - 20, "the next request needs 10 + 10"
        assert after.headers["x-ratelimit-remaining-requests"] == "8"
