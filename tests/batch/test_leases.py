"""Two ingresses share one batch and one PostgreSQL server, which goes away: one runs the batch, and the other's late writes are refused."""

import logging
import time
from pathlib import Path

import psycopg
import pytest

from serve_app.batch.clock import BatchClock
from serve_app.batch.database import Transaction
from serve_app.batch.journal import JournalLine
from serve_app.batch.postgres import PostgresDatabase
from serve_app.batch.records import Batch, File
from serve_app.batch.storage import Storage, shared
from serve_app.errors import LeaseLost, NotStored, StorageAway, StorageFull, TooManyBatches
from tests.batch.postgres_server import PASSWORD, PostgresServer, database_url, postgres

__all__ = ["database_url", "postgres"]

OWNER = "owner"


@pytest.fixture
def ingresses(database_url: str, tmp_path: Path) -> tuple[Storage, Storage]:
    one, other = (shared(database_url, f"file://{tmp_path}/files", lease_s=30.0) for _ in range(2))
    return one, other


def file_of(file_id: str = "file-1", num_bytes: int = 6) -> File:
    now = int(time.time())
    return File(file_id, OWNER, "in.jsonl", "batch", num_bytes, now, now + 1000)


def add_batch(storage: Storage, batch_id: str = "batch_1", *, max_open: int = 10) -> Batch:
    now = int(time.time())
    storage.store.add_file(file_of(), limit=1 << 20)
    batch = Batch(batch_id, OWNER, "file-1", "/v1/completions", "24h", now, now + 86400, 3600)
    storage.store.add_batch(batch, max_open=max_open)
    return batch


def end_leases(postgres: PostgresServer) -> None:
    """Let the time of all leases be over."""
    postgres.ask("UPDATE leases SET ends_at = now() - interval '1 second'")


def test_records_of_one_ingress_are_those_of_the_other_and_of_their_owner_only(ingresses: tuple[Storage, Storage]) -> None:
    one, other = ingresses
    batch = add_batch(one)
    assert other.store.file("file-1", OWNER) == one.store.file("file-1", OWNER)
    assert other.store.batch(batch.id, OWNER) == batch
    assert other.store.batches(OWNER, after=None, limit=10).records == [batch]
    page = other.store.files(OWNER, purpose="batch", after=None, limit=10, oldest_first=True)
    assert [file.id for file in page.records] == ["file-1"]
    for ask in (lambda: other.store.file("file-1", "stranger"), lambda: other.store.batch(batch.id, "stranger")):
        with pytest.raises(NotStored):
            ask()
    with pytest.raises(StorageFull, match="4096 bytes are stored, and the limit is 10"):
        other.store.add_file(file_of("file-2"), limit=10)
    with pytest.raises(TooManyBatches):
        add_batch(other, "batch_2", max_open=1)
    assert other.store.count_batches()["validating"] == 1
    assert other.store.forget_old(ended_before=0.0) == {"file-1"}


def test_an_ingress_with_a_wrong_clock_goes_by_that_of_the_database(ingresses: tuple[Storage, Storage]) -> None:
    one, other = ingresses
    add_batch(one)
    other.store.clock = BatchClock(lambda: time.time() + 40 * 86_400)
    with pytest.raises(NotStored):
        other.store.file("file-1", OWNER)
    other.store.set_clock()
    assert other.store.file("file-1", OWNER) == one.store.file("file-1", OWNER)
    assert other.store.forget_old(ended_before=other.store.clock.time() - 30 * 86_400) == {"file-1"}


def test_one_ingress_gets_the_lease_and_the_other_gets_it_when_it_is_given_back(ingresses: tuple[Storage, Storage]) -> None:
    one, other = ingresses
    add_batch(one)
    lease = one.claims.take("batch_1")
    assert lease is not None
    assert other.claims.take("batch_1") is None
    lease.close()
    taken = other.claims.take("batch_1")
    assert taken is not None
    assert taken.fence > lease.fence


def test_what_a_runner_sends_after_its_lease_was_taken_over_is_not_kept(
    ingresses: tuple[Storage, Storage], postgres: PostgresServer
) -> None:
    one, other = ingresses
    batch = add_batch(one)
    slow = one.claims.take("batch_1")
    assert slow is not None
    slow.publish([JournalLine("id-1", "digest", False, "answer 1")])
    end_leases(postgres)
    fresh = other.claims.take("batch_1")
    assert fresh is not None
    with pytest.raises(LeaseLost, match="the lease on batch_1 is over"):
        slow.publish([JournalLine("id-2", "digest", False, "late")])
    with pytest.raises(LeaseLost):
        one.store.change(batch, lambda batch: batch.moved("in_progress", now=0.0), (file_of("file-2"),), guard=slow.check)
    slow.close()  # gives back nothing that is the other's
    assert one.claims.take("batch_1") is None
    assert one.store.batch("batch_1", OWNER).status == "validating"
    with pytest.raises(NotStored):
        one.store.file("file-2", OWNER)
    with fresh.open_journal() as journal:
        assert [journal.see(key, "digest", again=False) for key in ("id-1", "id-2")] == ["done", "new"]
        assert list(journal.results(failed=False)) == ["answer 1"]


@pytest.mark.parametrize(
    ("taken", "renewed", "free"),
    [(["batch_2"], ["batch_1", "batch_2"], []), ([], ["batch_1"], ["batch_2"])],
    ids=["another ingress has taken one over", "one runs no batch any more"],
)
def test_a_lease_that_is_over_holds_again_if_it_is_renewed_and_nobody_else_has_it(
    ingresses: tuple[Storage, Storage], postgres: PostgresServer, taken: list[str], renewed: list[str], free: list[str]
) -> None:
    one, other = ingresses
    batch_ids = ["batch_1", "batch_2"]
    for batch_id in batch_ids:
        add_batch(one, batch_id)
        assert one.claims.take(batch_id) is not None
    end_leases(postgres)
    assert [batch_id for batch_id in taken if other.claims.take(batch_id) is None] == []
    assert one.claims.renew(renewed) == {"batch_1"}
    assert [batch_id for batch_id in batch_ids if batch_id not in taken and other.claims.take(batch_id)] == free


