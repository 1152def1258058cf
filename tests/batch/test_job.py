"""`BatchJob` runs one batch from its input to its end here, without an ingress: cancelled, expired, or with lost files."""

import asyncio
import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve_app.batch import job, worker
from serve_app.batch.claims import FolderClaim
from serve_app.batch.clock import BatchClock
from serve_app.batch.job import BatchJob
from serve_app.batch.journal import Journal
from serve_app.batch.output import write_lines
from serve_app.batch.records import Batch, File, Owner
from serve_app.batch.storage import in_folder
from serve_app.batch.worker import Worker
from serve_app.config import BatchSettings
from serve_app.errors import BatchError, JournalBroken

CHAT = "/v1/chat/completions"


class Stored:
    """A folder with one batch, in progress, of one line for each of ``models``."""

    def __init__(self, root: Path, models: tuple[str, ...] = ("tiny", "tiny")) -> None:
        self.settings = BatchSettings(dir=root)
        self.storage = in_folder(root)
        self.folder, self.store = self.storage.scratch, self.storage.store
        bodies = [{"model": model, "messages": [{"role": "user", "content": "a"}]} for model in models]
        lines = [{"custom_id": f"id-{i}", "method": "POST", "url": CHAT, "body": body} for i, body in enumerate(bodies)]
        self.folder.path("file-1").write_text("".join(json.dumps(line) + "\n" for line in lines))
        now = int(time.time())
        self.store.add_file(File("file-1", "", "in.jsonl", "batch", 10, now, now + 1000), limit=1 << 20)
        self.store.add_batch(Batch("batch_1", "", "file-1", CHAT, "24h", now, now + 86400, 3600), max_open=1)
        by_model = Counter(models)
        self.store.change(self.batch, lambda batch: batch.moved("in_progress", now=now, total=len(models), lines=by_model))

    @property
    def batch(self) -> Batch:
        return self.store.batch("batch_1", "")

    def cancel(self) -> None:
        self.store.change(self.batch, lambda batch: batch.moved("cancelling", now=time.time()))

    def job(self, answer: Callable[[httpx.Request], Any]) -> BatchJob:
        def transport(owner: Owner) -> httpx.AsyncBaseTransport:
            return httpx.MockTransport(answer)

        claim = self.storage.claims.take("batch_1")
        assert claim is not None
        return BatchJob(self.batch, self.settings, self.storage, claim, models=["tiny"], transport=transport)


def answered(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"id": "1", "choices": []})


def test_requests_that_somebody_else_cancels_leave_the_batch_to_its_next_run(tmp_path: Path) -> None:
    stored = Stored(tmp_path)

    def cancelled(_: httpx.Request) -> httpx.Response:
        raise asyncio.CancelledError

    with pytest.raises(BatchError, match="the requests of batch_1 were cancelled, and its window is not over"):
        asyncio.run(stored.job(cancelled).run())
    assert stored.batch.status == "in_progress"
    asyncio.run(stored.job(answered).run())
    assert (stored.batch.status, stored.batch.completed) == ("completed", 2)


def test_a_model_without_a_replica_keeps_no_line_of_another_model_waiting(tmp_path: Path) -> None:
    stored = Stored(tmp_path, ("asleep",) * 5 + ("awake",) * 5)
    stored.settings = BatchSettings(dir=tmp_path, concurrency=2)
    asked = Counter[str]()

    def sleeps_until_the_other_has_done_all(request: httpx.Request) -> httpx.Response:
        model = json.loads(request.content)["model"]
        if model == "asleep" and asked["awake"] < 5:
            return httpx.Response(503, headers={"retry-after": "0.1"})
        asked[model] += 1
        return answered(request)

    asyncio.run(asyncio.wait_for(stored.job(sleeps_until_the_other_has_done_all).run(), 20.0))
    batch = stored.batch
    assert (batch.status, batch.completed, asked) == ("completed", 10, {"asleep": 5, "awake": 5})
    assert batch.ended == {"asleep": 5, "awake": 5}
    output = stored.folder.path(batch.output_file_id or "").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in output] == [f"id-{i}" for i in range(10)]  # in the order of the input


