"""A folder whose disk is full takes no file, and lets its owner delete and cancel."""

import asyncio
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from serve_app.batch.disk_threads import DiskThreads
from serve_app.batch.folder import Folder
from serve_app.batch.journal import Journal, JournalLine
from serve_app.batch.records import Batch, File
from serve_app.batch.sqlite_database import SqliteDatabase
from serve_app.batch.storage import in_folder
from serve_app.batch.store import Store
from serve_app.batch.worker import FREE_BYTES, Worker
from serve_app.config import BatchSettings
from serve_app.errors import BatchError, ConfigError, StorageFull
from tests.batch.test_job import Stored
from tests.chaos.resources import full, small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", 8):
        yield tmp_path / "disk"


def file_of(number: int) -> File:
    now = int(time.time())
    return File(f"file-{number}", "", "in.jsonl", "batch", 6, now, now + 1000)


def told_bytes() -> float:
    (metric,) = FREE_BYTES.collect()
    return metric.samples[0].value


def test_what_makes_room_goes_on_with_the_reserve_and_what_needs_room_is_refused(disk: Path) -> None:
    folder = Folder(disk / "store")
    folder.reserve.keep()
    store, threads = Store(SqliteDatabase(folder.database)), DiskThreads(folder.reserve.free)
    for number in range(3):
        folder.path(f"file-{number}").write_text("prompt")
        store.add_file(file_of(number), limit=1 << 20)
    now = int(time.time())
    batch = Batch("batch_1", "", "file-0", "/v1/completions", "24h", now, now + 1000, 1000)
    store.add_batch(batch, max_open=1)

    async def fill_the_database() -> None:
        for number in range(3, 3000):
            await threads.run(partial(store.add_file, file_of(number), limit=1 << 30))

    async def change_when_full() -> None:
        with pytest.raises(StorageFull):
            await fill_the_database()
        await threads.run_when_full(partial(store.delete_file, "file-1", ""))
        await threads.run_when_full(partial(store.change, batch, lambda b: b.moved("cancelling", now=time.time())))

    with full(disk):
        asyncio.run(change_when_full())
        assert not folder.reserve.free(), "it was given back once"
    assert store.batch("batch_1", "").status == "cancelling"
    assert [file.id for file in store.files("", purpose=None, after=None, limit=5000, oldest_first=True).records][:2] == [
        "file-0",
        "file-2",
    ]


def test_the_reserve_is_taken_again_once_there_is_room_and_the_room_is_told(disk: Path) -> None:
    folder = Folder(disk / "store")
    worker = Worker(BatchSettings(dir=folder.root), in_folder(folder.root))
    with full(disk):
        worker._keep_house()
        assert told_bytes() == 0
        assert not folder.reserve.free()
    worker._keep_house()
    assert told_bytes() > 1 << 20
    assert folder.reserve.free()


def test_the_reserve_is_not_taken_from_a_disk_that_has_little_more(disk: Path) -> None:
    folder = Folder(disk / "store")
    with (disk / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, folder.free_bytes() - (3 << 19))
    folder.reserve.keep()
    assert not folder.reserve.free(), "1.5 MiB are free"
    (disk / "other").unlink()
    folder.reserve.keep()
    assert folder.reserve.free()


def test_two_deletions_at_once_share_the_room_that_one_of_them_made() -> None:
    reserves, deleted = [1], threading.Barrier(2)

    def make_room() -> bool:
        return bool(reserves and reserves.pop())

    def delete() -> str:
        if reserves:
            deleted.wait(10)
            raise OSError(errno.ENOSPC, "full")
        return "deleted"

    async def both() -> list[str]:
        threads = DiskThreads(make_room)
        return list(await asyncio.gather(threads.run_when_full(delete), threads.run_when_full(delete)))

    assert asyncio.run(both()) == ["deleted", "deleted"]


def test_a_batch_whose_disk_fills_in_the_middle_goes_on_once_there_is_room(disk: Path) -> None:
    stored = Stored(disk / "store")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"id": "1", "choices": [{"text": "a" * 50_000}]})

    with full(disk), pytest.raises((BatchError, OSError, sqlite3.Error)):
        asyncio.run(stored.job(answer).run())
    assert stored.batch.status == "in_progress"
    asyncio.run(stored.job(answer).run())
    assert (stored.batch.status, stored.batch.completed, stored.batch.failed) == ("completed", 2, 0)


def test_an_ingress_that_starts_on_a_full_folder_opens_it_with_the_reserve(disk: Path) -> None:
    stored = Stored(disk / "store")
    stored.folder.reserve.keep()
    stored.storage.close()  # removes the files beside the database, for which opening it again needs room
    with full(disk):
        storage = in_folder(disk / "store")
        assert storage.store.batch("batch_1", "").status == "in_progress"
        storage.close()
        assert not storage.scratch.reserve.free(), "opening the database has taken it"
    with full(disk), pytest.raises(ConfigError) as refused:
        in_folder(disk / "store")
    assert "make room on its disk" in refused.value.hint
    assert "remove" not in refused.value.hint


def test_a_journal_whose_disk_is_full_tells_no_result_that_it_has_lost(disk: Path) -> None:
    journal = Journal(disk / "journal", notes_recorded=True)
    journal.see("kept", "digest", again=False)
    journal.record("kept", "answer", failed=False)
    journal.see("seen", "digest", again=False)
    journal.commit()
    with full(disk):
        journal.see("new", "digest", again=False)
        journal.record("seen", "x" * 20_000, failed=False)
        journal.record("new", "x" * 20_000, failed=True)
        for _ in range(2):
            with pytest.raises(BatchError, match="make room and run the same command"):
                journal.commit()
        assert journal.recorded(2, max_chars=100) == [JournalLine("kept", "digest", False, "answer")]
        journal.forget_recorded(1)
        assert journal.recorded(2, max_chars=100) == []
    journal.close()