def test_a_journal_has_what_was_published_of_a_line_last_and_failures_too(ingresses: tuple[Storage, Storage]) -> None:
    add_batch(ingresses[0])
    lease = ingresses[0].claims.take("batch_1")
    assert lease is not None
    for number in range(120):  # more rows than are read at once
        lease.publish(
            [JournalLine(f"id-{number}", "old", False, "old"), JournalLine("id-x", "digest", True, f"failure {number}")]
        )
    with lease.open_journal() as journal:
        assert journal.see("id-119", "old", again=False) == "done"
        assert journal.see("id-x", "digest", again=False) == "done"
        assert journal.see("id-7", "the line was edited", again=False) == "new"
        assert list(journal.results(failed=True)) == ["failure 119"]
        journal.record("id-7", "new", failed=False)
        assert journal.recorded(10, max_chars=100) == [JournalLine("id-7", "the line was edited", False, "new")]
        journal.forget_recorded(1)
        assert journal.recorded(10, max_chars=100) == []


def test_what_is_kept_of_an_ended_batch_is_removed(ingresses: tuple[Storage, Storage], postgres: PostgresServer) -> None:
    one, other = ingresses
    batch = add_batch(one)
    lease = one.claims.take("batch_1")
    assert lease is not None
    lease.publish([JournalLine("id-1", "digest", False, "answer")])
    one.claims.clean()
    assert postgres.ask("SELECT count(*) FROM answers") == [(1,)], "the batch is open"
    one.store.change(batch, lambda batch: batch.moved("failed", now=0.0), guard=lease.check)
    other.claims.clean()
    assert postgres.ask("SELECT (SELECT count(*) FROM answers) + (SELECT count(*) FROM leases)") == [(0,)]


def test_a_server_that_takes_no_writes_is_away_until_it_takes_them(
    ingresses: tuple[Storage, Storage], postgres: PostgresServer
) -> None:
    one, _ = ingresses
    batch = add_batch(one)
    with psycopg.connect(postgres.url, autocommit=True) as operator:
        operator.execute("ALTER ROLE batches SET default_transaction_read_only = on")
        try:
            other = shared(postgres.url, "file:///nowhere/files", lease_s=30.0)
            with pytest.raises(StorageAway) as away:
                other.store.change(batch, lambda batch: batch.moved("failed", now=0.0))
            assert (away.value.http_status, away.value.retry_after_s) == (503, 5.0)
        finally:
            operator.execute("ALTER ROLE batches RESET default_transaction_read_only")
    other = shared(postgres.url, "file:///nowhere/files", lease_s=30.0)
    other.store.change(batch, lambda batch: batch.moved("failed", now=0.0))
    assert one.store.batch(batch.id, OWNER).status == "failed"


def test_a_server_that_answers_reads_and_takes_no_writes_is_told_once(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def write(transaction: Transaction) -> None:
        transaction.execute("UPDATE leases SET fence = 1", ())

    def write_in_vain(transaction: Transaction) -> None:
        transaction.execute("SET TRANSACTION READ ONLY", ())  # as on a server that another one takes over from
        write(transaction)

    caplog.set_level(logging.INFO, "serve_app.batch.postgres")
    database = PostgresDatabase(database_url)
    for _ in range(3):
        with pytest.raises(StorageAway):
            database.change(write_in_vain)
        assert database.read("SELECT batch FROM leases") == []
    database.change(write)
    database.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the database of batches does not answer",
        "the database of batches answers again",
    ]


def test_a_server_that_is_away_is_told_at_once_and_the_next_call_after_its_return_is_answered(
    ingresses: tuple[Storage, Storage], postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, other = ingresses
    batch = add_batch(one)
    postgres.stop()
    try:
        for storage in ingresses:  # the second one has never had a connection
            with pytest.raises(StorageAway) as away:
                storage.store.batch(batch.id, OWNER)
            assert (away.value.http_status, away.value.retry_after_s) == (503, 5.0)
    finally:
        postgres.start()
    assert one.store.batch(batch.id, OWNER) == other.store.batch(batch.id, OWNER) == batch
    messages = [record.message for record in caplog.records if record.name == "serve_app.batch.postgres"]
    assert [message.partition(":")[0] for message in messages] == [
        *["the database of batches does not answer"] * 2,
        *["the database of batches answers again"] * 2,
    ]
    assert PASSWORD not in caplog.text
    assert PASSWORD.replace("/", "%2F") not in caplog.text


def test_an_ingress_that_starts_while_the_volume_of_known_files_is_away_waits_for_it(
    ingresses: tuple[Storage, Storage], database_url: str, tmp_path: Path
) -> None:
    one, _ = ingresses
    part = one.scratch.part()
    part.write_bytes(b"lines\n")
    one.contents.keep(part, "file-1")
    add_batch(one)
    (tmp_path / "files").rename(tmp_path / "away")
    (tmp_path / "files").mkdir()  # the mount point
    started = shared(database_url, f"file://{tmp_path}/files", lease_s=30.0)
    with pytest.raises(StorageAway), started.contents.on_disk("file-1"):
        pass
    assert list((tmp_path / "files").iterdir()) == []
    (tmp_path / "files").rmdir()
    (tmp_path / "away").rename(tmp_path / "files")
    with started.contents.on_disk("file-1") as path:
        assert path.read_bytes() == b"lines\n"
    started.close()
