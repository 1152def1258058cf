"""Requests of batches share the places of an ingress."""

import asyncio

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve_app.batch.in_process import InProcess
from serve_app.batch.records import Owner
from tests.doubles.fleet import in_loop


@in_loop
async def test_a_batch_that_asks_for_much_at_once_queues_no_more_than_another() -> None:
    """Two places. One batch has eight requests, of which two may queue at once; the other batch's two come later, and are not last."""
    served: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        await asyncio.sleep(0)
        served.append(owner.tenant)
        await JSONResponse({})(scope, receive, send)

    places, loop = asyncio.Semaphore(2), asyncio.get_running_loop()

    def client(tenant: str) -> httpx.AsyncClient:
        own = asyncio.Semaphore(2)
        transport = InProcess(answer, loop, owner=Owner(tenant, "key"), places=places, own=own, timeout_s=60.0)
        return httpx.AsyncClient(transport=transport, base_url="http://ingress")

    async with client("large") as large, client("small") as small, asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(large.post("/v1/completions", json={}))
        await asyncio.sleep(0)
        for _ in range(2):
            tasks.create_task(small.post("/v1/completions", json={}))
    assert len(served) == 10
    assert max(index for index, owner in enumerate(served) if owner == "small") < 7
