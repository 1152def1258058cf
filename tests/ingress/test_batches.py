"""Batches run and end, belong to a key, and are refused if wrong: OpenAI's Batches API with the official client."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from serve_app.batch import worker
from serve_app.ingress.http import body_fields
from tests.doubles.fleet import in_loop
from tests.ingress.batch_serving import (
    CHAT,
    KEYS,
    Line,
    Model,
    answers,
    assert_hidden,
    begin,
    counts,
    ended,
    errors,
    file_size_limit,
    jsonl,
    line,
    lines_of,
    serving,
)
from tests.ingress.fake_fronts import get, ingress


@in_loop
async def test_the_official_client_uploads_runs_and_reads_a_batch(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = served.client()
        served.model.statuses = {"prompt 3": [400], "prompt 5": [503, 503]}
        content = jsonl(*map(line, range(40)))
        file = await client.files.create(file=("my lines.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose, file.object) == ("my lines.jsonl", len(content), "batch", "file")
        assert (await client.files.content(file.id)).content == content
        metadata = {"of": "Monday"}
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata)
        assert (batch.status, batch.metadata, batch.object) == ("validating", metadata, "batch")
        assert batch.expires_at == batch.created_at + 86400
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert counts(batch) == (40, 39, 1)
        assert await answers(client, batch) == [(f"id-{i}", f"PROMPT {i}") for i in range(40) if i != 3]
        (failed,) = await lines_of(client, batch.error_file_id)
        assert (failed["custom_id"], failed["error"]) == ("id-3", {"code": "request_failed", "message": "no: 400"})
        assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["message"]) == (400, "no: 400")
        assert served.model.asked["prompt 5"] == 3, "a full fleet is asked again"
        assert batch.in_progress_at is not None
        assert batch.completed_at is not None
        assert (batch.cancelled_at, batch.expired_at, batch.errors) == (None, None, None)
        listed = {f.id: f.purpose async for f in client.files.list()}
        assert listed == {file.id: "batch", batch.output_file_id: "batch_output", batch.error_file_id: "batch_output"}
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match="no such File object"):
            await client.files.content(file.id)
        assert sorted(path.name for path in (served.folder / "files").iterdir()) == sorted(listed.keys() - {file.id})
        assert list((served.folder / "work").iterdir()) == []


@in_loop
async def test_what_is_another_keys_does_not_exist(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=True) as served:
        owner, other = served.client(KEYS[0]), served.client(KEYS[1])
        batch = await ended(owner, await begin(owner, jsonl(line(1))))
        await assert_hidden(other, batch)
        with pytest.raises(openai.BadRequestError, match="is not a file with the purpose 'batch'"):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="is not among your batches"):
            await other.batches.list(after=batch.id)
        with pytest.raises(openai.AuthenticationError):
            await served.client("another key").files.list()
        assert (await owner.batches.retrieve(batch.id)).status == "completed"


@in_loop
async def test_pages_follow_each_other_the_newest_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = served.client()
        made = [(await begin(client, jsonl(line(1)))).id for _ in range(5)]
        page = await client.batches.list(limit=2)
        assert ([b.id for b in page.data], page.has_more) == (made[:2:-1], True)
        assert [b.id async for b in client.batches.list(limit=2)] == made[::-1], "the client follows them by itself"
        files = [f.id async for f in client.files.list(limit=3, order="asc", purpose="batch")]
        assert files == [f.id async for f in client.files.list(purpose="batch")][::-1]
        assert len(files) == 5


BROKEN = [
    (b"{", "invalid_json_line", None),
    (b'"a text"', "invalid_json_line", None),
    (b"\xff", "invalid_json_line", None),
    (jsonl(line(1)), "", None),
    (jsonl(line(1)), "duplicate_custom_id", "custom_id"),
    (jsonl(line(2, custom_id=7)), "missing_required_parameter", "custom_id"),
    (jsonl(line(3, body=None)), "missing_required_parameter", "body"),
    (jsonl(line(4, method="GET")), "invalid_line", None),
    (jsonl(line(5, url="/v1/completions")), "mismatched_endpoint", "url"),
    (jsonl(line(6, body={"model": "big"})), "model_not_found", "body.model"),
    (jsonl(line(7, body={"model": "tiny", "stream": True})), "invalid_line", None),
    (jsonl(line(2, custom_id="\ud800")), "invalid_line", None),
    (jsonl(line(8, "x" * 4000)), "invalid_line", None),
]


@in_loop
async def test_an_input_is_refused_with_the_number_and_the_problem_of_each_wrong_line(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = served.client()
        batch = await ended(client, await begin(client, b"\n".join(text.rstrip() for text, *_ in BROKEN)))
        assert (batch.status, batch.output_file_id, counts(batch)) == ("failed", None, (0, 0, 0))
        assert batch.errors is not None
        found = [(error.line, error.code, error.param) for error in batch.errors.data or ()]
        assert found == [(number, code, param) for number, (_, code, param) in enumerate(BROKEN, 1) if code]
        assert all(error.message for error in batch.errors.data or ())
        assert not served.model.asked, "nothing of it is asked"


@in_loop
async def test_a_line_of_too_many_values_is_refused_as_a_body_over_http_is_and_never_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_fields, "MAX_VALUES", 1)  # so that twice the context counts, which is 2048 here
    async with serving(tmp_path, max_body_bytes=1 << 20) as served:
        wrong = b"[" + b"1," * 5000 + b"1"  # has no end, which only a parser notices
        batch = await ended(served.client(), await begin(served.client(), jsonl(line(1)) + wrong))
        found = [(error.line, error.code, error.message) for error in (batch.errors and batch.errors.data) or ()]
        assert found == [(2, "invalid_line", "The line holds 5000 values, limit 4096; divide it.")]


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"\n\n", "empty_file"), (jsonl(*map(line, range(6))), "too_many_lines")]
)
@in_loop
async def test_an_input_of_no_lines_or_of_too_many_is_refused(tmp_path: Path, content: bytes, code: str) -> None:
    async with serving(tmp_path, max_lines=5) as served:
        batch = await ended(served.client(), await begin(served.client(), content))
        assert [error.code for error in (batch.errors and batch.errors.data) or ()] == [code]


@in_loop
async def test_a_cancelled_batch_keeps_what_was_answered_and_stops_what_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client, model = served.client(), served.model
        model.held = lambda prompt: prompt not in ("prompt 0", "prompt 1")
        batch = await begin(client, jsonl(*map(line, range(100))))
        while counts(await client.batches.retrieve(batch.id))[1] < 2:
            await asyncio.sleep(0.05)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, counts(batch)) == ("cancelled", (100, 2, 98))
        assert await answers(client, batch) == [("id-0", "PROMPT 0"), ("id-1", "PROMPT 1")]
        assert await errors(client, batch) == [(f"id-{i}", "batch_cancelled") for i in range(2, 100)]
        assert model.num_running == 0
        assert model.num_gone > 0, "the model saw that its client had gone"
        with pytest.raises(openai.BadRequestError, match="is cancelled, and cannot be cancelled any more"):
            await client.batches.cancel(batch.id)


@in_loop
async def test_at_the_end_of_its_window_a_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = served.client()
        served.model.held = lambda prompt: prompt == "prompt 1"
        batch = await ended(client, await begin(client, jsonl(*map(line, range(3))), window="2s"))
        assert (batch.status, counts(batch)) == ("expired", (3, 2, 1))
        assert await answers(client, batch) == [("id-0", "PROMPT 0"), ("id-2", "PROMPT 2")]
        assert await errors(client, batch) == [("id-1", "batch_expired")]
        assert batch.expired_at is not None
        assert batch.expired_at >= (batch.expires_at or 0)


@in_loop
async def test_a_line_that_the_ingress_cancels_is_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.model.raised = {"prompt 1": asyncio.CancelledError()}
        batch = await ended(served.client(), await begin(served.client(), jsonl(*map(line, range(3)))))
        assert (batch.status, counts(batch)) == ("completed", (3, 3, 0))
        assert served.model.asked == {"prompt 0": 1, "prompt 1": 2, "prompt 2": 1}


@in_loop
async def test_a_line_that_raises_inside_the_server_is_tried_again_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as served:
        served.model.raised = {"prompt 1": RuntimeError("a bug")}
        batch = await ended(served.client(), await begin(served.client(), jsonl(*map(line, range(3)))))
        assert (batch.status, counts(batch)) == ("completed", (3, 3, 0))
        assert served.model.asked == {"prompt 0": 1, "prompt 1": 2, "prompt 2": 1}
        assert "could not continue" not in caplog.text


@in_loop
async def test_no_more_requests_than_allowed_run_at_once_whatever_the_number_of_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=True, concurrency=3) as served:
        clients = [served.client(key) for key in KEYS]
        made = [(client, await begin(client, jsonl(*map(line, range(30))))) for client in clients]
        for client, batch in made:
            assert (await ended(client, batch)).status == "completed"
        assert served.model.most_running == 3


@in_loop
async def test_a_removed_key_ends_its_batches_after_a_time_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_UNKNOWN_S", 0.5)
    model = Model()
    model.held = lambda prompt: prompt != "prompt 0"
    async with serving(tmp_path, keys=True, model=model, concurrency=8) as served:
        made = [(key, await begin(served.client(key), jsonl(*map(line, range(3))))) for key in KEYS[:2]]
        for key, batch in made:
            while counts(await served.client(key).batches.retrieve(batch.id))[1] < 1:
                await asyncio.sleep(0.05)
        (tmp_path / "keys").write_text(KEYS[0])
        (_, kept), (removed_key, removed) = made
        store = served.service._storage.store
        while removed.id in {batch.id for batch in store.open_batches()}:
            await asyncio.sleep(0.05)
        with pytest.raises(openai.AuthenticationError):
            await served.client(removed_key).batches.retrieve(removed.id)
        assert (await served.client().batches.retrieve(kept.id)).status == "in_progress"


@in_loop
async def test_another_ingress_on_the_folder_waits_for_the_first_and_then_continues(tmp_path: Path) -> None:
    first, second = Model(), Model()
    first.held = lambda prompt: prompt != "prompt 0"
    async with serving(tmp_path, model=first, concurrency=4) as old, serving(tmp_path, model=second) as new:
        batch = await begin(new.client(), jsonl(*map(line, range(20))))
        while counts(await new.client().batches.retrieve(batch.id))[1] < 1:
            await asyncio.sleep(0.05)
        assert not second.asked
        await old.service.stop()
        batch = await ended(new.client(), batch)
        assert counts(batch) == (20, 20, 0)
        assert await answers(new.client(), batch) == [(f"id-{i}", f"PROMPT {i}") for i in range(20)]
        assert second.asked == Counter(f"prompt {i}" for i in range(1, 20)), "what the first one had answered is not asked again"


@in_loop
async def test_a_batch_whose_disk_is_full_continues_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_AGAIN_S", 0.2)
    async with serving(tmp_path) as served:
        client = served.client()
        prompts = [f"{i} " + "x" * 2000 for i in range(100)]
        with file_size_limit(220_000):
            batch = await begin(client, jsonl(*(line(i, prompt) for i, prompt in enumerate(prompts))))
            while sum(served.model.asked.values()) < 100 or (await client.batches.retrieve(batch.id)).status != "in_progress":
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # some more tries, which fail alike
            assert (await client.batches.retrieve(batch.id)).status in ("in_progress", "finalizing")
        assert "could not continue; it is tried again in 0.2 s" in caplog.text
        batch = await ended(client, batch)
        assert (batch.status, counts(batch)) == ("completed", (100, 100, 0))
        assert await answers(client, batch) == [(f"id-{i}", prompt.upper()) for i, prompt in enumerate(prompts)]


@in_loop
async def test_a_file_that_an_open_batch_reads_is_not_deleted_and_open_batches_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, max_open_batches=2) as served:
        client = served.client()
        served.model.held = lambda prompt: True
        batch = await begin(client, jsonl(line(1)))
        with pytest.raises(openai.BadRequestError, match=f"is the input of {batch.id}, which has not ended; cancel"):
            await client.files.delete(batch.input_file_id)
        await begin(client, jsonl(line(1)))
        with pytest.raises(openai.RateLimitError, match="2 batches are open, limit 2"):
            await begin(client, jsonl(line(1)))
        await client.batches.cancel(batch.id)
        await ended(client, batch)
        await client.files.delete(batch.input_file_id)
        await begin(client, jsonl(line(1)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"completion_window": "soon"}, "completion_window: is 'soon'; give a time such as 24h"),
        ({"completion_window": "8d"}, "completion_window: is 8d, which is 691200 s, limit 604800 s"),
        ({"completion_window": 24}, "completion_window: is '24'"),
        ({"endpoint": "/v1/responses"}, "endpoint: is '/v1/responses', none of /v1/chat/completions"),
        ({"input_file_id": "file-none"}, "input_file_id: 'file-none' is not a file with the purpose 'batch'"),
        ({"input_file_id": "\ud800"}, "input_file_id: '\\ud800' is not a file with the purpose 'batch'"),
        ({"input_file_id": None}, "input_file_id: is missing"),
        ({"metadata": {"a": 1}}, "metadata.a: is not a Unicode text"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: is not a Unicode text, or too long"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata: is not a mapping, or too large"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a: is not a Unicode text"),
        ({"priority": 1}, "priority: is unknown; known here: completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after: seconds is 60, not between"),
    ],
)
@in_loop
async def test_a_batch_that_cannot_be_is_refused_with_the_way_out(tmp_path: Path, fields: Line, said: str) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **fields}
        response = await http.post("/v1/batches", content=json.dumps(body))
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(said)


@in_loop
async def test_other_methods_and_paths_of_the_api_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        for method, path, allowed in (
            ("PUT", "/v1/files", "GET, POST"),
            ("POST", "/v1/files/x", "GET, DELETE"),
            ("DELETE", "/v1/batches/x", "GET"),
            ("GET", "/v1/batches/x/cancel", "POST"),
        ):
            response = await http.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert (await http.get("/v1/batches/x/y/z")).json()["error"]["message"] == "/v1/batches/x/y/z does not exist here"


def test_without_storage_there_are_no_such_routes() -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
        status, body = get(ingress(), path)
        said = f"{path} does not exist here: this server stores no files and batches (ingress.batch)"
        assert (status, body["error"]["message"]) == (404, said)
