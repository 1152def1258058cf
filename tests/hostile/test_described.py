"""No request made from docs/openapi.json makes an ingress fail; vLLM's front end, a fake engine, 500 requests over real connections.

`make hostile` sends 10,000 such requests to a fleet with simulated accelerators.
"""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.doubles.fleet import MODEL, in_loop, until
from tests.hostile.described import Request, described
from tests.hostile.server import WITHOUT, served

COUNT = 500
AT_ONCE = 20
MAX_ERROR_BYTES = 16 << 10


@pytest.mark.timeout(300)
@in_loop
async def test_no_request_of_the_description_makes_an_ingress_fail(tmp_path: Path) -> None:
    statuses: Counter[tuple[bool, int]] = Counter()
    failed = []
    made = described(COUNT, model=MODEL, without=WITHOUT)
    async with (
        served(tmp_path) as ingress,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.port}", timeout=30, verify=False) as http,
    ):
        for first in range(0, COUNT, AT_ONCE):
            some = made[first : first + AT_ONCE]
            for request, answer in zip(some, await asyncio.gather(*(send(http, request) for request in some)), strict=True):
                statuses[request.follows, answer.status_code] += 1
                if answer.status_code >= 500 or (answer.is_error and len(answer.content) > MAX_ERROR_BYTES):
                    failed.append(f"{request.name}: {answer.status_code} {answer.text[:200]}\n{request.body[:2000]!r}")
        plain = await http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 2})
        assert plain.status_code == 200
        await until(lambda: not ingress.engine.running and ingress.app.num_running == 0)
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "fill silences"] == []
    assert not failed, "\n".join(failed)
    assert sum(statuses.values()) == COUNT
    assert statuses[True, 200] > 50, statuses  # else the requests would test nothing but the checks at the door


async def send(http: httpx.AsyncClient, request: Request) -> httpx.Response:
    headers = {"content-type": request.content_type} if request.content_type else {}
    return await http.request(request.method, request.path, content=request.body, headers=headers)


def test_the_same_seed_makes_the_same_requests() -> None:
    assert described(60, model=MODEL) == described(60, model=MODEL)
