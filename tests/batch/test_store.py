"""`Store` keeps files and batches for a limited time."""

import asyncio
import errno
import fcntl
import os
import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.batch.folder import Folder
from serve_app.batch.records import Batch, File
from serve_app.batch.sqlite_database import SqliteDatabase
from serve_app.batch.storage import Storage, in_folder
from serve_app.batch.store import Store
from serve_app.batch.worker import Worker
from serve_app.config import BatchSettings
from serve_app.errors import ConfigError, NotStored, StorageFull

OWNER = "owner"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


@pytest.fixture
def store(folder: Folder) -> Store:
    return Store(SqliteDatabase(folder.database))


@pytest.fixture
def storage(folder: Folder) -> Storage:
    return in_folder(folder.root)


def add(store: Store, folder: Folder, file_id: str, *, expires_in_s: float = 1000.0) -> File:
    now = int(time.time())
    part = folder.part()
    part.write_text(file_id)
    folder.keep(part, file_id)
    file = File(file_id, OWNER, "in.jsonl", "batch", 6, now, now + int(expires_in_s))
    store.add_file(file, limit=1 << 20)
    return file


def new_batch(store: Store, batch_id: str, file: File) -> Batch:
    now = int(time.time())
    batch = Batch(batch_id, OWNER, file.id, "/v1/completions", "24h", now, now + 86400, 3600)
    store.add_batch(batch, max_open=10)
    return batch


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def make_old(*paths: Path) -> None:
    for path in paths:
        path.touch()
        os.utime(path, (time.time() - 7200, time.time() - 7200))


def test_a_file_whose_time_is_over_is_gone_but_stays_for_the_open_batch_that_reads_it(store: Store, folder: Folder) -> None:
    read, other, fresh = (add(store, folder, f"file-{i}") for i in range(3))
    batch = new_batch(store, "batch_1", read)
    for file in (read, other):
        store.add_file(File(file.id, OWNER, file.name, file.purpose, 6, file.created_at, int(time.time()) - 1), limit=1 << 20)
        with pytest.raises(NotStored):
            store.file(file.id, OWNER)
    assert store.forget_old(ended_before=0.0) == {read.id, fresh.id}
    store.change(batch, lambda batch: batch.moved("failed", now=time.time()))
    assert store.forget_old(ended_before=0.0) == {fresh.id}


def test_an_ended_batch_is_forgotten_after_its_time_and_an_open_one_is_not(store: Store, folder: Folder) -> None:
    file = add(store, folder, "file-1")
    ended, running = new_batch(store, "batch_1", file), new_batch(store, "batch_2", file)
    store.change(ended, lambda batch: batch.moved("failed", now=time.time()))
    store.forget_old(ended_before=time.time() - 100)
    assert store.batch(ended.id, OWNER).status == "failed"
    store.forget_old(ended_before=time.time() + 100)
    with pytest.raises(NotStored):
        store.batch(ended.id, OWNER)
    assert store.open_batches() == [running]


def test_what_killed_processes_left_is_swept_when_it_is_old_and_nobodys(store: Store, folder: Folder) -> None:
    file = add(store, folder, "file-1")
    work, files = folder.part().parent, folder.path(file.id).parent
    old = [folder.part(), folder.path("file-lost"), folder.journal("batch_gone"), Path(f"{folder.journal('batch_gone')}-wal")]
    kept = [folder.path(file.id), folder.journal("batch_1"), Path(f"{folder.journal('batch_1')}-wal")]
    make_old(*old, *kept)
    young = folder.part()
    young.touch()
    folder.sweep({file.id}, {"batch_1"})
    assert names(files) == ["file-1"]
    assert names(work) == sorted([young.name, "batch_1.journal", "batch_1.journal-wal"])


def test_a_file_above_the_limit_is_not_noted_whatever_was_checked_before(store: Store) -> None:
    file = File("file-1", OWNER, "in.jsonl", "batch", 6000, 0, 1 << 40)
    store.check_room(6000, limit=10_000)
    store.add_file(file, limit=10_000)
    with pytest.raises(StorageFull, match="6000 bytes are stored, and the limit is 10000"):
        store.add_file(replace(file, id="file-2"), limit=10_000)
    with pytest.raises(NotStored):
        store.file("file-2", OWNER)


def test_files_of_nothing_have_a_limit(store: Store) -> None:
    for number in range(3):
        store.add_file(File(f"file-{number}", OWNER, "in.jsonl", "batch", 0, 0, 1 << 40), limit=3 * 4096)
    with pytest.raises(StorageFull, match="12288 bytes are stored, and the limit is 12288"):
        store.add_file(File("file-3", OWNER, "in.jsonl", "batch", 0, 0, 1 << 40), limit=3 * 4096)


