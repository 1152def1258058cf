"""`Bucket` keeps files of several ingresses, in a server that speaks S3 and in a folder."""

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from serve_app.batch import bucket as bucket_module
from serve_app.batch import storage as storage_module
from serve_app.batch.bucket import Bucket
from serve_app.batch.folder import Folder
from serve_app.batch.storage import shared
from serve_app.errors import StorageAway, StorageFailed
from tests.batch.s3_server import s3_url

__all__ = ["s3_url"]


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else f"file://{tmp_path}/shared"


def database() -> str:
    return "database-1"


def bucket_of(
    url: str, scratch: Folder, database: Callable[[], str] = database, has_files: Callable[[], bool] = lambda: False
) -> Bucket:
    return Bucket(url, scratch, database, has_files)


def put(bucket: Bucket, scratch: Folder, file_id: str, content: bytes) -> None:
    part = scratch.part()
    part.write_bytes(content)
    bucket.keep(part, file_id)
    assert not part.exists()


def content_of(bucket: Bucket, file_id: str) -> bytes:
    with bucket.on_disk(file_id) as path:
        content = path.read_bytes()
    return content


def test_a_file_is_read_by_another_ingress_until_it_is_removed(url: str, tmp_path: Path) -> None:
    one, other = Folder(tmp_path / "one"), Folder(tmp_path / "other")
    content = os.urandom(3 << 20)
    put(bucket_of(url, one), one, "file-1", content)
    reader = bucket_of(url, other)
    assert content_of(reader, "file-1") == content
    reader.remove(["file-1", "file-2"])
    for bucket in (reader, bucket_of(url, one)):
        with pytest.raises(FileNotFoundError):
            content_of(bucket, "file-1")
    assert [list((folder.root / "work").iterdir()) for folder in (one, other)] == [[], []], "no copy is left"


def test_old_files_without_a_record_are_swept_and_young_ones_are_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Folder(tmp_path / "scratch")
    bucket = bucket_of(url, scratch)
    bucket.sweep((), ())  # of nothing
    known, lost, foreign = f"file-{'a' * 32}", f"file-{'b' * 32}", "report.parquet"
    for name in (known, lost, foreign):
        put(bucket, scratch, name, b"x")
    bucket.sweep({known}, ())
    assert content_of(bucket, lost) == b"x"
    monkeypatch.setattr(bucket_module, "LEFTOVER_S", -10.0)
    bucket.sweep({known}, ())
    assert content_of(bucket, known) == content_of(bucket, foreign) == b"x"
    with pytest.raises(FileNotFoundError):
        content_of(bucket, lost)
    bucket.remove([known, foreign])


def test_readers_of_one_file_share_one_copy_until_the_last_has_gone(tmp_path: Path) -> None:
    scratch = Folder(tmp_path / "scratch")
    bucket = bucket_of(f"file://{tmp_path}/shared", scratch)
    put(bucket, scratch, "file-1", b"x")
    with bucket.on_disk("file-1") as one:
        with bucket.on_disk("file-1") as other:
            assert (one, list((scratch.root / "work").iterdir())) == (other, [one])
        assert one.read_bytes() == b"x"
    assert list((scratch.root / "work").iterdir()) == []
    bucket.remove(["file-1"])
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            content_of(bucket, "file-1")


def test_a_server_that_is_away_is_told_and_no_copy_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scratch = Folder(tmp_path / "scratch")
    bucket = bucket_of(f"file://{tmp_path}/shared", scratch)
    put(bucket, scratch, "file-1", b"x")
    (tmp_path / "shared" / "file-1").unlink()
    (tmp_path / "shared" / "file-1").mkdir()
    caplog.set_level(logging.WARNING)
    with pytest.raises(StorageAway, match="does not answer; nothing is lost; retry in 5 s"):
        content_of(bucket, "file-1")
    assert "the object store of batches failed" in caplog.text
    assert list((scratch.root / "work").iterdir()) == []


