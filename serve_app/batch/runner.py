"""`Runner` asks a service for all that a journal has no answer of: as many lines at once as the service takes, each line once."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.batch.client import BatchClient, Failure, Limits, Reply
from serve_app.batch.connections import Poster
from serve_app.batch.journal import Journal
from serve_app.batch.output import output_line
from serve_app.batch.requests import Request
from serve_app.errors import BatchError, ServiceAway

_COMMIT_S = 0.005
"""Shortest time between two commits. A crash loses the answers since the last commit; a commit takes about 50 us: it waits for no disk."""
_LOOK_S = 0.2
"""How old the reported trouble may be while nothing is answered."""
_YIELD_LINES = 20
"""Lines that need no answer are taken without a wait; after so many lines the other tasks run once. A line may have a megabyte."""


@dataclass
class Progress:
    """Lines and tokens of this process; ``kept`` counts lines that an earlier process answered."""

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Model -> number of lines that have their result, including results of earlier processes."""
    window: float = 0.0
    """Number of requests at once that the service takes, as measured so far."""
    trouble: str = ""
    """Why the service answers nothing now; empty while it answers."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def lines(self) -> int:
        return self.kept + self.answered + self.failed


class Runner:
    """One run over one input, or over the lines that ``takes`` picks."""

    def __init__(
        self,
        http: Poster,
        journal: Journal,
        limits: Limits,
        *,
        retry_failed: bool = False,
        takes: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        self._client = BatchClient(http, limits)
        self.progress = Progress(window=self._client.window)
        self._journal, self._max_tasks, self._retry_failed = journal, limits.concurrency, retry_failed
        self._takes = takes
        self._noted = asyncio.Event()
        """Set while the journal has results that are not committed."""
        self._running: set[asyncio.Task[None]] = set()
        self._helpers: list[asyncio.Task[None]] = []

    async def run(
        self, requests: Iterator[Request], *, watch: Callable[[Progress], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Ask for all lines that are not answered yet. Whatever ends the run, the journal has all answers.

        Args:
            watch: A coroutine that runs at the same time, to show the progress. It is cancelled at the end; its exception ends the run.

        Raises:
            BatchError: The service is away for too long, or the journal cannot be written.
        """
        self._helpers = [asyncio.create_task(self._commit(), name="commit")]
        if watch is not None:
            self._helpers.append(asyncio.create_task(watch(self.progress), name="watch"))
        try:
            for number, request in enumerate(requests, 1):
                if self._takes(request):
                    await self._take(number, request)
                self._raise_what_failed()
                if number % _YIELD_LINES == 0:
                    await asyncio.sleep(0)
            while self._running:
                await self._wait()
        finally:
            for task in (*self._running, *self._helpers):
                task.cancel()
            await asyncio.gather(*self._running, *self._helpers, return_exceptions=True)

    async def _take(self, number: int, request: Request) -> None:
        state = self._journal.see(request.key, request.digest, again=self._retry_failed)
        if state == "done":
            self.progress.kept += 1
            self.progress.ended[request.model] += 1
        elif state == "twice":
            key = f"{request.key} again, {number}"
            self._journal.see(key, request.digest, again=True)
            self._fail(key, request, Failure("duplicate_id", f"the id {request.key!r} is another line's already"))
        elif request.body is None:
            self._fail(request.key, request, Failure("invalid_line", f"the line {request.problem}"))
        else:
            while len(self._running) >= self._max_tasks:
                await self._wait()
            task = asyncio.create_task(self._ask(request, request.body), name=request.key)
            self._running.add(task)

    async def _wait(self) -> None:
        """Return when a line has its result; raise the exception of a helper that ended."""
        await asyncio.wait({*self._running, *self._helpers}, return_when=asyncio.FIRST_COMPLETED)
        self._raise_what_failed()

    def _raise_what_failed(self) -> None:
        for task in [task for task in (*self._running, *self._helpers) if task.done()]:
            self._running.discard(task)
            task.result()

    async def _commit(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._noted.wait()
            self._noted.clear()
            self._journal.commit()
            self.progress.trouble = self._client.trouble
            await asyncio.sleep(_COMMIT_S)

    async def _ask(self, request: Request, body: bytes) -> None:
        try:
            outcome = await self._client.ask(request.path, body)
        except ServiceAway as exc:
            raise BatchError(exc.problem, "check the service and run the same command: what was answered is kept") from exc
        self.progress.window = self._client.window
        if isinstance(outcome, Reply):
            self._answer(request, outcome)
        else:
            self._fail(request.key, request, outcome)

    def _answer(self, request: Request, reply: Reply) -> None:
        self.progress.answered += 1
        self.progress.ended[request.model] += 1
        self.progress.tokens += reply.usage("completion_tokens")
        response = {"status_code": 200, "request_id": reply.request_id, "body": reply.body}
        self._record(request.key, request.key, response, None, failed=False)

    def _fail(self, key: str, request: Request, failure: Failure) -> None:
        self.progress.failed += 1
        self.progress.ended[request.model] += 1
        response = None
        if failure.status is not None:
            body = failure.body or {"error": {"message": failure.message, "code": failure.code}}
            response = {"status_code": failure.status, "request_id": failure.request_id, "body": body}
        self._record(key, request.key, response, {"code": failure.code, "message": failure.message}, failed=True)

    def _record(self, key: str, custom_id: str, response: object, error: object, *, failed: bool) -> None:
        self._journal.record(key, output_line(key, custom_id, response, error), failed=failed)
        self._noted.set()
