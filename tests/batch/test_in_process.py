"""A batch asks the ingress by its own transport."""

import asyncio

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve_app.batch.in_process import InProcess
from serve_app.batch.records import Owner
from tests.doubles.fleet import in_loop


@in_loop
async def test_a_batch_asks_no_more_at_once_than_its_concurrency() -> None:
    num_running, at_once = 0, list[int]()

    async def answer(scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        nonlocal num_running
        num_running += 1
        at_once.append(num_running)
        await asyncio.sleep(0)
        num_running -= 1
        await JSONResponse({})(scope, receive, send)

    transport = InProcess(answer, asyncio.get_running_loop(), owner=Owner("red", "key"), concurrency=2, timeout_s=60.0)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client, asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(client.post("/v1/completions", json={}))
    assert (len(at_once), max(at_once)) == (8, 2)