def test_a_scratch_folder_that_is_gone_is_no_lost_file(tmp_path: Path) -> None:
    scratch = Folder(tmp_path / "scratch")
    bucket = bucket_of(f"file://{tmp_path}/shared", scratch)
    put(bucket, scratch, "file-1", b"x")
    shutil.rmtree(scratch.root)
    with pytest.raises(StorageFailed) as failed:
        content_of(bucket, "file-1")
    assert type(failed.value) is StorageFailed


def test_an_option_that_the_client_does_not_know_is_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = bucket_of("s3://bucket/p?regoin=x", Folder(tmp_path / "scratch"))
    with pytest.raises(StorageFailed):
        content_of(bucket, "file-1")
    assert "check ingress.batch.files: Unexpected query parameter in S3 URI: 'regoin'" in caplog.text


def test_the_scratch_of_a_killed_ingress_is_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(storage_module, "_STARTING_S", -10.0)
    killed, alien = tmp_path / "serve-app-batches-killed", tmp_path / "serve-app-batches-alien"
    Folder(killed)  # made the lock file, and holds no lock any more
    alien.mkdir()
    url, files = "postgresql://u@127.0.0.1:9/db", f"file://{tmp_path}/shared"
    one = shared(url, files, lease_s=30.0)
    other = shared(url, files, lease_s=30.0)
    assert [path.exists() for path in (killed, alien, one.scratch.root, other.scratch.root)] == [False, True, True, True]
    for storage in (one, other):
        storage.close()
        assert not storage.scratch.root.exists()


def test_ingresses_of_another_database_are_refused_and_remove_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = Folder(tmp_path / "scratch")
    first, second = bucket_of(url, scratch), bucket_of(url, scratch, lambda: "database-2")
    file_id = f"file-{'c' * 32}"
    put(first, scratch, file_id, b"x")
    monkeypatch.setattr(bucket_module, "LEFTOVER_S", -10.0)
    for ask in (lambda: second.sweep((), ()), lambda: put(second, scratch, "file-2", b"y"), lambda: content_of(second, file_id)):
        with pytest.raises(StorageFailed):
            ask()
    assert "belong to the database database-1, and this one is database-2: give each database a prefix of its own" in caplog.text
    assert content_of(first, file_id) == b"x"
    first.remove([file_id])


def test_a_copy_that_is_lent_outlives_a_sweep_however_old_it_is(tmp_path: Path) -> None:
    scratch = Folder(tmp_path / "scratch")
    bucket = bucket_of(f"file://{tmp_path}/shared", scratch)
    put(bucket, scratch, "file-1", b"x")
    left = scratch.part()
    left.touch()
    with bucket.on_disk("file-1") as held:
        for path in (held, left):
            os.utime(path, (0, 0))
        bucket.sweep((), ())
        assert (content_of(bucket, "file-1"), left.exists()) == (b"x", False)
    assert list((scratch.root / "work").iterdir()) == []


def test_a_database_that_lost_the_race_for_the_marker_stores_and_reads_nothing_after_the_next_sweep(
    url: str, tmp_path: Path
) -> None:
    scratch, known = Folder(tmp_path / "scratch"), ["database-2"]
    winner, loser = bucket_of(url, scratch), bucket_of(url, scratch, lambda: known[-1])
    known.append("database-1")  # both found no marker, and wrote one; the winner's was the last
    put(loser, scratch, "file-1", b"x")
    known.append("database-2")
    for ask in (lambda: loser.sweep((), ()), lambda: put(loser, scratch, "file-2", b"y"), lambda: content_of(loser, "file-1")):
        with pytest.raises(StorageFailed):
            ask()
    assert content_of(winner, "file-1") == b"x"
    winner.remove(["file-1"])


