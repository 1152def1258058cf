"""Files and batches belong to a tenant, whose keys may change; a batch runs as long as the key by which it was made is valid."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Batch

from serve_app.batch import worker
from serve_app.batch.claims import FolderClaims
from serve_app.batch.records import Batch as Record
from serve_app.batch.records import Owner
from tests.doubles.fleet import in_loop
from tests.ingress.batch_serving import Model, Served, answers, assert_hidden, begin, ended, errors, jsonl, line, serving
from tests.ingress.tenants import digest, of_file

OLD, NEW, OTHER, CHATS = "sk-the-old-key-of-red", "sk-the-new-key-of-red", "sk-the-key-of-blue", "sk-of-red-for-models-alone"


def file_of(*, old: dict[str, Any] | None = None, has_old: bool = True, **more: Any) -> str:
    """Return a file of two tenants. ``old`` changes red's old key, and ``more`` the tenant red."""
    red = [{"id": "new", "sha256": digest(NEW)}, {"id": "chats", "sha256": digest(CHATS), "scopes": ["infer"]}]
    if has_old:
        red.append({"id": "old", "sha256": digest(OLD)} | (old or {}))
    return json.dumps({"tenants": {"red": {"keys": red, **more}, "blue": {"keys": [{"id": "blue", "sha256": digest(OTHER)}]}}})


def change(path: Path, text: str) -> None:
    path.with_name("next").write_text(text)
    os.replace(path.with_name("next"), path)


