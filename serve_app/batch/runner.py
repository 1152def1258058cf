"""Asks the service for what a journal has no answer of: as many lines at once as the service takes, none of them twice, none lost."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.batch.journal import Journal
from serve_app.batch.output import output_line
from serve_app.batch.requests import Request
from serve_app.errors import BatchError

_COMMIT_S = 0.2
_FIRST_WINDOW = 16
_MAX_WAIT_S = 30.0
_BACK_PRESSURE = (429, 503)
_TRIED_AGAIN = (408, 500, 502, 504)


@dataclass(frozen=True)
class Limits:
    """``concurrency``: requests at once, at most. ``tries`` of one request that the service fails; being full or away is no failure.

    ``patience_s``: the batch stops, to be resumed, when for so long nothing at all was answered. ``timeout_s`` is of one request.
    """

    concurrency: int = 256
    tries: int = 5
    patience_s: float = 600.0
    timeout_s: float = 900.0
    tokens_per_minute: int | None = None


@dataclass
class Progress:
    """Lines and tokens of this process; lines that an earlier one answered are ``kept``."""

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    window: float = 0.0
    began_at: float = field(default_factory=time.monotonic)

    @property
    def lines(self) -> int:
        return self.kept + self.answered + self.failed


class Runner:
    """One run over one input."""

    def __init__(self, http: httpx.AsyncClient, journal: Journal, limits: Limits, *, retry_failed: bool = False) -> None:
        self.progress = Progress(window=float(min(_FIRST_WINDOW, limits.concurrency)))
        self._http, self._journal, self._limits, self._retry_failed = http, journal, limits, retry_failed
        self._running: set[asyncio.Task[None]] = set()
        self._answered_at = time.monotonic()
        self._shrunk_at = 0.0
        self._is_full = False
        self._tokens_at: float | None = None

    async def run(
        self, requests: Iterator[Request], *, watch: Callable[[Progress], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Ask for all that is not answered yet. Whatever ends it, what was answered is in the journal.

        Args:
            watch: Runs beside, to show the progress; is cancelled at the end.

        Raises:
            BatchError: The service is away for too long, or the journal cannot be written.
        """
        helpers = [asyncio.create_task(self._commit(), name="commit")]
        if watch is not None:
            helpers.append(asyncio.create_task(watch(self.progress), name="progress"))
        try:
            for request in requests:
                await self._take(request)
                self._raise_what_failed(helpers)
            while self._running:
                await asyncio.wait({*self._running, helpers[0]}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_what_failed(helpers)
        finally:
            for task in (*self._running, *helpers):
                task.cancel()
            await asyncio.gather(*self._running, *helpers, return_exceptions=True)

    async def _take(self, request: Request) -> None:
        standing = self._journal.see(request.key, request.digest, again=self._retry_failed)
        if standing == "done":
            self.progress.kept += 1
            if self.progress.kept % 1000 == 0:
                await asyncio.sleep(0)
        elif standing == "twice":
            key = f"{request.key} again, {self.progress.lines + len(self._running) + 1}"
            self._journal.see(key, request.digest, again=True)
            self._fail(key, request.key, None, "duplicate_id", f"the id {request.key!r} is another line's already")
        elif request.body is None:
            self._fail(request.key, request.key, None, "invalid_line", f"the line {request.problem}")
        else:
            while len(self._running) >= int(self.progress.window):
                await asyncio.wait(self._running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self._raise_what_failed(())
            task = asyncio.create_task(self._ask(request, request.body), name=request.key)
            self._running.add(task)

    def _raise_what_failed(self, helpers: object) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()
        for task in helpers if isinstance(helpers, list) else ():
            if task.done():
                task.result()

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_S)
            self._journal.commit()

    async def _ask(self, request: Request, body: bytes) -> None:
        tries = 0
        while True:
            await self._wait_for_tokens()
            try:
                answer = await self._http.post(request.path, content=body, headers={"content-type": "application/json"})
            except httpx.TimeoutException:
                tries, status, said, wait_s = tries + 1, None, f"no answer within {self._limits.timeout_s:g} s", 1.0
            except (httpx.TransportError, httpx.StreamError) as exc:  # the service is away, or was while it answered
                self._refuse_to_wait_for_ever(exc)
                await asyncio.sleep(_spread(1.0))
                continue
            else:
                status, said, wait_s = answer.status_code, _reason(answer), 2.0**tries
                if status == 200 and (value := _object(answer)) is not None:
                    self._answer(request, answer, value)
                    return
                if status in _BACK_PRESSURE:
                    self._shrink()
                    self._refuse_to_wait_for_ever(said)
                    await asyncio.sleep(_spread(_retry_after_s(answer)))
                    continue
                tries += 1
                if status not in _TRIED_AGAIN and status != 200:
                    tries = self._limits.tries
            if tries >= self._limits.tries:
                self._answered_at = time.monotonic()
                self._fail(request.key, request.key, status, "request_failed", said)
                return
            await asyncio.sleep(_spread(min(wait_s, _MAX_WAIT_S)))

    def _answer(self, request: Request, answer: httpx.Response, value: dict[str, Any]) -> None:
        usage = value.get("usage") or {}
        self._answered_at = time.monotonic()
        self._spend(int(usage.get("total_tokens") or 0))
        if not self._is_full and len(self._running) >= int(self.progress.window):
            self.progress.window = min(self.progress.window + 1.0, self._limits.concurrency)
        elif self._is_full:
            self.progress.window = min(self.progress.window + 1.0 / self.progress.window, self._limits.concurrency)
        self.progress.answered += 1
        self.progress.tokens += int(usage.get("completion_tokens") or 0)
        response = {"status_code": 200, "request_id": answer.headers.get("x-request-id", value.get("id", "")), "body": value}
        self._record(request.key, request.key, response, None, failed=False)

    def _fail(self, key: str, custom_id: str, status: int | None, code: str, message: str) -> None:
        self.progress.failed += 1
        response = None if status is None else {"status_code": status, "request_id": "", "body": None}
        self._record(key, custom_id, response, {"code": code, "message": message}, failed=True)

    def _record(self, key: str, custom_id: str, response: object, error: object, *, failed: bool) -> None:
        self._journal.record(key, output_line(key, custom_id, response, error), failed=failed)

    def _shrink(self) -> None:
        """The service has no place: fewer at once, by a third a second at most, because the refusals of one moment are one sign."""
        self._is_full = True
        if (now := time.monotonic()) - self._shrunk_at > 1.0:
            self._shrunk_at = now
            self.progress.window = max(1.0, self.progress.window * 0.7)

    def _refuse_to_wait_for_ever(self, why: object) -> None:
        waited_s = time.monotonic() - self._answered_at
        if waited_s > self._limits.patience_s:
            said = f"nothing was answered for {waited_s:.0f} s: {why or type(why).__name__}"
            raise BatchError(said, "see to the service and run the same command: what was answered is kept")

    def _spend(self, num_tokens: int) -> None:
        if self._limits.tokens_per_minute is not None:
            begin = max(self._tokens_at or 0.0, time.monotonic() - 1.0)
            self._tokens_at = begin + 60.0 * num_tokens / self._limits.tokens_per_minute

    async def _wait_for_tokens(self) -> None:
        while self._tokens_at is not None and (wait_s := self._tokens_at - time.monotonic()) > 0:
            await asyncio.sleep(min(wait_s, 1.0))


def _spread(wait_s: float) -> float:
    return wait_s * random.uniform(0.75, 1.25)  # not a secret


def _retry_after_s(answer: httpx.Response) -> float:
    with contextlib.suppress(ValueError):
        return min(max(float(answer.headers.get("retry-after", "1")), 0.1), _MAX_WAIT_S)
    return 1.0


def _object(answer: httpx.Response) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        if isinstance(value := answer.json(), dict):
            return value
    return None


def _reason(answer: httpx.Response) -> str:
    """Return the service's own words."""
    value = _object(answer) or {}
    error = value.get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return str(said or f"HTTP {answer.status_code}: {answer.text[:200]}")
