"""``serve-app batch run`` reads and writes an object store here: moto's server of S3, by HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.batch.rows import format_of, open_input, rows
from serve_app.batch.urls import beside, open_url, refuse_no_room, shown, write_url
from serve_app.errors import BatchError
from tests.batch.s3_server import s3_url
from tests.batch.service import Service

__all__ = ["s3_url"]
pytestmark = pytest.mark.timeout(240)


def lines_of(url: str) -> list[str]:
    with open_url(url) as file:
        return file.read().decode().splitlines()


def answered(url: str) -> dict[str, str]:
    found = [json.loads(line) for line in lines_of(url)]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in found}


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"}, check=False, timeout=200)
    return done.returncode, done.stderr


def test_a_batch_reads_from_s3_and_writes_to_s3_and_a_mended_input_has_no_errors_any_more(
    s3_url: str, service: Service, tmp_path: Path
) -> None:
    source, output = beside(s3_url, "/in.jsonl"), beside(s3_url, "/out.jsonl")
    options = ("-o", output, "--url", service.url, "--journal", str(tmp_path / "journal"))
    write_url(source, ['{"custom_id": "a", "prompt": "one"}', "{"])
    code, said = run(source, *options)
    assert (code, answered(output)) == (3, {"a": "ONE"}), said
    assert [json.loads(line)["error"]["code"] for line in lines_of(beside(output, ".errors.jsonl"))] == ["invalid_line"]
    write_url(source, ['{"custom_id": "a", "prompt": "one"}', '{"custom_id": "b", "prompt": "two"}'])
    code, said = run(source, *options)
    assert (code, answered(output)) == (0, {"a": "ONE", "b": "TWO"}), said
    with pytest.raises(BatchError, match="cannot be opened"):
        lines_of(beside(output, ".errors.jsonl"))
    assert service.asked == {"one": 1, "two": 1}


def test_a_compressed_object_is_read_by_its_name_before_the_query(s3_url: str) -> None:
    import gzip

    from pyarrow.fs import FileSystem

    url = beside(s3_url, "/in.txt.gz")
    files, path = FileSystem.from_uri(url)
    with files.open_output_stream(path, compression=None) as stored:
        stored.write(gzip.compress(b"one\ntwo\n"))
    with open_input(url) as file:
        assert (format_of(url), [row.value for row in rows(file, "text")]) == ("text", ["one", "two"])


def test_an_output_that_cannot_be_written_is_told_before_anything_is_asked(s3_url: str, service: Service, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    nowhere = s3_url.replace("//batches/", "//no-such-bucket/")
    code, said = run(
        str(tmp_path / "in.txt"), "-o", beside(nowhere, "/o"), "--url", service.url, "--journal", str(tmp_path / "j")
    )
    assert code == 1
    assert "no-such-bucket/files/o.check" in said
    assert "cannot be written" in said
    assert service.asked == {}


def test_lines_that_fail_while_they_are_written_leave_no_half_of_an_object(s3_url: str) -> None:
    def broken() -> Iterator[str]:
        yield "a" * (2 << 20)
        raise BatchError("the journal is gone", "")

    with pytest.raises(BatchError, match="the journal is gone"):
        write_url(url := beside(s3_url, "/half.jsonl"), broken())
    with pytest.raises(BatchError, match="cannot be opened"):
        lines_of(url)
    with pytest.raises(BatchError, match="cannot be opened"):
        lines_of(beside(url, ".part"))


def test_an_output_that_fails_leaves_that_of_an_earlier_run(s3_url: str) -> None:
    def broken() -> Iterator[str]:
        yield "new"
        raise BatchError("the journal is gone", "")

    write_url(url := beside(s3_url, "/kept.jsonl"), ["old"])
    with pytest.raises(BatchError, match="the journal is gone"):
        write_url(url, broken())
    assert lines_of(url) == ["old"]
    write_url(url, ["new"])
    assert lines_of(url) == ["new"]


@pytest.mark.parametrize("url", ["s3://KEY:hidden/of@bucket/in?region=r", "https://h/in?X-Amz-Date=1&X-Amz-Signature=hidden"])
def test_messages_show_no_secret_of_a_url(url: str) -> None:
    with pytest.raises(BatchError, match="its name does not show the format") as raised:
        format_of(url)
    assert "hidden" not in str(raised.value)
    assert "hidden" not in shown(url)
    assert shown("a:b@c.jsonl") == "a:b@c.jsonl"


def test_an_output_by_url_needs_a_journal_and_a_store_that_takes_objects(tmp_path: Path) -> None:
    code, said = run("in.txt", "-o", "s3://bucket/out.jsonl")
    assert code == 2
    assert "name a file of this machine: --output is a URL" in said
    with pytest.raises(BatchError, match=r"give a local file, or a URL that begins with s3:// or gs://"):
        refuse_no_room("https://h/out.jsonl")