@in_loop
async def test_a_new_key_finds_what_the_old_one_has_made_and_another_tenant_does_not(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", file_of())
    async with serving(tmp_path, tenants=tenants) as served:
        old, new, other = (served.client(key) for key in (OLD, NEW, OTHER))
        batch = await ended(old, await begin(old, jsonl(line(1))))
        assert await answers(new, await new.batches.retrieve(batch.id)) == [("id-1", "PROMPT 1")]
        assert [each.id async for each in new.batches.list()] == [batch.id]
        await assert_hidden(other, batch)
        with pytest.raises(openai.PermissionDeniedError, match="lacks the scope 'batch'"):
            await served.client(CHATS).batches.retrieve(batch.id)


@pytest.mark.parametrize("end", [{"revoked": "2027-01-14"}, {"expires": "2027-01-14"}, {"scopes": ["infer"]}])
@in_loop
async def test_a_key_that_is_not_valid_any_more_ends_its_batches_alone(end: dict[str, Any], tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "tenants.yaml"
    model.held = lambda prompt: prompt == "held"
    async with serving(tmp_path, tenants=of_file(path, file_of()), model=model, concurrency=1) as served:
        old, new = served.client(OLD), served.client(NEW)
        ending = await begin(old, jsonl(line(1, "held"), *(line(number) for number in range(2, 6))))
        waiting = await begin(new, jsonl(line(1, "later")))
        while not model.asked["held"]:
            await asyncio.sleep(0.01)
        change(path, file_of(old=end))
        ended_batch = await ended(new, ending)
        assert (ended_batch.status, model.asked.total() - model.asked["later"]) == ("cancelled", 1)
        assert (await ended(new, waiting)).status == "completed"


@contextlib.asynccontextmanager
async def running_batches(folder: Path) -> AsyncIterator[tuple[Served, Batch, Batch]]:
    """Serve a batch of red's old key whose first line is asked again and again, and one that waits for the first batch's end."""
    model = Model()
    model.statuses["busy"] = [503] * 10_000
    async with serving(folder, tenants=of_file(folder / "tenants.yaml", file_of()), model=model, concurrency=1) as served:
        running = await begin(served.client(OLD), jsonl(line(1, "busy"), line(2), line(3)))
        waiting = await begin(served.client(OLD), jsonl(line(1, "later")))
        while not model.asked["busy"]:
            await asyncio.sleep(0.01)
        yield served, running, waiting


async def stopped(caplog: pytest.LogCaptureFixture, batch: Batch) -> None:
    """Return when the job of the batch has stopped because its key is refused."""
    while not any(f"{batch.id} stops: " in record.getMessage() for record in caplog.records):
        await asyncio.sleep(0.01)


@in_loop
async def test_batches_wait_while_their_key_is_not_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingress that ran a batch, or that took it from a client, may have read a newer file than this one."""
    monkeypatch.setattr(worker, "_LOOK_S", 0.05)
    async with running_batches(tmp_path) as (served, running, waiting):
        change(tmp_path / "tenants.yaml", file_of(has_old=False))
        await stopped(caplog, running)
        served.model.statuses.clear()
        asked = served.model.asked.total()
        await asyncio.sleep(0.5)
        new = served.client(NEW)
        for each in (running, waiting):
            assert (await new.batches.retrieve(each.id)).status in ("validating", "in_progress")
        assert served.model.asked.total() == asked
        change(tmp_path / "tenants.yaml", file_of())
        assert await answers(new, await ended(new, running)) == [("id-1", "BUSY"), ("id-2", "PROMPT 2"), ("id-3", "PROMPT 3")]
        assert await answers(new, await ended(new, waiting)) == [("id-1", "LATER")]


@pytest.mark.parametrize("text", [file_of(has_old=False), file_of(old={"revoked": "2027-01-14"})], ids=["removed", "revoked"])
@in_loop
async def test_lines_without_an_answer_fail_by_the_end_of_their_batch_and_not_by_401(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_UNKNOWN_S", 0.1)
    async with running_batches(tmp_path) as (served, running, waiting):
        change(tmp_path / "tenants.yaml", text)
        new = served.client(NEW)
        for batch, lines in ((running, ["id-1", "id-2", "id-3"]), (waiting, ["id-1"])):
            found = await ended(new, batch)
            assert found.status == "cancelled"
            if found.error_file_id is not None:  # a batch that was not validated has none
                assert await errors(new, found) == [(each, "batch_cancelled") for each in lines]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.name == worker.__name__]


@in_loop
async def test_no_ingress_cancels_a_batch_that_another_one_runs_by_a_key_unknown_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[str] = set()
    monkeypatch.setattr(FolderClaims, "taken", lambda _: taken)
    monkeypatch.setattr(worker, "_UNKNOWN_S", 0.0)
    monkeypatch.setattr(worker, "_LOOK_S", 0.05)
    async with running_batches(tmp_path) as (served, running, _):
        taken.add(running.id)
        change(tmp_path / "tenants.yaml", file_of(has_old=False))
        await stopped(caplog, running)
        await asyncio.sleep(0.5)
        assert (await served.client(NEW).batches.retrieve(running.id)).status == "in_progress"
        taken.clear()
        assert (await ended(served.client(NEW), running)).status == "cancelled"


@in_loop
async def test_lines_have_the_rights_and_limits_of_the_tenant(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", file_of(limits={"max_tokens": 5}))
    async with serving(tmp_path, tenants=tenants) as served:
        lines = [line(1), line(2)]
        lines[1]["body"]["max_tokens"] = 6
        batch = await ended(served.client(OLD), await begin(served.client(OLD), jsonl(*lines)))
        assert await answers(served.client(OLD), batch) == [("id-1", "PROMPT 1")]
        assert [name for name, _ in await errors(served.client(OLD), batch)] == ["id-2"]
    tenants = of_file(tmp_path / "tenants.yaml", file_of(models=["another"]))
    async with serving(tmp_path, tenants=tenants) as served:
        batch = await ended(served.client(OLD), await begin(served.client(OLD), jsonl(line(3))))
        assert batch.output_file_id is None
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [each.message for each in batch.errors.data or ()] == ["The model 'tiny' does not exist; served here: none."]
        assert served.model.asked["prompt 3"] == 0


@in_loop
async def test_what_a_key_of_a_file_of_keys_has_made_belongs_to_the_tenant_of_its_name(tmp_path: Path) -> None:
    """Records of an older release know the first 12 digits of the key's digest, and no id of a key."""
    key = "first-key-of-a-client"
    async with serving(tmp_path, keys=True) as served:
        batch = await ended(served.client(key), await begin(served.client(key), jsonl(line(1))))
    name = digest(key)[:12]
    text = json.dumps({"tenants": {name: {"keys": [{"id": "moved", "sha256": digest(key)}]}}})
    async with serving(tmp_path, tenants=of_file(tmp_path / "tenants.yaml", text)) as served:
        assert await answers(served.client(key), await served.client(key).batches.retrieve(batch.id)) == [("id-1", "PROMPT 1")]
        assert served.app.state_of_key(Owner(name, "")) == "valid"
        assert served.app.state_of_key(Owner(name, "another")) == "unknown"


def test_a_record_of_an_older_release_has_no_key() -> None:
    batch = Record("batch_1", "owner", "file-1", "/v1/completions", "24h", 1000, 87400, 3600, key="k1")
    fields = msgspec.json.decode(msgspec.json.encode(batch))
    del fields["key"]
    assert msgspec.json.decode(msgspec.json.encode(fields), type=Record) == replace(batch, key="")
