"""A tenant is billed the tokens that its engine counts, for several choices of a prompt and for a stream that its client leaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import REGISTRY
from starlette.types import Message

from serve_app.checkpoints import make_tiny_llama
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.serving import application
from tests.ingress.tenants import digest, of_file

KEY = "sk-of-the-tenant-red"


def file_of(tenant: str) -> str:
    return json.dumps({"tenants": {tenant: {"keys": [{"id": tenant, "sha256": digest(KEY)}]}}})


def billed(tenant: str) -> list[float]:
    """Return tokens of prompts and of answers."""
    labels = [{"tenant": tenant, "model": MODEL, "kind": kind} for kind in ("prompt", "output")]
    return [REGISTRY.get_sample_value("serve_app_tenant_tokens_total", each) or 0.0 for each in labels]


async def stream(app: IngressApp, ask: dict[str, Any], leave: asyncio.Event) -> None:
    """Ask for a stream, whose client disconnects when ``leave`` is set."""
    body = [{"type": "http.request", "body": json.dumps(ask).encode(), "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None: ...

    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST"}
    path = {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "state": {}}
    await app({**scope, **path, "headers": headers}, receive, send)


@in_loop
async def test_choices_are_billed_all_their_tokens_and_their_prompt_once(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", file_of("bill-n"))
    async with application(make_tiny_llama(tmp_path / "tiny"), AppLimits(10 << 20), tenants=tenants) as (app, engine, _):
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", headers=headers) as http:
            ask = {"model": MODEL, "prompt": [[5] * 20, [6] * 30], "n": 2, "max_tokens": 7, "ignore_eos": True}
            usage = (await http.post("/v1/completions", json=ask)).json()["usage"]
        assert billed("bill-n") == [50.0, engine.num_output_tokens] == [usage["prompt_tokens"], usage["completion_tokens"]]
        assert engine.num_output_tokens == 4 * 7
        assert sum(len(each.prompt_token_ids or ()) for each in engine.added) == 2 * 50


@in_loop
async def test_a_stream_that_its_client_leaves_is_billed_what_the_engine_gave(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", file_of("bill-gone"))
    model, limits = make_tiny_llama(tmp_path / "tiny"), AppLimits(10 << 20)
    async with application(model, limits, tenants=tenants, stepping=False) as (app, engine, _):
        ask = {"model": MODEL, "prompt": [5] * 20, "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
        leave, fleet = asyncio.Event(), app.front_ends[MODEL].client.fleet
        left = asyncio.create_task(stream(app, ask, leave))
        await until(lambda: len(engine.running) == 2)
        for _ in range(3):
            engine.step()
        await until(lambda: sum(len(each.emitted_ids) for each in fleet.requests.values()) == 2 * 3)
        leave.set()
        await left
        await until(lambda: not engine.running)
        assert len(engine.aborted) == 2
        engine.step()
        assert billed("bill-gone") == [20.0, engine.num_output_tokens] == [20.0, 2 * 3]
