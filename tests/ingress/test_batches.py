"""OpenAI's Files and Batches API with the official client, against a listener of an ingress; its model answers in capitals."""

import asyncio
import contextlib
import json
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types import Batch
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve_app.batch import worker
from serve_app.batch.service import BatchService
from serve_app.config import BatchSettings, IngressSettings
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.app import AppLimits, IngressApp
from serve_app.ingress.listener import Listener
from serve_app.testing.fleet import in_loop, until
from tests.ingress.test_app import front, get, ingress
from tests.ingress.test_listener import free_port

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
async def serving(folder: Path, *, keys: bool = False, model: Model | None = None, **limits: Any) -> AsyncIterator[Served]:
    model = model or Model()
    (folder / "keys").write_text("\n".join(KEYS))
    storage = {} if "database_file" in limits else {"dir": folder / "store"}
    service = BatchService(BatchSettings(**storage, **limits))
    known = ApiKeys(folder / "keys") if keys else None
    app = IngressApp({"tiny": front("tiny", model)}, AppLimits(4000), version={}, keys=known, batches=service)
    settings = IngressSettings(port=free_port())
    listener = Listener(app, settings)
    await listener.start()
    service.start(app.answer_batch, ("tiny",))
    served = Served(model, folder / "store", settings.local_url, app, service)
    try:
        yield served
    finally:
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


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed


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
        assert batch.output_file_id is not None
        for call in (
            other.files.retrieve(batch.output_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="is no file of the purpose 'batch'"):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="is not among your batches"):
            await other.batches.list(after=batch.id)
        assert [batch async for batch in other.batches.list()] == []
        assert [file async for file in other.files.list()] == []
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
        assert "could not go on" not in caplog.text


@in_loop
async def test_no_more_requests_than_allowed_run_at_once_whatever_the_number_of_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=True, concurrency=3) as served:
        clients = [served.client(key) for key in KEYS]
        made = [(client, await begin(client, jsonl(*map(line, range(30))))) for client in clients]
        for client, batch in made:
            assert (await ended(client, batch)).status == "completed"
        assert served.model.most_running == 3


@in_loop
async def test_another_ingress_on_the_folder_waits_for_the_first_and_then_goes_on(tmp_path: Path) -> None:
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
async def test_a_batch_whose_disk_is_full_goes_on_when_there_is_room(
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
        assert "could not go on; it is tried again in 0.2 s" in caplog.text
        batch = await ended(client, batch)
        assert (batch.status, counts(batch)) == ("completed", (100, 100, 0))
        assert await answers(client, batch) == [(f"id-{i}", prompt.upper()) for i, prompt in enumerate(prompts)]


# Limits and wrong requests.


@in_loop
async def test_a_file_that_is_too_large_is_refused_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=100_000) as served:
        client = served.client()
        for size in (100_001, 3_000_000):
            with pytest.raises(openai.APIStatusError, match=r"limit 100000") as refused:
                await client.files.create(file=b"x" * size, purpose="batch")
            assert refused.value.status_code == 413
        assert (await client.files.create(file=b"x" * 100_000, purpose="batch")).bytes == 100_000
        assert served.parts() == []


@in_loop
async def test_a_full_folder_is_told_and_has_room_again_after_a_deletion(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=60, max_stored_bytes=100) as served:
        client = served.client()
        first = await client.files.create(file=b"x" * 60, purpose="batch")
        with pytest.raises(openai.InternalServerError, match="60 bytes are stored, and the limit is 100; delete") as refused:
            await client.files.create(file=b"x" * 41, purpose="batch")
        assert refused.value.status_code == 507
        await client.files.delete(first.id)
        await client.files.create(file=b"x" * 41, purpose="batch")


@in_loop
async def test_uploads_at_the_same_time_hold_no_more_on_the_disk_than_is_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=1 << 20, max_stored_bytes=1 << 20) as served:
        client = served.client()
        sent = (client.files.create(file=b"x" * (900 << 10), purpose="batch") for _ in range(6))
        done = await asyncio.gather(*sent, return_exceptions=True)
        assert sorted(getattr(answer, "status_code", 200) for answer in done) == [200, *[507] * 5]
        assert sum(path.stat().st_size for path in (served.folder / "files").iterdir()) == 900 << 10


