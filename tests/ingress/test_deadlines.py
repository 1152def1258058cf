"""Deadlines of tenants over HTTP: an answer that takes too long ends, and a request that would start too late is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from serve_app.batch.records import Owner
from serve_app.checkpoints import make_tiny_llama
from serve_app.config import ModelSettings
from serve_app.core.queue_rate import QueueRate
from serve_app.core.tenants import Tenant
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.fleet.intake import Intake
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.routes.app import AppLimits
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import application, serving
from tests.ingress.tenants import caller, digest, of_file

KEY = {"authorization": "Bearer sk-of-the-tenant-red"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}
TEXT = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": ("/v1/chat/completions", CHAT, 1),
    "choices": ("/v1/chat/completions", CHAT | {"n": 3}, 3),
    "prompts": ("/v1/completions", TEXT | {"prompt": ["hi", "ho"], "n": 2}, 4),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 400}, 1),
    "messages": ("/v1/messages", CHAT, 1),
    "generate": ("/generate", TEXT, 1),
}
"""Route, body, and number of engine requests."""
BEAMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "beams": ("/v1/completions", TEXT | {"use_beam_search": True, "n": 2}, 1),
    "beams of generate": ("/generate", TEXT | {"use_beam_search": True, "n": 2}, 1),
}


def tenants(folder: Path, **deadlines: float) -> Tenants:
    red = {"keys": [{"id": "red", "sha256": digest("sk-of-the-tenant-red")}], "deadlines": deadlines}
    free = {"keys": [{"id": "free", "sha256": digest("sk-of-the-tenant-free")}]}
    return of_file(folder / "tenants.yaml", json.dumps({"tenants": {"red": red, "free": free}}))


async def warm_up(http: httpx.AsyncClient, engine: FakeEngine, path: str, ask: dict[str, Any]) -> None:
    """Answer a request without a deadline: the first request of a route takes long."""
    short = {name: 1 if "max" in name else value for name, value in ask.items() if name != "use_beam_search"}
    key = {"authorization": "Bearer sk-of-the-tenant-free"}
    answer = asyncio.create_task(http.post(path, json={"model": MODEL, **short}, headers=key))
    while not answer.done():
        engine.step()
        await asyncio.sleep(0.01)
    assert (await answer).status_code == 200
    engine.added.clear()


async def stopped(engine: FakeEngine, num_requests: int) -> None:
    """Wait until the engine runs nothing, and check that it was told to stop so many requests."""
    while engine.running or len(engine.aborted) < num_requests:
        await asyncio.sleep(0.01)
    assert len(engine.aborted) == len(engine.added) == num_requests


@pytest.mark.parametrize("way", [*WAYS, *BEAMS])
@in_loop
async def test_an_answer_that_is_not_complete_in_time_is_504_and_its_engine_stops(way: str, tmp_path: Path) -> None:
    path, ask, num_requests = (WAYS | BEAMS)[way]
    of_red = tenants(tmp_path, total_s=1.0)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_red, stepping=False) as (http, engine, _):
        await warm_up(http, engine, path, ask)
        for number in (1, 2):
            late = await http.post(path, json={"model": MODEL, **ask, "stream": number == 2 and way not in BEAMS}, headers=KEY)
            assert late.status_code == 504
            error = late.json()["error"]
            assert error["type"] == ("timeout_error" if path == "/v1/messages" else "deadline_passed")
            assert error["message"] == "the answer took longer than the 1 s that the tenant 'red' has for one (total_s)"
            assert "retry-after" not in late.headers
            await stopped(engine, number * num_requests)


@pytest.mark.parametrize("way", WAYS)
@in_loop
async def test_a_stream_that_is_not_complete_in_time_ends_in_one_error_and_its_engine_stops(way: str, tmp_path: Path) -> None:
    path, ask, num_requests = WAYS[way]
    of_red = tenants(tmp_path, total_s=2.0)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_red, stepping=False) as (http, engine, _):
        await warm_up(http, engine, path, ask)
        answer = asyncio.create_task(http.post(path, json={"model": MODEL, **ask, "stream": True}, headers=KEY))
        while len(engine.running) < num_requests:
            await asyncio.sleep(0.01)
        for _ in range(3):
            engine.step()
            await asyncio.sleep(0.02)
        told = await answer
        assert told.status_code == 200
        error = json.loads(told.text.strip().splitlines()[-1].removeprefix("data: "))
        error = error.get("error", error)
        assert "(total_s)" in error["message"]
        assert told.text.count("(total_s)") == 1
        await stopped(engine, num_requests)


@in_loop
async def test_an_answer_in_time_is_whole(tmp_path: Path) -> None:
    of_red = tenants(tmp_path, first_token_s=20, total_s=60)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_red, credit=1) as (http, engine, _):
        for path, ask, _ in WAYS.values():
            short = {name: 3 if "max" in name else value for name, value in ask.items()}
            answer = await http.post(path, json={"model": MODEL, **short}, headers=KEY)
            assert answer.status_code == 200, answer.text
        assert engine.aborted == []


@in_loop
async def test_a_line_of_a_batch_ends_in_time_too_but_may_wait_for_its_start(tmp_path: Path) -> None:
    of_red = tenants(tmp_path, first_token_s=0.1, total_s=1.0)
    coming: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[Message] = []
    coming.put_nowait({"type": "http.request", "body": json.dumps({"model": MODEL, **CHAT}).encode(), "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)

    model = make_tiny_llama(tmp_path / "tiny")
    async with application(model, AppLimits(10 << 20), tenants=of_red, stepping=False) as (app, engine, _):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as http:
            await warm_up(http, engine, "/v1/chat/completions", CHAT)
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions"}
        headers = [(b"content-type", b"application/json")]
        await app.answer_line(
            {**scope, "headers": headers, "query_string": b"", "state": {}}, coming.get, send, Owner("red", "red")
        )
        assert [message["status"] for message in sent if "status" in message] == [504]
        await stopped(engine, 1)


@in_loop
async def test_a_request_that_does_not_start_in_time_is_refused_before_any_prefill(tmp_path: Path) -> None:
    of_red, tiny = tenants(tmp_path, first_token_s=1.0), make_tiny_llama(tmp_path / "tiny")
    async with serving(tiny, tenants=of_red, stepping=False, credit=1, stream_silence_s=0.2) as (http, engine, _):
        for path, ask, _ in WAYS.values():
            await warm_up(http, engine, path, ask)
        first = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, **TEXT, "max_tokens": 2}, headers=KEY))
        while not engine.running:
            await asyncio.sleep(0.01)
        engine.step()  # with its first token, it keeps its place
        for path, ask, _ in WAYS.values():
            refused = await http.post(path, json={"model": MODEL, **ask, "stream": True}, headers=KEY)
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            error = refused.json()["error"]
            assert error["type"] == ("overloaded_error" if path == "/v1/messages" else "cannot_start_in_time")
            assert error["message"].startswith("the request has waited 1.")
            assert "too late for its tenant's first_token_s: 1; retry in" in error["message"]
        assert len(engine.added) == 1
        engine.step()
        assert (await first).status_code == 200


@in_loop
async def test_a_request_is_judged_once_however_many_prompts_it_has(tmp_path: Path) -> None:
    of_red = tenants(tmp_path, first_token_s=0.5)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_red, stepping=False, credit=1) as (http, engine, _):
        ask = {"model": MODEL, "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}
        answer = asyncio.create_task(http.post("/v1/completions", json=ask, headers=KEY))
        while not answer.done():
            await asyncio.sleep(0.4)
            engine.step()
        assert (answer.result().status_code, len(engine.added)) == (200, 6)


@in_loop
async def test_a_request_behind_a_queue_that_is_too_slow_for_it_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueRate, "per_second", lambda _, now: 0.1)
    of_red = tenants(tmp_path, first_token_s=15.0)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_red, stepping=False, credit=1) as (http, engine, _):
        ask = {"model": MODEL, **TEXT, "max_tokens": 1}
        running = [asyncio.create_task(http.post("/v1/completions", json=ask, headers=KEY))]
        while not engine.running:
            await asyncio.sleep(0.01)
        running.append(asyncio.create_task(http.post("/v1/completions", json=ask, headers=KEY)))
        await asyncio.sleep(0.1)
        began_at = asyncio.get_running_loop().time()
        refused = await http.post("/v1/completions", json={**ask, "stream": True}, headers=KEY)
        assert asyncio.get_running_loop().time() - began_at < 1.0
        assert refused.status_code == 503
        assert 27 <= int(refused.headers["retry-after"]) <= 33
        late = "the request has waited 0.0 s, 2 others wait, and it would start in about 30.0 s"
        said = f"{late}: too late for its tenant's first_token_s: 15; retry in"
        assert refused.json()["error"]["message"].startswith(said)
        while not all(each.done() for each in running):
            engine.step()
            await asyncio.sleep(0.01)
        assert [each.result().status_code for each in running] == [200, 200]


@pytest.mark.parametrize(
    ("tenant", "start_in_s", "max_wait_s"),
    [
        (None, None, 30.0),
        (Tenant("red"), None, 30.0),
        (Tenant("red", first_token_s=5.0), 5.0, 30.0),
        (Tenant("red", priority="background"), None, None),
        (Tenant("red", priority="batch", first_token_s=90.0), 90.0, None),
    ],
)
def test_tenants_that_may_wait_have_no_limit_but_their_own(
    tenant: Tenant | None, start_in_s: float | None, max_wait_s: float | None
) -> None:
    intake = Intake(ModelSettings(name=MODEL, model="/weights"))
    exchange = Exchange("/v1/completions", None if tenant is None else caller(tenant))
    start_by, found_s = intake._bounds(exchange)
    assert (start_by, found_s) == (None if start_in_s is None else exchange.arrived_at + start_in_s, max_wait_s)
    assert intake._bounds(Exchange("/v1/completions", background=True)) == (None, None)