def test_what_an_earlier_process_answered_counts_for_its_models(tmp_path: Path) -> None:
    stored = Stored(tmp_path, ("a", "a", "b"))

    def only_a(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["model"] == "a":
            return answered(request)
        raise asyncio.CancelledError

    with pytest.raises(BatchError, match="were cancelled"):
        asyncio.run(stored.job(only_a).run())
    stored.store.change(stored.batch, lambda batch: replace(batch, ended={}))  # as if its process had told nothing
    asyncio.run(stored.job(answered).run())
    assert (stored.batch.completed, stored.batch.ended) == (3, {"a": 2, "b": 1})


def test_each_line_is_taken_by_one_runner_whatever_the_number_of_models(tmp_path: Path) -> None:
    models = tuple(f"m{i}" for i in range(20)) * 2
    stored, asked = Stored(tmp_path, models), Counter[str]()

    def count(request: httpx.Request) -> httpx.Response:
        asked[json.loads(request.content)["model"]] += 1
        return answered(request)

    asyncio.run(stored.job(count).run())
    assert (stored.batch.status, asked) == ("completed", Counter(models))
    assert stored.batch.ended == Counter(models)


def test_a_job_that_is_given_up_while_its_requests_end_does_not_go_on(tmp_path: Path) -> None:
    stored = Stored(tmp_path)

    async def give_up() -> None:
        ending = asyncio.Event()

        async def slow_to_end(_: httpx.Request) -> httpx.Response:
            stored.cancel()
            try:
                return await asyncio.Event().wait()  # type: ignore[return-value]
            finally:
                ending.set()
                await asyncio.sleep(0.2)

        stored.settings = BatchSettings(dir=tmp_path, concurrency=1)
        task = asyncio.create_task(stored.job(slow_to_end).run())
        await ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert stored.batch.status == "cancelling"


def test_a_batch_that_ended_before_its_claim_is_left_alone(tmp_path: Path) -> None:
    stored, asked = Stored(tmp_path), [0]

    def count(request: httpx.Request) -> httpx.Response:
        asked[0] += 1
        return answered(request)

    late = stored.job(count)
    asyncio.run(stored.job(answered).run())
    ended = stored.batch
    asyncio.run(late.run())
    assert (asked, stored.batch) == ([0], ended)


def test_a_batch_that_ends_elsewhere_is_asked_no_further(tmp_path: Path) -> None:
    stored = Stored(tmp_path)

    async def never(_: httpx.Request) -> httpx.Response:
        if stored.batch.is_open:
            stored.store.change(stored.batch, lambda batch: batch.moved("failed", now=time.time()))
        return await asyncio.Event().wait()  # type: ignore[return-value]

    asyncio.run(asyncio.wait_for(stored.job(never).run(), 30.0))
    assert stored.batch.status == "failed"


def test_an_answer_with_half_a_surrogate_pair_is_an_answer_like_others(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    asyncio.run(stored.job(lambda _: httpx.Response(200, content=b'{"id": "\\ud800"}')).run())
    batch = stored.batch
    assert (batch.status, batch.completed, batch.output_file_id is None) == ("completed", 2, False)
    output = stored.folder.path(batch.output_file_id or "").read_text()
    assert [json.loads(line)["response"]["body"] for line in output.splitlines()] == [{"id": "\ud800"}] * 2


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("code", ["input_lost", "journal_lost"])
def test_a_batch_whose_input_or_journal_is_lost_ends_with_the_reason(tmp_path: Path, code: str, is_cancelled: bool) -> None:
    stored = Stored(tmp_path)
    if code == "input_lost":
        stored.folder.path("file-1").unlink()
    else:
        stored.folder.journal("batch_1").write_text("no database" * 100)
    if is_cancelled:
        stored.cancel()
    asyncio.run(stored.job(answered).run())
    assert stored.batch.status == ("cancelled" if is_cancelled else "failed")
    assert [error.code for error in stored.batch.errors] == [code]
    assert not stored.folder.journal("batch_1").exists()


def test_a_job_that_is_given_up_while_it_writes_its_output_ends_when_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, writes, may_write = Stored(tmp_path), threading.Event(), threading.Event()

    def slow(path: Path, lines: Iterable[str]) -> int:
        writes.set()
        assert may_write.wait(60.0)
        return write_lines(path, lines)

    monkeypatch.setattr(job, "write_lines", slow)

    async def give_up() -> bool:
        task = asyncio.create_task(stored.job(answered).run())
        while not writes.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
        ended_early = task.done()
        may_write.set()
        await asyncio.wait([task])
        return ended_early

    assert asyncio.run(give_up()) is False
    assert stored.batch.status == "completed"


def test_a_job_that_was_cancelled_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, runs, run = Stored(tmp_path), [0], BatchJob.run

    async def cancelled_at_first(job: BatchJob) -> None:
        runs[0] += 1
        if runs[0] == 1:
            raise asyncio.CancelledError
        await run(job)

    monkeypatch.setattr(BatchJob, "run", cancelled_at_first)
    monkeypatch.setattr(worker, "_AGAIN_S", 0.0)

    async def work() -> None:
        working = Worker(stored.settings, stored.storage)
        working.start(answer, lambda _: ["tiny"])
        while stored.batch.is_open and runs[0] < 5:
            await asyncio.sleep(0.05)
        await working.stop()

    async def answer(scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        await JSONResponse({"id": "1", "choices": []})(scope, receive, send)

    asyncio.run(asyncio.wait_for(work(), 30.0))
    assert stored.batch.status == "completed"


def test_claims_are_renewed_while_the_house_is_kept_and_all_threads_of_jobs_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, may_end, renewed = Stored(tmp_path), threading.Event(), [0]
    begun: list[str] = []
    claims, working = stored.storage.claims, Worker(stored.settings, stored.storage)
    renew = claims.renew

    def count(running: Collection[str]) -> Collection[str] | None:
        renewed[0] += 1
        return renew(running)

    async def wait_in_all_threads(job: BatchJob) -> None:
        await asyncio.gather(*(asyncio.to_thread(may_end.wait, 60.0) for _ in range(40)))

    def keep_house() -> None:
        begun.append("house-keeping")
        may_end.wait(60.0)

    monkeypatch.setattr(claims, "renew", count)
    monkeypatch.setattr(worker, "_LOOK_S", 0.05)
    monkeypatch.setattr(working, "_keep_house", keep_house)
    monkeypatch.setattr(BatchJob, "run", wait_in_all_threads)

    async def work() -> None:
        working.start(answer, lambda _: ["tiny"])
        while renewed[0] < 5:
            await asyncio.sleep(0.02)
        may_end.set()
        await working.stop()

    async def answer(scope: Scope, receive: Receive, send: Send, owner: Owner) -> None: ...

    asyncio.run(asyncio.wait_for(work(), 10.0))
    assert len(begun) <= 2, "one after the other"


def test_a_job_whose_lease_is_lost_is_cancelled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, looks, cancels = Stored(tmp_path), [0], [0]
    claims, working = stored.storage.claims, Worker(stored.settings, stored.storage)

    def lost(running: Collection[str]) -> Collection[str]:
        looks[0] += 1
        return ()

    async def slow_to_end(job: BatchJob) -> None:
        while True:
            try:
                await asyncio.sleep(0.5 if cancels[0] else 60.0)
                return
            except asyncio.CancelledError:
                cancels[0] += 1

    monkeypatch.setattr(claims, "renew", lost)
    monkeypatch.setattr(worker, "_LOOK_S", 0.05)
    monkeypatch.setattr(BatchJob, "run", slow_to_end)

    async def work() -> None:
        working.start(answer, lambda _: ["tiny"])
        while looks[0] < 6:
            await asyncio.sleep(0.02)
        seen = cancels[0]
        await working.stop()
        assert seen == 1

    async def answer(scope: Scope, receive: Receive, send: Send, owner: Owner) -> None: ...

    asyncio.run(asyncio.wait_for(work(), 10.0))


def test_an_output_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "a"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_lines(tmp_path / "out", lines())
    assert list(tmp_path.iterdir()) == []


def test_a_journal_tells_what_was_recorded_by_lines_and_by_size_and_only_if_it_is_asked_to(tmp_path: Path) -> None:
    results = {"a": "x" * 50, "b": "x" * 50, "c": "x" * 500, "d": "x"}
    told = []
    with Journal(tmp_path / "told", notes_recorded=True) as noting, Journal(tmp_path / "silent") as silent:
        for journal in (noting, silent):
            for key, result in results.items():
                journal.see(key, "digest", again=False)
                journal.record(key, result, failed=False)
        assert silent.recorded(10, max_chars=1000) == []
        assert len(noting.recorded(1, max_chars=1000)) == 1
        while lines := noting.recorded(10, max_chars=100):
            told.append([line.key for line in lines])
            noting.forget_recorded(len(lines))
    assert told == [["a", "b"], ["c"], ["d"]]


def test_a_damaged_copy_of_a_shared_journal_leaves_the_batch_to_its_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path)
    stored.folder.journal("batch_1").write_text("no database" * 100)
    monkeypatch.setattr(FolderClaim, "fence", 1)
    with pytest.raises(JournalBroken):
        asyncio.run(stored.job(answered).run())
    assert stored.batch.status == "in_progress"


def test_an_output_is_durable_before_the_journal_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, synced, fsync = Stored(tmp_path), [], os.fsync

    def note(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((name.suffix or name.name, stored.folder.journal("batch_1").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    asyncio.run(stored.job(answered).run())
    assert synced == [(".part", True), ("work", True), (".part", True), ("files", True)]
    assert not stored.folder.journal("batch_1").exists()


def test_a_clock_that_is_wrong_for_a_while_neither_expires_a_batch_nor_removes_a_file(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    wrong_by = 0.0
    stored.store.clock = BatchClock(lambda: time.time() + wrong_by)

    def answer_while_the_clock_is_wrong(request: httpx.Request) -> httpx.Response:
        nonlocal wrong_by
        wrong_by = 40 * 86_400.0
        return answered(request)

    asyncio.run(stored.job(answer_while_the_clock_is_wrong).run())
    assert (stored.batch.status, stored.batch.completed) == ("completed", 2)
    kept = stored.store.forget_old(ended_before=stored.store.clock.time() - 30 * 86_400)
    assert {"file-1", stored.batch.output_file_id} == kept
    assert stored.batch.status == "completed"
