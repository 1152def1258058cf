"""Files and batches belong to a tenant, whose keys may change; a batch runs as long as the key by which it was made is valid."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from serve_app.batch.records import Batch, Owner
from tests.doubles.fleet import in_loop
from tests.ingress.batch_serving import Model, answers, begin, ended, errors, jsonl, line, serving
from tests.ingress.tenants import digest, of_file

OLD, NEW, OTHER, CHATS = "sk-the-old-key-of-red", "sk-the-new-key-of-red", "sk-the-key-of-blue", "sk-of-red-for-models-alone"


def file_of(*, old: dict[str, Any] | None = None, **more: Any) -> str:
    """Return a file of two tenants. ``old`` changes red's old key, and ``more`` the tenant red."""
    red = [
        {"id": "old", "sha256": digest(OLD)} | (old or {}),
        {"id": "new", "sha256": digest(NEW)},
        {"id": "chats", "sha256": digest(CHATS), "scopes": ["infer"]},
    ]
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
        assert [each async for each in other.batches.list()] == []
        assert [each async for each in other.files.list()] == []
        for call in (
            other.files.content(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
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
        assert served.app.knows_owner(Owner(name, ""))
        assert not served.app.knows_owner(Owner(name, "another"))


def test_a_record_of_an_older_release_has_no_key() -> None:
    batch = Batch("batch_1", "owner", "file-1", "/v1/completions", "24h", 1000, 87400, 3600, key="k1")
    fields = msgspec.json.decode(msgspec.json.encode(batch))
    del fields["key"]
    assert msgspec.json.decode(msgspec.json.encode(fields), type=Batch) == replace(batch, key="")
