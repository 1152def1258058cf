"""``serve-app batch run`` checks its options, and says how long it still takes."""

import os
from pathlib import Path

import pytest

from serve_app.batch.runner import Progress
from serve_app.cli.batch import _Files, _left, _share_read
from serve_app.core.fair_tags import BACKGROUND_PRIORITY
from serve_app.errors import BatchError
from tests.batch.service import Service
from tests.batch.test_batch import Batch, prompts


def test_lines_in_the_background_have_the_priority_of_batches(service: Service, tmp_path: Path) -> None:
    batch = Batch(service, tmp_path, prompts(1))
    assert batch.run("--priority", "background")[0] == 0
    assert [body["priority"] for body in service.bodies] == [BACKGROUND_PRIORITY]


@pytest.mark.parametrize(
    ("kept", "answered", "share", "said"),
    [
        (0, 100, 0.25, ", about 0:00:30 left"),  # 300 lines are left, at 10 a second
        (100, 100, 0.5, ", about 0:00:20 left"),  # 200 are, and lines of before took no time
        (0, 1, 1 / 36001, ", about 100:00:00 left"),
        (0, 0, 0.5, ""),
        (0, 100, 0.0, ""),
        (0, 1, 1.0, ""),  # of a small file all is read at once
    ],
)
def test_what_is_left_is_told_by_the_bytes_that_were_read(kept: int, answered: int, share: float, said: str) -> None:
    took_s = 10.0
    assert _left(Progress(kept=kept, answered=answered), took_s, share) == said


@pytest.mark.parametrize(("count", "said"), [(1, "1 line answered: "), (2, "2 lines answered: ")])
def test_answered_lines_are_counted(service: Service, tmp_path: Path, count: int, said: str) -> None:
    batch = Batch(service, tmp_path, prompts(count))
    code, printed = batch.run()
    assert (code, said in printed) == (0, True)


def test_the_share_of_a_file_is_known_of_plain_local_ones_alone(tmp_path: Path) -> None:
    (path := tmp_path / "in.txt").write_bytes(b"one\ntwo\n")
    with path.open("rb") as file:
        file.readline()
        assert (_share_read(file, str(path)), _share_read(file, "s3://b/in.txt")) == (0.5, 0.0)


def test_an_output_that_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for output in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(BatchError, match=f"^--output is '{output}', which is not a regular file; name a file"):
            _Files(str(output), tmp_path / "journal").refuse_to_write("in.txt")
    (tmp_path / "answers").touch()
    _Files(str(tmp_path / "answers"), tmp_path / "journal").refuse_to_write("in.txt")


@pytest.mark.parametrize(
    ("source", "output", "journal", "said"),
    [
        ("in.txt", "s3://b/out?region=r", "./in.txt", "INPUT is in.txt, which this command writes"),
        ("file://in.txt", "s3://b/out", "in.txt", "INPUT is in.txt, which this command writes"),
        ("s3://b/out?region=q", "s3://b/out?region=r", "j", "INPUT is s3://b/out?region=r, which this command writes"),
        ("https://h/in.txt", "out", "./out", "--output and --journal are both out"),
        ("in.txt", "out", "out.errors.jsonl", "the file of errors and --journal are both out.errors.jsonl"),
        ("in.txt", "out", "out.journal", None),
    ],
)
def test_one_file_for_two_is_refused(source: str, output: str, journal: str, said: str | None) -> None:
    files = _Files(output, Path(journal))
    if said is None:
        files._refuse_one_for_two(source)
        return
    with pytest.raises(BatchError) as raised:
        files._refuse_one_for_two(source)
    assert str(raised.value) == f"{said}; choose another --output or --journal"