def test_an_owner_has_a_limited_number_of_ended_batches(store: Store, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could fill the disk with records: an input of wrong lines ends its batch at once, with up to 100 errors."""
    monkeypatch.setattr("serve_app.batch.store._MAX_ENDED", 2)
    file = add(store, folder, "file-1")
    running = new_batch(store, "batch_0", file)
    store.add_file(replace(file, id="file-2", owner="stranger"), limit=1 << 20)
    strange = replace(running, id="batch_9", owner="stranger", input_file_id="file-2")
    store.add_batch(strange, max_open=10)
    for batch in (strange, *(new_batch(store, f"batch_{number}", file) for number in range(1, 5))):
        store.change(batch, lambda batch: batch.moved("failed", now=time.time()))
    new_batch(store, "batch_5", file)
    assert [batch.id for batch in store.batches(OWNER, after=None, limit=10).records] == [
        "batch_5",
        "batch_4",
        "batch_3",
        "batch_0",
    ]
    assert [batch.id for batch in store.batches("stranger", after=None, limit=10).records] == ["batch_9"]


def test_a_change_that_fails_changes_nothing(store: Store, folder: Folder) -> None:
    file = add(store, folder, "file-1")
    batch = new_batch(store, "batch_1", file)
    output = File("file-2", OWNER, "out", "batch_output", 1, 0, 1 << 40)
    with pytest.raises(ValueError, match="that is validating does not become completed"):
        store.change(batch, lambda batch: batch.moved("completed", now=0.0), (output,))
    with pytest.raises(NotStored):
        store.file(output.id, OWNER)
    assert store.batch(batch.id, OWNER) == batch


def test_a_batch_is_changed_as_it_is_now_and_not_as_the_caller_knew_it(store: Store, folder: Folder) -> None:
    known = new_batch(store, "batch_1", add(store, folder, "file-1"))
    other_process = Store(SqliteDatabase(folder.database))
    other_process.change(known, lambda batch: batch.moved("cancelling", now=5.0))
    assert store.change(known, lambda batch: batch).status == "cancelling"


def test_of_a_tenants_tokens_of_the_day_the_later_ones_are_kept(store: Store, folder: Folder) -> None:
    assert store.tenant_days() == {}
    store.keep_tenant_days({"red": (20_000, 5), "blue": (20_000, 7)})
    store.keep_tenant_days({"red": (20_000, 4), "blue": (20_001, 1), "green": (20_000, 0)})
    expected = {"red": (20_000, 5), "blue": (20_001, 1), "green": (20_000, 0)}
    assert store.tenant_days() == expected
    assert Store(SqliteDatabase(folder.database)).tenant_days() == expected


def test_a_day_that_a_wrong_clock_has_noted_hides_no_later_one(store: Store) -> None:
    store.keep_tenant_days({"red": (30_000, 5), "blue": (20_001, 7)})
    store.keep_tenant_days({"red": (20_000, 3), "blue": (20_000, 9)})
    assert store.tenant_days() == {"red": (20_000, 3), "blue": (20_001, 7)}


def test_a_folder_that_cannot_be_used_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^ingress\.batch\.dir: .*file/store cannot be written to: Not a directory"):
        Folder(tmp_path / "file" / "store")
    (tmp_path / "batches.sqlite").write_text("no database" * 100)
    with pytest.raises(ConfigError, match=r"^ingress\.batch\.dir: .*batches\.sqlite cannot be used"):
        SqliteDatabase(tmp_path / "batches.sqlite")


@pytest.fixture
def flocked(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the descriptors of the calls of flock, which fails from now on as on a file system without locks."""
    called: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        called.append(descriptor)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    return called


def test_a_folder_without_locks_is_refused_and_a_lock_that_fails_keeps_no_descriptor(folder: Folder, flocked: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^ingress\.batch\.dir: .*lock cannot be locked: No locks available; name a folder"):
        Folder(folder.root)
    with pytest.raises(OSError, match="No locks available"):
        folder.try_lock()
    assert len(flocked) == 2
    for descriptor in flocked:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_error_that_comes_with_each_look_is_logged_once(
    folder: Folder, storage: Storage, flocked: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def look() -> None:
        worker = Worker(BatchSettings(dir=folder.root), storage)
        worker.start(never, lambda _: ["tiny"])
        while len(flocked) < 4:
            worker.wake()
            await asyncio.sleep(0.01)
        await worker.stop()

    asyncio.run(look())
    assert [record.message for record in caplog.records] == [f"the batches in {folder.root} cannot be read"]


async def never(*_: object) -> None:
    raise AssertionError("nothing is asked")


def test_a_folder_that_is_removed_under_a_running_store_is_told_and_nothing_is_written_into_the_void(
    folder: Folder, store: Store
) -> None:
    add(store, folder, "file-1")
    shutil.rmtree(folder.root)
    with pytest.raises(sqlite3.OperationalError, match="was removed while it was in use"):
        store.files(OWNER, purpose=None, after=None, limit=10, oldest_first=True)
    with pytest.raises(sqlite3.OperationalError, match="was removed while it was in use"):
        store.delete_file("file-1", OWNER)
    Folder(folder.root).database.touch()
    with pytest.raises(sqlite3.OperationalError, match="was removed while it was in use"):
        store.count_batches()
