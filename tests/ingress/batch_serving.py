"""This module serves an ingress with batches, whose model answers in capitals, to OpenAI's official client."""

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve_app.batch.service import BatchService
from serve_app.config import BatchSettings, IngressSettings
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.ingress.fake_fronts import front
from tests.ingress.tenants import of_keys
from tests.ports import free_port

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
KEYS = "first-key-of-a-client", "second-key-of-a-client"
Line = dict[str, Any]


class Model:
    """Answers a chat with its prompt in capitals; ``held`` prompts get no answer.

    ``statuses`` are those of the next answers, and ``raised`` is raised in place of the next answer, by prompt.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.held: Callable[[str], bool] = lambda prompt: False
        self.statuses: dict[str, list[int]] = {}
        self.raised: dict[str, BaseException] = {}
        self.num_running = self.most_running = self.num_gone = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt = json.loads((await receive())["body"])["messages"][-1]["content"]
        self.asked[prompt] += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.held(prompt):
                assert (await receive())["type"] == "http.disconnect"
                self.num_gone += 1
                return
            await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        if error := self.raised.pop(prompt, None):
            raise error
        status = statuses.pop(0) if (statuses := self.statuses.get(prompt)) else 200
        answer: dict[str, Any] = {"id": "1", "choices": [{"message": {"content": prompt.upper()}}]}
        headers = {"retry-after": "0"} if status == 503 else None
        await JSONResponse(answer if status == 200 else {"error": {"message": f"no: {status}"}}, status, headers)(
            scope, receive, send
        )


@dataclass
class Served:
    model: Model
    folder: Path
    url: str
    app: IngressApp
    service: BatchService
    clients: dict[str, openai.AsyncOpenAI] = field(default_factory=dict)

    def client(self, key: str = KEYS[0]) -> openai.AsyncOpenAI:
        if key not in self.clients:
            self.clients[key] = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self.clients[key]

    def parts(self) -> list[str]:
        """Return what is half written, or is a file without a record."""
        return [path.name for path in (self.folder / "work").iterdir() if path.suffix == ".part"]


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    keys: bool = False,
    tenants: Tenants | None = None,
    model: Model | None = None,
    max_body_bytes: int = 4000,
    **limits: Any,
) -> AsyncIterator[Served]:
    model = model or Model()
    (folder / "keys").write_text("\n".join(KEYS))
    storage = {} if "database_file" in limits else {"dir": folder / "store"}
    service = BatchService(BatchSettings(**storage, **limits))
    known = of_keys(folder / "keys") if keys else tenants
    app = IngressApp({"tiny": front("tiny", model)}, AppLimits(max_body_bytes), version={}, tenants=known, batches=service)
    settings = IngressSettings(port=free_port())
    listener = Listener(app, settings)
    await listener.start()
    watching = None if known is None else asyncio.create_task(known.watch())
    service.start(app.answer_line, app.models_of, app.problem_of_line, state_of_key=app.state_of_key)
    served = Served(model, folder / "store", settings.local_url, app, service)
    try:
        yield served
    finally:
        if watching is not None:
            watching.cancel()
        for client in served.clients.values():
            await client.close()
        await service.stop()
        await listener.stop()
        service.close()


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow above it, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def line(number: int, prompt: str = "", **changes: Any) -> Line:
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt or f"prompt {number}"}]}
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(*lines: Line) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def begin(client: openai.AsyncOpenAI, content: bytes, *, window: Any = "24h", **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window, **fields)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Line]:
    assert file_id is not None
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def answers(client: openai.AsyncOpenAI, batch: Batch) -> list[tuple[str, str]]:
    found = await lines_of(client, batch.output_file_id)
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"]) for line in found]


async def errors(client: openai.AsyncOpenAI, batch: Batch) -> list[tuple[str, str]]:
    return [(line["custom_id"], line["error"]["code"]) for line in await lines_of(client, batch.error_file_id)]


async def assert_hidden(client: openai.AsyncOpenAI, batch: Batch) -> None:
    """Check that for the client neither the batch, which has ended, nor its files exist."""
    assert batch.output_file_id is not None
    for call in (
        client.files.retrieve(batch.output_file_id),
        client.files.content(batch.input_file_id),
        client.files.delete(batch.input_file_id),
        client.batches.retrieve(batch.id),
        client.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert [batch async for batch in client.batches.list()] == []
    assert [file async for file in client.files.list()] == []


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed
