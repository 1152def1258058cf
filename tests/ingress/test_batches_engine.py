"""A batch runs beside chats, with vLLM's own front end over real connections; fake engines compute when a test calls them.

A test sleeps between two questions by HTTP for the state of a batch, as clients do.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from serve_app.batch.service import BatchService
from serve_app.config import BatchSettings, parse_settings
from serve_app.core.fair_tags import BACKGROUND_PRIORITY
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.runtime import IngressRuntime
from serve_app.links.fingerprint import model_fingerprint
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import MODEL, FakeReplica, in_loop, start_replica, until
from tests.ingress.fronts import front_end
from tests.ingress.tenants import digest, of_file
from tests.ports import free_port

pytestmark = pytest.mark.engine

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


@dataclass
class Ingress:
    runtime: IngressRuntime
    front: FrontEnd
    engine: FakeEngine
    client: openai.AsyncOpenAI

    async def begin(self, num_lines: int, *, key: str = "none") -> str:
        """Begin a batch and return its id. Its lines are equally long, if there are at most 100."""
        lines = [{"custom_id": f"id-{i}", "method": "POST", "url": CHAT, "body": body(f"line {i:02}")} for i in range(num_lines)]
        content = "\n".join(map(json.dumps, lines)).encode()
        client = self.client.with_options(api_key=key)
        file = await client.files.create(file=content, purpose="batch")
        return (await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")).id

    async def ended(self, batch_id: str) -> Any:
        while (batch := await self.client.batches.retrieve(batch_id)).status in (
            "validating",
            "in_progress",
            "finalizing",
            "cancelling",
        ):
            await asyncio.sleep(0.05)
        return batch

    def held_back(self) -> int:
        return self.front.client.fleet.outcomes["held_back"]


def body(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "temperature": 0}


@contextlib.asynccontextmanager
async def serving(
    model: Path, folder: Path, *, credit: int = 100, concurrency: int = 32, tenants: Tenants | None = None
) -> AsyncIterator[Ingress]:
    engine_args = {"max_model_len": 512, "scheduling_policy": "priority"}
    tiny = {"model": str(model), "simulated": {"profile": "a10g-llama-8b"}, "engine_args": engine_args}
    sections: dict[str, Any] = {"ingress": {"port": free_port()}, "protocol": {"credit": credit}}
    values = parse_settings({"models": {MODEL: tiny}, **sections})
    client = FleetClient(values, values.models[MODEL], ingress_id="ingress-1", token=b"", tls=None)
    grammars = GrammarCompiler()
    front = await front_end(values.models[MODEL], str(model), client, grammars)
    service = BatchService(BatchSettings(dir=folder / "store", concurrency=concurrency))
    app = IngressApp({MODEL: front}, AppLimits(2000), version={}, tenants=tenants, batches=service)
    runtime = IngressRuntime(app, Listener(app, values.ingress), {MODEL: front}, grammars, service)
    await runtime.listener.start()
    tasks = runtime.start()
    engine = FakeEngine(fingerprint=model_fingerprint(front.engine.model_config))
    replica: FakeReplica = await start_replica(values, "a", engine=engine)
    client.set_members([replica.lease])
    await until(lambda: client.fleet.replicas)
    try:
        async with openai.AsyncOpenAI(base_url=f"{values.ingress.local_url}/v1", api_key="none", max_retries=0) as official:
            yield Ingress(runtime, front, engine, official)
        await runtime.drain(10.0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await grammars.close()
        front.engine.shutdown()
        await replica.close()


@in_loop
async def test_lines_are_answered_behind_chats_in_the_engine(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress:
        batch_id = await ingress.begin(3)
        chat = asyncio.create_task(ingress.client.chat.completions.create(**body("a chat")))
        await until(lambda: len(ingress.engine.running) == 4)
        assert sorted(request.priority for request in ingress.engine.added) == [0, *[BACKGROUND_PRIORITY] * 3]
        ingress.engine.step(4)
        await chat
        batch = await ingress.ended(batch_id)
        assert batch.status == "completed"
        output = (await ingress.client.files.content(batch.output_file_id)).text.splitlines()
        assert [json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in output] == [4, 4, 4]


@in_loop
async def test_an_engine_with_less_room_than_lines_begins_those_of_two_tenants_by_weight(model: Path, tmp_path: Path) -> None:
    weights = {"red": 3, "blue": 1}
    named = {name: {"keys": [{"id": name, "sha256": digest(name)}], "weight": weight} for name, weight in weights.items()}
    tenants = of_file(tmp_path / "tenants.yaml", json.dumps({"tenants": named}))
    async with serving(model, tmp_path, concurrency=12, tenants=tenants) as ingress, asyncio.timeout(60.0):
        for name in weights:
            await ingress.begin(12, key=name)
        await until(lambda: len(ingress.engine.running) == 24)
        requests = ingress.front.client.fleet.requests.values()
        first = sorted(requests, key=lambda request: request.priority)[:16]
        assert Counter(request.tenant for request in first) == {"red": 12, "blue": 4}
        in_engine = sorted(request.priority for request in ingress.engine.added)
        assert in_engine == sorted(request.priority for request in requests)
        assert in_engine[0] >= BACKGROUND_PRIORITY


@in_loop
async def test_a_cancelled_batch_leaves_the_engine(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress:
        batch_id = await ingress.begin(3)
        await until(lambda: len(ingress.engine.running) == 3)
        await ingress.client.batches.cancel(batch_id)
        assert (await ingress.ended(batch_id)).status == "cancelled"
        await until(lambda: not ingress.engine.running)
        assert len(ingress.engine.aborted) == 3
        assert ingress.runtime.app.num_running == 0


@in_loop
async def test_a_stopping_ingress_gives_up_its_lines_and_not_its_chats(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress:
        await ingress.begin(3)
        chat = asyncio.create_task(ingress.client.chat.completions.create(**body("a chat")))
        await until(lambda: len(ingress.engine.running) == 4)
        stopping = asyncio.create_task(ingress.runtime.drain(30.0))
        await until(lambda: len(ingress.engine.aborted) == 3)
        ingress.engine.step(4)
        assert (await chat).choices[0].finish_reason == "length"
        await stopping


@in_loop
async def test_while_a_chat_waits_no_line_begins(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, credit=2) as ingress, asyncio.TaskGroup() as chats:
        for number in range(3):
            chats.create_task(ingress.client.chat.completions.create(**body(f"chat {number}")))
        await until(lambda: len(ingress.front.client.fleet.waiting) == 1)
        batch_id = await ingress.begin(4)
        await until(lambda: ingress.held_back() >= 4)
        assert len(ingress.front.client.fleet.waiting) == 1, "lines do not even wait"
        ingress.engine.step(4)
        await until(lambda: len(ingress.engine.added) >= 3)
        assert [request.priority for request in ingress.engine.added[:3]] == [0, 0, 0]
        while (batch := await ingress.client.batches.retrieve(batch_id)).status != "completed":
            ingress.engine.step(4)
            await asyncio.sleep(0.05)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 4, "failed": 0}


@in_loop
async def test_a_priority_of_a_client_changes_its_place_in_the_engine_and_nothing_at_the_ingress(
    model: Path, tmp_path: Path
) -> None:
    """The entry of a request marks it as a line of a batch, and no header can do that."""
    async with serving(model, tmp_path, credit=1) as ingress:
        url = f"{str(ingress.client.base_url).removesuffix('/v1/')}{CHAT}"
        async with httpx.AsyncClient(timeout=None) as http, asyncio.TaskGroup() as chats:
            by_header = chats.create_task(http.post(url, json=body("a"), headers={"x-vllm-priority": str(BACKGROUND_PRIORITY)}))
            by_body = chats.create_task(http.post(url, json=body("a") | {"priority": BACKGROUND_PRIORITY}))
            await until(lambda: len(ingress.front.client.fleet.waiting) == 1 and len(ingress.engine.added) == 1)
            assert ingress.held_back() == 0
            ingress.engine.step(4)
            await until(lambda: len(ingress.engine.added) == 2)
            assert [request.priority for request in ingress.engine.added] == [BACKGROUND_PRIORITY] * 2
            ingress.engine.step(4)
        assert [by_header.result().status_code, by_body.result().status_code] == [200, 200]
