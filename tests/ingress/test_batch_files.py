"""OpenAI's Files API is tested with the official client: limits, broken uploads, a full disk, and bodies that are no file."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.fleet import in_loop, until
from tests.ingress.batch_serving import KEYS, file_size_limit, serving


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
async def test_a_full_folder_is_reported_and_has_room_again_after_a_deletion(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=6000, max_stored_bytes=10_000) as served:
        client = served.client()
        first = await client.files.create(file=b"x" * 6000, purpose="batch")
        with pytest.raises(openai.InternalServerError, match="6000 bytes are stored, and the limit is 10000; delete") as refused:
            await client.files.create(file=b"x" * 4100, purpose="batch")
        assert refused.value.status_code == 507
        await client.files.delete(first.id)
        await client.files.create(file=b"x" * 4100, purpose="batch")


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
async def test_a_full_disk_is_reported_and_nothing_half_is_left(tmp_path: Path) -> None:
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
