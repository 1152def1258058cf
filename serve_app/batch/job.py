"""`BatchJob` runs one batch of the API: it checks the input, and a later run of it brings the batch to its end.

Whatever ends the process, the job of the next process continues from the journal.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import httpx

from serve_app.batch.checks import check_input
from serve_app.batch.claims import Claim
from serve_app.batch.client import Limits
from serve_app.batch.journal import Journal, JournalCounts
from serve_app.batch.output import output_line, write_lines
from serve_app.batch.records import Batch, File, LineError, Owner, Status
from serve_app.batch.requests import Defaults, Request, request_of
from serve_app.batch.rows import ProblemOfLine, any_line, rows
from serve_app.batch.runner import Progress, Runner
from serve_app.batch.storage import Storage
from serve_app.books.series import counter
from serve_app.config import BatchSettings
from serve_app.errors import BatchError, JournalBroken, StorageAway, StorageFailed

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 900.0
_LOOK_S = 1.0
"""How late a cancelled or expired batch may stop, and how old its counts may be."""

_PUBLISHED_LINES = 500
"""Most lines that are published at once, in one row of the shared database."""
_PUBLISHED_CHARS = 4 << 20
"""Most characters of those lines, unless one line is longer. Publishing holds several copies of the lines in memory."""
_MAX_RUNNERS = 8
"""Most runners of one batch, each of which reads the whole input. From the eighth model on, by number of lines, models share a runner."""
T = TypeVar("T")

LINES = counter("batch_lines")
for _outcome in ("answered", "failed"):
    LINES.labels(_outcome)  # for alerts: Prometheus sees no increase in a series that begins at 1

_REST: dict[Status, tuple[Status, str, str]] = {
    "in_progress": ("expired", "batch_expired", "the completion window was over before this request was answered"),
    "cancelling": ("cancelled", "batch_cancelled", "the batch was cancelled before this request was answered"),
    "finalizing": ("completed", "batch_failed", "the request was lost"),
}
"""By the status that the batch has at its end: its last status, and the error code and message of lines without an answer."""


class BatchJob:
    """A run of one batch. Call ``run`` in an event loop that may wait for the disk."""

    def __init__(
        self,
        batch: Batch,
        settings: BatchSettings,
        storage: Storage,
        claim: Claim,
        *,
        models: Collection[str],
        transport: Callable[[Owner], httpx.AsyncBaseTransport],
        problem_of_line: ProblemOfLine = any_line,
    ) -> None:
        self.batch = batch
        self._settings, self._storage, self._claim = settings, storage, claim
        self._models, self._transport, self._problem_of_line = models, transport, problem_of_line
        self._counted = (0, 0)
        """Lines answered and failed that `LINES` has counted."""

    async def run(self) -> None:
        """Check the input of a new batch; bring a checked batch to its end.

        Raises:
            BatchError, OSError, sqlite3.Error, StorageFailed: The storage failed, or the requests were cancelled; another run continues.
            LeaseLost: Another ingress runs the batch.
        """
        try:
            await self._continue()
        except FileNotFoundError as exc:
            said = f"The input {self.batch.input_file_id} is lost; upload it again, and create another batch."
            await _in_thread(self._lose, LineError("input_lost", said), exc)
        except JournalBroken as exc:
            if (
                self._claim.fence
            ):  # only this machine's copy is damaged; the next claim makes another journal from the published lines
                raise
            said = "The journal with the batch's answers is damaged; create another batch of the same input."
            await _in_thread(self._lose, LineError("journal_lost", said), exc)

    def _lose(self, error: LineError, cause: Exception) -> None:
        """End the batch without its answers, because no further run could get them."""
        logger.error("%s ends: %s", self.batch.id, cause)

        def end(batch: Batch) -> Batch:
            return batch.moved(
                "cancelled" if batch.status == "cancelling" else "failed", now=self._storage.store.clock.time(), errors=(error,)
            )

        self._change(end)
        self._claim.forget_journal()

    async def _continue(self) -> None:
        # Read again: another ingress may have ended the batch between the read of its record and the claim on it.
        self.batch = await _in_thread(self._storage.store.batch, self.batch.id, self.batch.owner)
        if not self.batch.is_open:
            return
        if self.batch.status == "validating":
            await _in_thread(self._validate)
            return
        if self.batch.status in ("in_progress", "finalizing") and not self._is_over():
            await self._ask()
        if self.batch.is_open:
            await _in_thread(self._finish)

    def _may_ask(self) -> bool:
        return self.batch.is_open and self.batch.status != "cancelling" and not self._is_over()

    def _is_over(self) -> bool:
        return self._storage.store.clock.has_passed(self.batch.expires_at, since=self.batch.created_at)

    def _validate(self) -> None:
        with self._storage.contents.on_disk(self.batch.input_file_id) as path, path.open("rb") as file:
            found = check_input(
                rows(file, "jsonl", problem_of_line=self._problem_of_line),
                endpoint=self.batch.endpoint,
                models=self._models,
                max_lines=self._settings.max_lines,
            )
        status: Status = "failed" if found.errors else "in_progress"
        by_model = {} if found.errors else dict(found.lines)
        self._move("validating", status, total=sum(by_model.values()), lines=by_model, errors=found.errors)

    def _move(self, expected: Status, status: Status, **changes: object) -> None:
        """Move the batch to ``status``, unless a client has cancelled it meanwhile."""

        def move(batch: Batch) -> Batch:
            return batch.moved(status, now=self._storage.store.clock.time(), **changes) if batch.status == expected else batch

        self._change(move)

    def _change(self, change: Callable[[Batch], Batch], files: tuple[File, ...] = ()) -> None:
        self.batch = self._storage.store.change(self.batch, change, files, guard=self._claim.check)

    async def _ask(self) -> None:
        """Ask for the lines that have no answer in the journal, until all are answered, the window is over or a client cancels.

        Each model has a runner of its own. If the models came one after the other, the last model's lines would begin when the window is
        nearly over, and a model without a free replica would keep the others' lines waiting.
        """
        limits = Limits(concurrency=self._settings.concurrency, patience_s=float("inf"), timeout_s=REQUEST_TIMEOUT_S)
        with ExitStack() as held:
            path = await _in_thread(held.enter_context, self._storage.contents.on_disk(self.batch.input_file_id))
            # Enter the journal in the thread, so that it is closed also when this job is cancelled meanwhile.
            journal = await _in_thread(lambda: held.enter_context(self._claim.open_journal()))
            transport = self._transport(Owner(self.batch.owner, self.batch.key))
            async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as http:
                runners = [Runner(http, journal, limits, takes=takes) for takes in _by_model(self.batch.lines)]
                progress = [runner.progress for runner in runners]
                inputs = [held.enter_context(closing(_requests(path))) for _ in runners]
                running = asyncio.create_task(_run_all(runners, inputs), name=f"batch {self.batch.id}")
                try:
                    while not running.done() and self._may_ask():
                        await asyncio.wait([running], timeout=_LOOK_S)
                        await self._keep_up(progress, journal)
                finally:
                    running.cancel()
                    # Not `await running`: its CancelledError could be this job's own, which has to end the job.
                    await asyncio.gather(running, return_exceptions=True)
                    await self._keep_up(progress, journal)
            while not await self._keep_up(progress, journal):
                await asyncio.sleep(_LOOK_S)
        if not running.cancelled():
            running.result()
            await asyncio.to_thread(self._move, "in_progress", "finalizing")
        elif self._may_ask():
            raise BatchError(f"the requests of {self.batch.id} were cancelled, and its window is not over", "it is tried again")

    async def _keep_up(self, progress: Sequence[Progress], journal: Journal) -> bool:
        """Publish answers and store the counts; return False while the storage is away, for which the requests do not wait."""
        self._count(progress)
        try:
            while lines := journal.recorded(_PUBLISHED_LINES, max_chars=_PUBLISHED_CHARS):
                await asyncio.to_thread(self._claim.publish, lines)
                journal.forget_recorded(len(lines))
            await self._store_counts(progress, journal.counts())
        except StorageAway:
            return False
        return True

    async def _store_counts(self, progress: Sequence[Progress], counts: JournalCounts) -> None:
        """Store the counts where clients see them, and read whether a client has cancelled the batch."""
        ended = sum((one.ended for one in progress), Counter[str]())
        await asyncio.to_thread(self._change, lambda batch: batch.counted(counts.answered, counts.failed, ended))

    def _count(self, progress: Sequence[Progress]) -> None:
        answered, failed = sum(one.answered for one in progress), sum(one.failed for one in progress)
        LINES.labels("answered").inc(answered - self._counted[0])
        LINES.labels("failed").inc(failed - self._counted[1])
        self._counted = answered, failed

    def _finish(self) -> None:
        """Write the files of answers and of failures, and move the batch to its last status in one transaction."""
        if not self.batch.total:
            self._move("cancelling", "cancelled")
            return
        ends_as, code, message = _REST[self.batch.status]
        with self._claim.open_journal() as journal:
            with self._storage.contents.on_disk(self.batch.input_file_id) as path, closing(_requests(path)) as requests:
                for request in requests:
                    if journal.see(request.key, request.digest, again=False) == "new":
                        line = output_line(request.key, request.key, None, {"code": code, "message": message})
                        journal.record(request.key, line, failed=True)
                        LINES.labels(ends_as).inc()
            journal.commit()
            counts = journal.counts()
            output = self._write("output", journal.results(failed=False)) if counts.answered else None
            errors = self._write("errors", journal.results(failed=True)) if counts.failed else None
        self._change(
            lambda batch: batch.moved(
                _REST[batch.status][0],  # a client may have cancelled the batch meanwhile
                now=self._storage.store.clock.time(),
                completed=counts.answered,
                failed=counts.failed,
                output_file_id=output and output.id,
                error_file_id=errors and errors.id,
            ),
            tuple(file for file in (output, errors) if file is not None),
        )
        self._claim.forget_journal()

    def _write(self, kind: str, lines: Iterator[str]) -> File:
        # After a crash the id is the same, so that no file is left behind. Each fence has another id, so that a runner that has lost its
        # lease does not write into a file of its successor. A client that knows the batch's id may know its files' ids.
        name = f"{self.batch.id} {kind}" + (f" {self._claim.fence}" if self._claim.fence else "")
        file_id = f"file-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        part = self._storage.scratch.part()
        try:
            num_bytes = write_lines(part, lines)
            self._storage.contents.keep(part, file_id)
        except FileNotFoundError as exc:  # the scratch folder is gone; the input is not lost
            raise StorageFailed from exc
        finally:
            part.unlink(missing_ok=True)
        now = int(self._storage.store.clock.time())
        name = f"{self.batch.id}_{kind}.jsonl"
        return File(file_id, self.batch.owner, name, "batch_output", num_bytes, now, now + self.batch.keep_output_s)


def _by_model(lines: Mapping[str, int]) -> list[Callable[[Request], bool]]:
    """Return for each runner which requests it takes. Each request belongs to one runner, even if its model is not in ``lines``."""
    models = sorted(lines, key=lambda model: -lines[model])
    runner_of = {model: min(number, _MAX_RUNNERS - 1) for number, model in enumerate(models)}

    def takes(number: int) -> Callable[[Request], bool]:
        return lambda request: runner_of.get(request.model, 0) == number

    return [takes(number) for number in range(max(1, min(len(models), _MAX_RUNNERS)))]


async def _run_all(runners: Sequence[Runner], inputs: Sequence[Iterator[Request]]) -> None:
    """Run the runners at the same time; the first error ends all of them."""
    # No TaskGroup: its groups of exceptions would hide which error ended the batch.
    tasks = [asyncio.create_task(runner.run(requests), name="runner") for runner, requests in zip(runners, inputs, strict=True)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancel would cut short the runner's clean-up
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _requests(path: Path) -> Generator[Request, None, None]:
    with path.open("rb") as file:
        yield from (request_of(row, Defaults("")) for row in rows(file, "jsonl"))


async def _in_thread(call: Callable[..., T], *args: object) -> T:
    """Run ``call`` in a thread. A job that is cancelled meanwhile ends after the call, because the claim has to outlive the call."""
    called = asyncio.create_task(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(called)
    except asyncio.CancelledError:
        await asyncio.wait([called])
        raise