def test_an_empty_marker_counts_as_none(url: str, tmp_path: Path) -> None:
    """A kill between opening and closing it has left it on a shared volume."""
    scratch = Folder(tmp_path / "scratch")
    files, root = FileSystem.from_uri(url)
    files.create_dir(root)
    with files.open_output_stream(f"{root}/serve-app-database"):
        pass
    put(bucket_of(url, scratch), scratch, "file-1", b"x")
    with files.open_input_stream(f"{root}/serve-app-database") as marker:
        assert marker.read() == b"database-1"
    with pytest.raises(StorageFailed):
        content_of(bucket_of(url, scratch, lambda: "database-2"), "file-1")
    bucket_of(url, scratch).remove(["file-1"])


def test_a_marker_for_which_the_volume_has_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, shared_folder = Folder(tmp_path / "scratch"), tmp_path / "shared"
    bucket = bucket_of(f"file://{shared_folder}", scratch)

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(bucket_module, "_sync", refuse)
        with pytest.raises(StorageAway):
            put(bucket, scratch, "file-1", b"x")
    assert list(shared_folder.iterdir()) == []
    put(bucket, scratch, "file-1", b"x")
    assert content_of(bucket, "file-1") == b"x"


def test_a_volume_that_is_not_mounted_for_a_moment_is_away_and_its_files_are_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch, shared_folder = Folder(tmp_path / "scratch"), tmp_path / "shared"
    bucket = bucket_of(f"file://{shared_folder}", scratch)
    put(bucket, scratch, "file-1", b"x")
    shared_folder.rename(tmp_path / "away")
    shared_folder.mkdir()  # the mount point
    for ask in (
        lambda: content_of(bucket, "file-1"),
        lambda: bucket.remove(["file-1"]),
        lambda: put(bucket, scratch, "file-2", b"y"),
        lambda: bucket.sweep({"file-1"}, ()),
        lambda: content_of(bucket, "file-1"),
    ):
        with pytest.raises(StorageAway):
            ask()
    assert list(shared_folder.iterdir()) == []
    assert "mount the volume" in caplog.text
    shared_folder.rmdir()
    (tmp_path / "away").rename(shared_folder)
    assert content_of(bucket, "file-1") == b"x"


def test_a_volume_that_is_not_mounted_when_an_ingress_starts_is_away_too_until_the_volume_or_the_marker_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch, shared_folder = Folder(tmp_path / "scratch"), tmp_path / "shared"
    before = bucket_of(f"file://{shared_folder}", scratch)
    put(before, scratch, "file-1", b"x")
    shared_folder.rename(tmp_path / "away")
    shared_folder.mkdir()
    started = bucket_of(f"file://{shared_folder}", scratch, has_files=lambda: True)
    for ask in (
        lambda: content_of(started, "file-1"),
        lambda: started.remove(["file-1"]),
        lambda: put(started, scratch, "file-2", b"y"),
        lambda: started.sweep({"file-1"}, ()),
        lambda: content_of(before, "file-1"),
    ):
        with pytest.raises(StorageAway):
            ask()
    assert list(shared_folder.iterdir()) == []
    marker = shared_folder / "serve-app-database"
    assert f"removed on purpose, write the text database-1 into {marker}" in caplog.text
    marker.write_text("database-1\n")
    for bucket in (started, before):
        with pytest.raises(FileNotFoundError):
            content_of(bucket, "file-1")
    shutil.rmtree(shared_folder)
    (tmp_path / "away").rename(shared_folder)
    assert content_of(started, "file-1") == b"x"


def test_a_volume_of_another_database_in_the_place_of_ours_is_no_loss_of_our_files(tmp_path: Path) -> None:
    scratch, shared_folder = Folder(tmp_path / "scratch"), tmp_path / "shared"
    bucket = bucket_of(f"file://{shared_folder}", scratch)
    put(bucket, scratch, "file-1", b"x")
    shared_folder.rename(tmp_path / "away")
    put(bucket_of(f"file://{shared_folder}", scratch, lambda: "database-2"), scratch, "file-2", b"y")
    with pytest.raises(StorageAway):
        content_of(bucket, "file-1")
