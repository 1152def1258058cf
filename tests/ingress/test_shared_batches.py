"""Two ingresses share one PostgreSQL server and one object store, with the official client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.batch.postgres_server import PASSWORD, PostgresServer, database_url, postgres
from tests.batch.s3_server import CREDENTIALS, s3_url
from tests.doubles.fleet import in_loop, until
from tests.ingress.batch_serving import KEYS, Model, Served, answers, begin, counts, ended, jsonl, line, serving

__all__ = ["database_url", "postgres", "s3_url"]


class Gated(Model):
    """Answers a prompt of ``gated`` only once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.gated = asyncio.Event(), set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await receive()
        prompt = json.loads(body["body"])["messages"][-1]["content"]
        if prompt in self.gated:
            await self.gate.wait()

        async def again() -> Message:
            return body

        await super().__call__(scope, again, send)


def num_answered(models: Iterable[Model]) -> int:
    """Return how many answers the models have given. `Gated` counts a prompt only once its gate is open."""
    return sum(model.asked.total() for model in models)


@contextlib.asynccontextmanager
async def two(
    folder: Path, url: str, files: str, *, keys: bool = False, model: Callable[[], Model] = Model
) -> AsyncIterator[tuple[Served, Served]]:
    """Run two ingresses with models of their own."""
    (folder / "url").write_text(url)
    shared: dict[str, Any] = {"database_file": folder / "url", "files": files}
    async with contextlib.AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(serving(folder, keys=keys, model=model(), **shared)) for _ in range(2)]
        yield one, other


@in_loop
async def test_what_one_ingress_takes_any_ingress_answers(
    tmp_path: Path, database_url: str, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(tmp_path, database_url, s3_url, keys=True) as (one, other):
        content = jsonl(*map(line, range(40)))
        file = await one.client().files.create(file=("in.jsonl", content), purpose="batch")
        assert (await other.client().files.content(file.id)).content == content
        stranger = other.client(KEYS[1])
        batch = await other.client().batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        for asked in (stranger.files.retrieve(file.id), stranger.files.content(file.id), stranger.batches.retrieve(batch.id)):
            with pytest.raises(openai.NotFoundError):
                await asked
        batch = await ended(one.client(), batch)
        assert (batch.status, counts(batch)) == ("completed", (40, 40, 0))
        for served in (one, other):
            assert await answers(served.client(), batch) == [(f"id-{i}", f"PROMPT {i}") for i in range(40)]
        assert sorted((one.model.asked + other.model.asked).values()) == [1] * 40, "one of them ran it"
        assert (await other.client().files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await one.client().files.content(file.id)
    for secret in (PASSWORD, PASSWORD.replace("/", "%2F"), *CREDENTIALS.values()):
        assert secret == "true" or secret not in caplog.text


def with_gate(models: list[Gated]) -> Model:
    """Return one more of ``models``, which answers the prompts 20 to 39 only once its gate is open."""
    models.append(Gated())
    models[-1].gated = {f"prompt {number}" for number in range(20, 40)}
    return models[-1]


@in_loop
async def test_a_database_that_is_away_costs_no_line_of_a_running_batch(
    tmp_path: Path, database_url: str, postgres: PostgresServer
) -> None:
    models: list[Gated] = []
    async with two(tmp_path, database_url, f"file://{tmp_path}/files", model=partial(with_gate, models)) as (one, other):
        batch = await begin(one.client(), jsonl(*map(line, range(40))))
        await until(lambda: len(one.model.asked + other.model.asked) == 20)
        await asyncio.to_thread(postgres.stop)
        try:
            for client in (one.client(), other.client()):
                with pytest.raises(openai.InternalServerError) as away:
                    await client.batches.retrieve(batch.id)
                assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "5")
                assert "the storage of files and batches does not answer; nothing is lost; retry in 5 s" in str(away.value)
            for model in models:
                model.gate.set()
            await until(lambda: len(one.model.asked + other.model.asked) == 40)
        finally:
            await asyncio.to_thread(postgres.start)
        batch = await ended(other.client(), batch)
        assert (batch.status, counts(batch)) == ("completed", (40, 40, 0))
        assert await answers(one.client(), batch) == [(f"id-{i}", f"PROMPT {i}") for i in range(40)]
        assert sorted((one.model.asked + other.model.asked).values()) == [1] * 40, "no answer was lost"


@in_loop
async def test_a_database_that_takes_no_writes_costs_no_line_of_two_running_batches(
    tmp_path: Path, database_url: str, postgres: PostgresServer
) -> None:
    models: list[Gated] = []
    async with two(tmp_path, database_url, f"file://{tmp_path}/files", keys=True, model=partial(with_gate, models)) as (one, _):
        clients = [one.client(key) for key in KEYS]
        batches = [await begin(client, jsonl(*map(line, range(40)))) for client in clients]
        await until(lambda: num_answered(models) == 2 * 20)
        await asyncio.to_thread(postgres.take_no_writes)
        try:
            for client, batch in zip(clients, batches, strict=True):
                assert (await client.batches.retrieve(batch.id)).status == "in_progress"
                with pytest.raises(openai.InternalServerError) as away:
                    await client.files.create(file=("in.jsonl", jsonl(line(0))), purpose="batch")
                assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "5")
            for model in models:
                model.gate.set()
            await until(lambda: num_answered(models) == 2 * 40)
        finally:
            await asyncio.to_thread(postgres.take_writes)
        for client, batch in zip(clients, batches, strict=True):
            batch = await ended(client, batch)
            assert (batch.status, counts(batch)) == ("completed", (40, 40, 0))
            assert await answers(client, batch) == [(f"id-{i}", f"PROMPT {i}") for i in range(40)]
        assert num_answered(models) == 2 * 40, "no answer was lost"
