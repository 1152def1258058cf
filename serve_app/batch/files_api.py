"""`FilesApi` answers `/v1/files` as OpenAI's API describes it, for files that a batch reads or has written."""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve_app.batch.disk_threads import DiskThreads
from serve_app.batch.records import File, Owner, kept_for_s
from serve_app.batch.storage import Storage
from serve_app.batch.upload import UploadForm
from serve_app.config import BatchSettings
from serve_app.errors import BadRequest, BodyTooSlow, NotStored, RequestTooLarge, TooManyUploads

Handler = Callable[[Request, Owner], Awaitable[Response]]
"""A function that answers a request of the owner, the second argument."""

_SILENCE_S = 30.0
"""Longest time, in seconds, for which an upload may send nothing."""
_UPLOAD_S = 3600.0
_WRITE_BYTES = 1 << 20
_MAX_LISTED = 10_000
_MAX_UPLOADS = 16
"""Most uploads of one API key at once. Room is set aside for each: without a limit, slow uploads would keep all others out for an hour."""
_RETRY_AFTER_S = 5.0
_FORM_BYTES = 64 << 10
"""Most bytes that a form may have beside its file; Content-Length counts them as well."""
_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}


class FilesApi:
    """The routes of files. ``methods`` returns the handlers of a path."""

    def __init__(self, settings: BatchSettings, storage: Storage, disk: DiskThreads) -> None:
        self._settings, self._disk = settings, disk
        self._scratch, self._contents, self._store = storage.scratch, storage.contents, storage.store
        self._coming_bytes = 0
        """Bytes that the uploads under way may add: of each the announced length, or else the largest that is allowed."""
        self._uploads: Counter[str] = Counter()
        """Owner -> number of uploads under way."""

    def methods(self, below: tuple[str, ...]) -> Mapping[str, Handler] | None:
        """Return HTTP method -> handler; ``below`` are the parts of the path behind `/v1/files`. None: there is no such path."""
        match below:
            case ():
                return {"GET": self._list, "POST": self._upload}
            case (_,):
                return {"GET": self._get, "DELETE": self._delete}
            case (_, "content"):
                return {"GET": self._content}
        return None

    async def _list(self, request: Request, owner: Owner) -> Response:
        limit = limit_of(request, default=_MAX_LISTED, most=_MAX_LISTED)
        query = request.query_params
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise BadRequest(param="order", problem=f"is {order[:80]!r}, neither asc nor desc")
        find = partial(self._store.files, owner.tenant, purpose=query.get("purpose"), after=query.get("after"))
        page = await self._disk.run(partial(find, limit=limit, oldest_first=order == "asc"))
        return JSONResponse(listing([file.as_object() for file in page.records], has_more=page.has_more))

    async def _get(self, request: Request, owner: Owner) -> Response:
        return JSONResponse((await self._file(request, owner)).as_object())

    async def _content(self, request: Request, owner: Owner) -> Response:
        file = await self._file(request, owner)
        held = ExitStack()
        try:
            path, found = await self._disk.run(partial(self._lent, file, held))
        except BaseException:
            await asyncio.shield(self._disk.run(held.close))
            raise
        headers, kind = {"x-content-type-options": "nosniff"}, "application/octet-stream"
        return _Lent(held, path, media_type=kind, filename=file.name, headers=headers, stat_result=found)

    def _lent(self, file: File, held: ExitStack) -> tuple[Path, os.stat_result]:
        try:
            path = held.enter_context(self._contents.on_disk(file.id))
            return path, path.stat()
        except FileNotFoundError:  # deleted since its record was read
            raise NotStored(kind="File", id=file.id) from None

    async def _delete(self, request: Request, owner: Owner) -> Response:
        file = await self._file(request, owner)
        await self._disk.run_when_full(partial(self._store.delete_file, file.id, owner.tenant))
        await self._disk.run(partial(self._contents.remove, [file.id]))
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, request: Request, owner: Owner) -> File:
        return await self._disk.run(partial(self._store.file, request.scope["path"].split("/")[3], owner.tenant))

    async def _upload(self, request: Request, owner: Owner) -> Response:
        limit_bytes = self._settings.max_file_bytes
        announced = request.headers.get("content-length", "")
        num_bytes = max(0, int(announced) - _FORM_BYTES) if announced.isdigit() else limit_bytes
        if num_bytes > limit_bytes:
            raise RequestTooLarge(size_bytes=int(announced), limit_bytes=limit_bytes)
        form = UploadForm(request.headers.get("content-type", ""), max_bytes=limit_bytes)
        if self._uploads[owner.tenant] >= _MAX_UPLOADS:
            raise TooManyUploads(_MAX_UPLOADS, retry_after_s=_RETRY_AFTER_S)
        part = self._scratch.part()
        self._coming_bytes += num_bytes
        self._uploads[owner.tenant] += 1
        try:
            await self._disk.run(partial(self._store.check_room, self._coming_bytes, limit=self._settings.max_stored_bytes))
            await self._receive(request, form, part)
            file = self._file_of(form, owner)
            await self._disk.run(partial(self._keep, part, file))
        finally:
            try:
                await asyncio.shield(self._disk.run(partial(part.unlink, missing_ok=True)))
            finally:
                self._coming_bytes -= num_bytes
                self._uploads[owner.tenant] -= 1
        return JSONResponse(file.as_object())

    async def _receive(self, request: Request, form: UploadForm, part: Path) -> None:
        """Write the file to ``part``, a megabyte at a time."""
        stream = request.stream()
        deadline = time.monotonic() + _UPLOAD_S
        out: BinaryIO = await self._disk.run(lambda: part.open("xb"))
        try:
            held = bytearray()
            while (data := await _next(stream, min(_SILENCE_S, deadline - time.monotonic()))) is not None:
                held += form.receive(data)
                if len(held) >= _WRITE_BYTES:
                    await self._disk.run(partial(out.write, held))
                    held = bytearray()
            form.end()
            await self._disk.run(partial(out.write, held))
        finally:
            await asyncio.shield(self._disk.run(out.close))

    def _file_of(self, form: UploadForm, owner: Owner) -> File:
        if unknown := sorted(form.fields.keys() - _FIELDS):
            raise BadRequest(param=unknown[0][:80], problem=f"is unknown; known here: file, {', '.join(sorted(_FIELDS))}")
        if (purpose := form.fields.get("purpose")) != "batch":
            raise BadRequest(param="purpose", problem=f"is {str(purpose)[:80]!r}, and files are for batches here; give 'batch'")
        seconds = form.fields.get("expires_after[seconds]")
        expiry: dict[str, Any] | None = None
        if seconds is not None or "expires_after[anchor]" in form.fields:
            number = int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() else None
            expiry = {"anchor": form.fields.get("expires_after[anchor]"), "seconds": number}
        kept_s = kept_for_s(expiry, param="expires_after", limit_s=self._settings.keep_s)
        now = int(self._store.clock.time())
        return File(
            f"file-{secrets.token_hex(16)}", owner.tenant, form.file_name or "file", "batch", form.num_bytes, now, now + kept_s
        )

    def _keep(self, part: Path, file: File) -> None:
        """Make the part a file, with its record. If the record cannot be written, the file is removed: without a record it has no owner."""
        self._contents.keep(part, file.id)
        try:
            self._store.add_file(file, limit=self._settings.max_stored_bytes)
        except BaseException:
            self._contents.remove([file.id])
            raise


class _Lent(FileResponse):
    """A response that keeps its file on disk until the file is sent, or the client has gone."""

    def __init__(self, held: ExitStack, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _next(stream: Any, limit_s: float) -> bytes | None:
    """Return the next bytes of the body, None at its end.

    Raises:
        BodyTooSlow: No bytes came within ``limit_s``.
    """
    try:
        async with asyncio.timeout(limit_s):
            return bytes(await anext(stream))
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise BodyTooSlow(limit_s=_SILENCE_S) from None


def limit_of(request: Request, *, default: int, most: int) -> int:
    """Return the query's `limit`.

    Raises:
        BadRequest: The `limit` is not a number from 1 to ``most``.
    """
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequest(param="limit", problem=f"is {text[:20]!r}, not a number from 1 to {most}")
    return int(text)


def listing(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list in the form that OpenAI's clients read."""
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": has_more}
