"""`BatchesApi` answers `/v1/batches` as OpenAI's API describes it."""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.batch.disk_threads import DiskThreads
from serve_app.batch.files_api import Handler, limit_of, listing
from serve_app.batch.records import Batch, Owner, checked_metadata, kept_for_s, seconds_of
from serve_app.batch.requests import PATHS
from serve_app.batch.store import Store
from serve_app.config import BatchSettings
from serve_app.errors import BadRequest, BodyTooSlow, RequestTooLarge

_MAX_BODY_BYTES = 256 << 10
_BODY_S = 30.0
_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}


class BatchesApi:
    """The routes of batches. ``methods`` returns the handlers of a path. ``wake`` is called when there is a new batch or a cancellation."""

    def __init__(self, settings: BatchSettings, store: Store, disk: DiskThreads, wake: Callable[[], None]) -> None:
        self._settings, self._store, self._disk, self._wake = settings, store, disk, wake

    def methods(self, below: tuple[str, ...]) -> Mapping[str, Handler] | None:
        """Return HTTP method -> handler; ``below`` are the parts of the path behind `/v1/batches`. None: there is no such path."""
        match below:
            case ():
                return {"GET": self._list, "POST": self._create}
            case (_,):
                return {"GET": self._get}
            case (_, "cancel"):
                return {"POST": self._cancel}
        return None

    async def _list(self, request: Request, owner: Owner) -> Response:
        limit = limit_of(request, default=20, most=100)
        page = await self._disk.run(
            partial(self._store.batches, owner.tenant, after=request.query_params.get("after"), limit=limit)
        )
        return JSONResponse(listing([batch.as_object() for batch in page.records], has_more=page.has_more))

    async def _get(self, request: Request, owner: Owner) -> Response:
        return JSONResponse((await self._batch(request, owner)).as_object())

    async def _batch(self, request: Request, owner: Owner) -> Batch:
        return await self._disk.run(partial(self._store.batch, request.scope["path"].split("/")[3], owner.tenant))

    async def _create(self, request: Request, owner: Owner) -> Response:
        fields = await _object_in(request)
        if unknown := sorted(fields.keys() - _FIELDS):
            raise BadRequest(param=unknown[0][:80], problem=f"is unknown; known here: {', '.join(sorted(_FIELDS))}")
        if not isinstance(input_file_id := fields.get("input_file_id"), str):
            raise BadRequest(param="input_file_id", problem="is missing, or not a text; upload a file with POST /v1/files")
        if (endpoint := fields.get("endpoint")) not in PATHS:
            raise BadRequest(param="endpoint", problem=f"is {str(endpoint)[:80]!r}, none of {', '.join(PATHS)}")
        window = fields.get("completion_window")
        now, window_s = int(self._store.clock.time()), seconds_of(window, limit_s=self._settings.max_window_s)
        expiry, keep_s = fields.get("output_expires_after"), self._settings.keep_s
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner.tenant,
            key=owner.key,
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=str(window),
            created_at=now,
            expires_at=now + window_s,
            keep_output_s=kept_for_s(expiry, param="output_expires_after", limit_s=keep_s),
            metadata=checked_metadata(fields.get("metadata")),
        )
        await self._disk.run(partial(self._store.add_batch, batch, max_open=self._settings.max_open_batches))
        self._wake()
        return JSONResponse(batch.as_object())

    async def _cancel(self, request: Request, owner: Owner) -> Response:
        batch = await self._batch(request, owner)
        batch = await self._disk.run_when_full(
            partial(self._store.change, batch, partial(_cancelled, now=self._store.clock.time()))
        )
        self._wake()
        return JSONResponse(batch.as_object())


def _cancelled(batch: Batch, *, now: float) -> Batch:
    if not batch.is_open:
        raise BadRequest(param="batch_id", problem=f"{batch.id} is {batch.status}, and cannot be cancelled any more")
    return batch if batch.status == "cancelling" else batch.moved("cancelling", now=now)


async def _object_in(request: Request) -> dict[str, Any]:
    """Return the JSON object that the body holds.

    Raises:
        RequestTooLarge, BodyTooSlow: The body is too long, or arrives too slowly.
        BadRequest: The body is not a JSON object.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for data in request.stream():
                body += data
                if len(body) > _MAX_BODY_BYTES:
                    raise RequestTooLarge(size_bytes=len(body), limit_bytes=_MAX_BODY_BYTES)
    except TimeoutError:
        raise BodyTooSlow(limit_s=_BODY_S) from None
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as exc:
        raise BadRequest(param="body", problem=f"is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise BadRequest(param="body", problem="is not a JSON object")
    return value
