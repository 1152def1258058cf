"""These tests check the files of a run: whole lines in any case, one owner per folder, and a ledger that misses nothing."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import UsageError
from loadtest.recorder import Batch, BatchLedger, End, LineFile, Recorder, as_lines, claim, replace_file, write_manifest
from loadtest.records import HealthSample, Manifest, Row, RunEvent, part_of, read_lines, read_manifest


def a_batch(worker: int, number: int, num_rows: int = 2) -> Batch:
    rows = [Row(id=number * 10 + k, worker=worker, due_s=0.0, state="ok") for k in range(num_rows)]
    health = [HealthSample(float(number), worker, 0.1, 0.001, 0.0, 0, 0, 0)]
    return Batch(worker, number, num_rows, as_lines(rows), as_lines(health))


def filled(numbers: list[int], end: End | None) -> BatchLedger:
    ledger = BatchLedger(1)
    for number in numbers:
        ledger.add(a_batch(0, number))
    if end:
        ledger.end(end)
    return ledger


def test_a_worker_whose_batches_all_came_is_no_problem() -> None:
    ledger = filled([0, 1, 2], End(0, 3, 6))
    assert ledger.all_ended()
    assert ledger.problems() == []


@given(st.lists(st.integers(0, 5), max_size=8).filter(lambda numbers: numbers != [0, 1, 2]))
def test_any_other_batches_than_those_that_were_sent_are_a_problem(numbers: list[int]) -> None:
    assert filled(numbers, End(0, 3, 6)).problems() == [
        f"worker 0 sent 3 batches with 6 rows, {len(numbers)} batches with {2 * len(numbers)} rows came"
    ]


def test_a_worker_that_never_ended_is_a_problem() -> None:
    ledger = BatchLedger(2)
    ledger.add(a_batch(1, 0))
    ledger.end(End(0, 0, 0))
    assert (ledger.num_ended(), ledger.all_ended()) == (1, False)
    assert ledger.problems() == ["worker 1 never reported that it was done; 2 of its rows are here"]


@contextlib.contextmanager
def small_disk() -> Iterator[None]:
    """Files of this process may have 100 bytes: writing more is cut in mid-line and fails, as on a full disk.

    No fixture: pytest itself writes, perhaps to a file, between a test and the end of its fixtures.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "rows.jsonl")
    file.append(b"x" * 39 + b"\n")
    with pytest.raises(OSError, match="too large"), small_disk():
        file.append((b"y" * 29 + b"\n") * 3)
    file.close()
    assert (tmp_path / "rows.jsonl").read_bytes() == b"x" * 39 + b"\n" + (b"y" * 29 + b"\n") * 2


def test_a_device_without_room_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        Recorder(tmp_path).add(a_batch(0, 0))


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for number in range(3):
        recorder.add(a_batch(0, number))
    recorder.event(RunEvent(1.0, "phase", "start"))
    recorder.close()
    assert [row.id for row in read_lines(tmp_path / "rows.jsonl", Row)] == [0, 1, 10, 11, 20, 21]
    assert [sample.t_s for sample in read_lines(tmp_path / "health.jsonl", HealthSample)] == [0.0, 1.0, 2.0]
    assert list(read_lines(tmp_path / "events.jsonl", RunEvent)) == [RunEvent(1.0, "phase", "start")]


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    claim(tmp_path / "new" / "run")
    for taken in (tmp_path / "new" / "run", tmp_path / "new"):
        with pytest.raises(UsageError, match="not empty"):
            claim(taken)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        claim(tmp_path / "file")
    with pytest.raises(UsageError, match="Not a directory"):
        claim(tmp_path / "file" / "run")


def test_a_manifest_is_replaced_in_one_step(tmp_path: Path) -> None:
    manifest = Manifest("running", {}, "", 0, "", "", 0.0, [])
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_file_that_does_not_fit_is_named_and_leaves_no_part(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too large") as caught, small_disk():
        replace_file(tmp_path / "saturate.json", b"x" * 101)
    assert caught.value.filename == str(tmp_path / "saturate.json")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_replace_one_file_write_under_different_names_first(tmp_path: Path) -> None:
    """Else one of them puts the half of the other in its place."""
    parts = {part_of(tmp_path / "summary.json") for _ in range(2)}
    assert len(parts) == 2
    assert {(part.parent, part.suffix) for part in parts} == {(tmp_path, ".part")}
