"""Two ingresses over one PostgreSQL server and one object store, with the official client."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from serve_app.testing.fleet import in_loop, until
from tests.batch.postgres_server import PASSWORD, PostgresServer, database_url, postgres
from tests.batch.s3_server import CREDENTIALS, s3_url
from tests.ingress.test_batches import KEYS, Model, Served, answers, begin, counts, ended, jsonl, line, serving

__all__ = ["database_url", "postgres", "s3_url"]


@contextlib.asynccontextmanager
async def two(folder: Path, url: str, files: str, *, keys: bool = False) -> AsyncIterator[tuple[Served, Served]]:
    """Run two ingresses with models of their own."""
    (folder / "url").write_text(url)
    shared = {"database_file": folder / "url", "files": files}
    async with contextlib.AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(serving(folder, keys=keys, model=Model(), **shared)) for _ in range(2)]
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


@in_loop
async def test_a_database_that_is_away_costs_no_line_of_a_running_batch(
    tmp_path: Path, database_url: str, postgres: PostgresServer
) -> None:
    async with two(tmp_path, database_url, f"file://{tmp_path}/files") as (one, other):
        for served in (one, other):
            served.model.held = lambda prompt: prompt == "prompt 39"
        batch = await begin(one.client(), jsonl(*map(line, range(40))))
        asked = Counter[str]()

        def all_were_asked() -> bool:
            return len(one.model.asked + other.model.asked) == 40

        await until(all_were_asked)
        runner, waiter = (one, other) if one.model.asked else (other, one)
        await asyncio.to_thread(postgres.stop)
        try:
            for client in (runner.client(), waiter.client()):
                with pytest.raises(openai.InternalServerError) as away:
                    await client.batches.retrieve(batch.id)
                assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "5")
                assert "the storage of files and batches does not answer; nothing is lost; retry in 5 s" in str(away.value)
        finally:
            await asyncio.to_thread(postgres.start)
        assert (await runner.client().batches.retrieve(batch.id)).status == "in_progress"
        assert runner.model.num_running == 1, "its request goes on"
        asked.update(runner.model.asked)
        batch = await runner.client().batches.cancel(batch.id)
        batch = await ended(waiter.client(), batch)
        assert (batch.status, counts(batch)) == ("cancelled", (40, 39, 1))
        assert len(await answers(waiter.client(), batch)) == 39
        assert (max(asked.values()), waiter.model.asked) == (1, Counter())