@in_loop
async def test_slow_uploads_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=True, max_file_bytes=1 << 20, max_stored_bytes=20 << 20) as served:
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
        form = "content-type: multipart/form-data; boundary=b\r\ntransfer-encoding: chunked\r\n\r\n"
        host, _, port = served.url.removeprefix("http://").partition(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
        for _, writer in slow:
            writer.write((head + form).encode())
        await until(lambda: len(served.parts()) == len(slow))
        with pytest.raises(openai.RateLimitError, match="16 uploads are under way"):
            await served.client(KEYS[0]).files.create(file=b"{}", purpose="batch")
        await served.client(KEYS[1]).files.create(file=b"{}", purpose="batch")
        for _, writer in slow:
            writer.close()
        while True:
            with contextlib.suppress(openai.RateLimitError):  # the ingress notices in a moment that they are gone
                await served.client(KEYS[0]).files.create(file=b"{}", purpose="batch")
                break
            await asyncio.sleep(0.01)


@in_loop
async def test_a_full_disk_is_told_and_nothing_half_is_left(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        said = "there is no room: File too large"
        with file_size_limit(500_000), pytest.raises(openai.InternalServerError, match=said) as refused:
            await served.client().files.create(file=b"x" * 5_000_000, purpose="batch")
        assert refused.value.status_code == 507
        assert (served.parts(), [f async for f in served.client().files.list()]) == ([], [])


@in_loop
async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n"
        part = '--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        writer.write((head + part).encode() + b"x" * 3_000_000)
        await writer.drain()
        while not served.parts():
            await asyncio.sleep(0.01)
        writer.close()
        while served.parts():
            await asyncio.sleep(0.01)
        assert list((served.folder / "files").iterdir()) == []


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
        ({"input_file_id": "file-none"}, "input_file_id: 'file-none' is no file of the purpose 'batch'"),
        ({"input_file_id": "\ud800"}, "input_file_id: '\\ud800' is no file of the purpose 'batch'"),
        ({"input_file_id": None}, "input_file_id: is missing"),
        ({"metadata": {"a": 1}}, "metadata.a: is no text"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: is no text of Unicode, or too long"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata: is no mapping, or too large"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a: is no text of Unicode"),
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


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"purpose": "fine-tune"}, "purpose: is 'fine-tune', and files are for batches here"),
        ({}, "purpose: is 'None'"),
        ({"purpose": "batch", "color": "red"}, "color: is unknown"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            "expires_after: seconds is 5",
        ),
        ({"purpose": "batch", "expires_after[seconds]": "x"}, "expires_after: give"),
        ({"purpose": "x" * 5000}, "purpose: has more than 4096 bytes"),
    ],
)
@in_loop
async def test_an_upload_that_cannot_be_is_refused_with_the_way_out(tmp_path: Path, form: dict[str, str], said: str) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        response = await http.post("/v1/files", data=form, files={"file": ("a", b"x")})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(said)
        await until(lambda: served.parts() == [])  # a thread removes it, and the answer does not wait


@in_loop
async def test_a_file_expires_when_its_upload_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        file = await served.client().files.create(file=b"x", purpose="batch", expires_after=expiry)
        assert file.expires_at == file.created_at + 3600


@in_loop
async def test_the_content_of_a_file_that_is_deleted_meanwhile_does_not_exist(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        file = await served.client().files.create(file=b"x", purpose="batch")
        (served.folder / "files" / file.id).unlink()
        with pytest.raises(openai.NotFoundError, match=f"no such File object: '{file.id}'"):
            await served.client().files.content(file.id)


@in_loop
async def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        (served.folder / "files" / "unknown").write_text("no file of the database")
        for path in (
            "/v1/files/..%2f..%2fkeys/content",
            "/v1/files/../../keys",
            "/v1/files/unknown/content",
            "/v1/files//content",
        ):
            with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port or 0)) as sock:
                sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                status = await asyncio.to_thread(sock.recv, 12)
            assert status == b"HTTP/1.1 404"


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
        assert (status, body["error"]["message"]) == (404, f"{path} does not exist here")
