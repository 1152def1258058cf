"""`Worker` runs batches in a thread with an event loop of its own, so that its waits for the storage delay no stream of the ingress.

A batch runs under a claim (`claims.py`), so that only one of several processes runs it. Each process looks each second for batches that it
may claim, and reads them from the database each time: batches that an earlier process has left begin like new ones.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import httpx

from serve_app.batch.claims import Claim
from serve_app.batch.deadlines import lines_per_s
from serve_app.batch.in_process import Application, InProcess
from serve_app.batch.job import REQUEST_TIMEOUT_S, BatchJob
from serve_app.batch.records import Batch, KeyState, Owner
from serve_app.batch.rows import ProblemOfLine, any_line
from serve_app.batch.storage import Storage
from serve_app.books.series import gauge
from serve_app.config import BatchSettings
from serve_app.errors import KeyRefused, LeaseLost, StorageAway

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 1.0
_CLEAN_S = 600.0
_AGAIN_S = 10.0
"""Seconds until a batch whose job failed is tried again, for example on a full disk."""
_UNKNOWN_S = 300.0
"""Seconds for which a batch waits for its unknown key. A kubelet takes up to a minute to write a changed Secret; a file that is copied to
the nodes by hand takes longer."""
_MAX_RUNNING = 16
"""Most batches at once, each of another tenant; batches of one tenant follow each other."""
_STOP_S = 8.0
"""Longest time to stop. It has to fit into the time that an ingress has beyond its drain."""

BATCHES = gauge("batches")
FREE_BYTES = gauge("batch_free_bytes")


class Worker:
    """The worker of one ingress.

    Call ``start`` in the event loop of ``application``. ``models`` returns the names that an owner's lines may ask for.
    """

    def __init__(self, settings: BatchSettings, storage: Storage) -> None:
        self._settings, self._storage = settings, storage
        self._running: dict[str, tuple[Batch, asyncio.Task[None]]] = {}
        self._not_before: dict[str, float] = {}
        self._claiming = ThreadPoolExecutor(1, "batch-claims")
        """A thread apart from the jobs' threads and the house-keeping's thread: a claim that is renewed too late is lost."""
        self._house_keeping: asyncio.Task[None] | None = None
        self._cleaned_at = -_CLEAN_S
        self._open: list[Batch] = []
        """Batches of all processes that had not ended at the last look."""
        self._logged = ""
        """The error of the last look, "" if it had none."""
        self._stopping = False
        self._state_of_key: Callable[[Owner], KeyState] = lambda _: "valid"
        self._unknown_since: dict[Owner, float] = {}
        """When this process first saw that the key of a batch is unknown, monotonic."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        application: Application,
        models: Callable[[Owner], Collection[str]],
        problem_of_line: ProblemOfLine = any_line,
        *,
        state_of_key: Callable[[Owner], KeyState] = lambda _: "valid",
    ) -> None:
        ingress = asyncio.get_running_loop()
        self._state_of_key = state_of_key

        def run() -> None:
            asyncio.run(self._main(application, models, problem_of_line, ingress))

        self._thread = threading.Thread(target=run, name="batches", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at once for something new to do."""
        if self._loop is not None and not self._stopping:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._woken.set)

    def lines_per_s(self) -> dict[str, float]:
        """Return model -> lines a second that all processes together have to answer, so that all batches end in time."""
        return lines_per_s(self._open, self._storage.store.clock.time())

    async def stop(self) -> None:
        """Give up the requests under way; the next process continues the batches. Waits for `_STOP_S` at most."""
        if self._thread is None:
            return
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken.set)
        await asyncio.to_thread(self._thread.join, _STOP_S)

    async def _main(
        self,
        application: Application,
        models: Callable[[Owner], Collection[str]],
        problem_of_line: ProblemOfLine,
        ingress: asyncio.AbstractEventLoop,
    ) -> None:
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        def transport(owner: Owner) -> httpx.AsyncBaseTransport:
            concurrency = self._settings.concurrency  # of the whole batch: one of several models has a runner for each
            return InProcess(application, ingress, owner=owner, concurrency=concurrency, timeout_s=REQUEST_TIMEOUT_S)

        def job(batch: Batch, claim: Claim) -> BatchJob:
            return BatchJob(
                batch,
                self._settings,
                self._storage,
                claim,
                models=models(Owner(batch.owner, batch.key)),
                transport=transport,
                problem_of_line=problem_of_line,
            )

        try:
            while not self._stopping:
                self._woken.clear()  # before the look: a batch that comes during it is seen by the next look
                await self._look(job)
                await self._wait()
        finally:
            await self._give_up()

    async def _wait(self) -> None:
        ended = [task for _, task in self._running.values()]
        woken = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait([woken, *ended], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    async def _look(self, job: Callable[[Batch, Claim], BatchJob]) -> None:
        """Begin the batches that can begin. An error of the storage is logged, and the next look tries again."""
        try:
            self._forget_ended()
            running = list(self._running)
            held = await self._in_claims_thread(lambda: self._storage.claims.renew(running))
            await self._in_claims_thread(self._storage.store.set_clock)
            if held is None:
                return
            for batch_id in self._running.keys() - held:
                if not (
                    task := self._running[batch_id][1]
                ).cancelling():  # only once: another cancel would cut short the job's clean-up
                    task.cancel("its lease is over")
            await self._begin(job)
            self._keep_house_beside()
            self._logged = ""
        except Exception as exc:  # whatever SQLite or the file system raises: chats continue, and the next look tries again
            if (said := repr(exc)) != self._logged:  # once, and not each second
                logger.exception("the batches in %s cannot be read", self._storage.name)
            self._logged = said

    async def _in_claims_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._claiming, call)

    def _keep_house_beside(self) -> None:
        """Begin the house-keeping unless the last one still runs; raise the error of the last one."""
        if (last := self._house_keeping) is not None and not last.done():
            return
        self._house_keeping = asyncio.create_task(asyncio.to_thread(self._keep_house), name="batch house-keeping")
        if last is not None:
            last.result()

    async def _begin(self, job: Callable[[Batch, Claim], BatchJob]) -> None:
        claims, store = self._storage.claims, self._storage.store
        batches, taken = await self._in_claims_thread(lambda: (store.open_batches(), claims.taken()))
        self._open = batches
        owners = {Owner(batch.owner, batch.key) for batch in batches}
        self._unknown_since = {owner: since for owner, since in self._unknown_since.items() if owner in owners}
        for batch in batches:
            key = "valid" if batch.status == "cancelling" else self._key_of(batch, is_taken=batch.id in taken)
            if key == "ended":
                logger.warning("%s is cancelled: its API key is no longer valid for batches", batch.id)
                await self._in_claims_thread(partial(store.change, batch, partial(_cancelled, now=store.clock.time())))
            if key != "valid" or batch.id in taken or not self._may_begin(batch):
                continue
            if (claim := await self._in_claims_thread(partial(claims.take, batch.id))) is not None:
                self._running[batch.id] = batch, asyncio.create_task(_run(job(batch, claim), claim), name=f"job {batch.id}")

    def _key_of(self, batch: Batch, *, is_taken: bool) -> KeyState:
        """Return the state of the batch's key. A key that was unknown for `_UNKNOWN_S` has ended, unless a process runs the batch by it."""
        owner = Owner(batch.owner, batch.key)
        state = self._state_of_key(owner)
        if state != "unknown" or is_taken:
            self._unknown_since.pop(owner, None)
            return state
        since = self._unknown_since.setdefault(owner, time.monotonic())
        return "ended" if time.monotonic() - since >= _UNKNOWN_S else "unknown"

    def _may_begin(self, batch: Batch) -> bool:
        if batch.id in self._running or self._not_before.get(batch.id, 0.0) > time.monotonic():
            return False
        is_over = self._storage.store.clock.has_passed(batch.expires_at, since=batch.created_at)
        if batch.status == "cancelling" or is_over:
            return True  # such a batch sends no requests any more
        others = [other for other, _ in self._running.values()]
        if batch.status == "validating":  # one at a time: validation takes the interpreter, which also serves chats
            return all(other.status != "validating" for other in others)
        asking = [other.owner for other in others if other.status != "validating"]
        return len(asking) < _MAX_RUNNING and batch.owner not in asking

    def _forget_ended(self) -> None:
        for batch_id, (_, task) in list(self._running.items()):
            if not task.done():
                continue
            del self._running[batch_id]
            self._not_before.pop(batch_id, None)
            if task.cancelled():
                self._not_before[batch_id] = time.monotonic() + _AGAIN_S
                logger.error("%s was cancelled; it is tried again in %g s", batch_id, _AGAIN_S)
            elif isinstance(error := task.exception(), LeaseLost):
                logger.warning("%s continues in another ingress: %s", batch_id, error)
            elif isinstance(error, KeyRefused):  # the next look finds out whether the key is unknown or has ended
                logger.warning("%s stops: %s", batch_id, error.problem)
            elif error is not None:
                self._not_before[batch_id] = time.monotonic() + _AGAIN_S
                logger.error("%s could not continue; it is tried again in %g s", batch_id, _AGAIN_S, exc_info=error)

    def _keep_house(self) -> None:
        FREE_BYTES.set(self._storage.scratch.free_bytes())
        self._storage.scratch.reserve.keep()
        for status, count in self._storage.store.count_batches().items():
            BATCHES.labels(status).set(count)
        if time.monotonic() - self._cleaned_at < _CLEAN_S:
            return
        self._cleaned_at = time.monotonic()
        store = self._storage.store
        files = (
            store.forget_old(ended_before=store.clock.time() - self._settings.keep_s)
            if store.clock.is_settled()
            else store.file_ids()
        )
        self._storage.claims.clean()
        self._storage.contents.sweep(files, {batch.id for batch in store.open_batches()})

    async def _give_up(self) -> None:
        """End the jobs, and then give the claims back. If a job ends too late for `_STOP_S`, its claim ends with the process."""
        tasks = [task for _, task in self._running.values()]
        if self._house_keeping is not None:
            tasks.append(self._house_keeping)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._claiming.shutdown(wait=False)
        self._storage.claims.close()


def _cancelled(batch: Batch, *, now: float) -> Batch:
    return batch.moved("cancelling", now=now) if batch.is_open and batch.status != "cancelling" else batch


async def _run(job: BatchJob, claim: Claim) -> None:
    """Run the job, and give its claim back, whatever ends the job."""
    try:
        await job.run()
    finally:
        with contextlib.suppress(StorageAway):  # the lease ends by itself
            await asyncio.shield(asyncio.to_thread(claim.close))
