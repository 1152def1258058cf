"""`rows` reads the rows of an input file: a bad row is yielded with its problem, and reading continues with the next row."""

import csv
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from serve_app.batch.urls import open_url, shown, without_query
from serve_app.errors import BatchError

MAX_ROW_BYTES = 16 << 20
"""Most bytes of one line; the service refuses bodies above `ingress.max_body_bytes`, 10 MiB by default."""
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "text", ".parquet": "parquet"}
_MORE: Any = object()
"""The key of a CSV record's values behind its last column. An object, so that no column has this name."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of an input.

    ``number`` counts from 1: the line in JSONL and text, the line on which the record ends in CSV, the row in Parquet. ``value`` is a
    prompt or a mapping, or None if there is a ``problem``.
    """

    number: int
    value: str | dict[str, Any] | None
    problem: str = ""
    is_refused: bool = False
    """Whether the line was refused unparsed: it is too long, or `ProblemOfLine` refuses it."""


ProblemOfLine = Callable[[bytes], str]
"""A function that returns why a line is refused before it is parsed, such as ``has 20 bytes, limit 10``; "" if it is not refused."""


def any_line(line: bytes) -> str:
    """Refuse no line."""
    return ""


def checked_format(form: str) -> str:
    """Return the format.

    Raises:
        BatchError: There is no such format.
    """
    if form not in FORMATS.values():
        raise BatchError(f"--format is {form!r}", f"give one of {', '.join(sorted(set(FORMATS.values())))}")
    return form


def format_of(name: str) -> str:
    """Return the input's format by its name.

    Raises:
        BatchError: The name has no suffix of a known format.
    """
    stem = Path(without_query(name).rpartition("/")[2])
    suffixes = [suffix for suffix in stem.suffixes if suffix not in _COMPRESSED]
    if not suffixes or suffixes[-1].lower() not in FORMATS:
        raise BatchError(
            f"{shown(name)}: its name does not show the format",
            f"give --format, one of {', '.join(sorted(set(FORMATS.values())))}",
        )
    return FORMATS[suffixes[-1].lower()]


def open_input(name: str) -> BinaryIO:
    """Open a local path or a URL, compressed or not.

    Raises:
        BatchError: The input cannot be opened.
    """
    try:
        return open_url(name) if "://" in name or name.endswith(_COMPRESSED) else Path(name).open("rb")
    except OSError as exc:
        raise BatchError(f"{name} cannot be opened: {exc.strerror or exc}", "give a file that is there and can be read") from exc


def rows(file: BinaryIO, form: str, *, name: str = "the input", problem_of_line: ProblemOfLine = any_line) -> Iterator[InputRow]:
    """Yield the rows. Empty lines of text and JSONL are skipped.

    Args:
        name: The file's name in errors.
        problem_of_line: Called with each line of text and JSONL.

    Raises:
        BatchError: The file as a whole cannot be read.
    """
    try:
        match form:
            case "csv":
                yield from _csv_rows(file)
            case "parquet":
                yield from _parquet_rows(file)
            case _:
                yield from _lines(file, problem_of_line, is_json=form == "jsonl")
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:  # an error of the disk; errors of gzip and bz2 have no number
            raise
        raise BatchError(
            f"{shown(name)} cannot be decompressed: {exc}", "get or compress it again, or correct its suffix"
        ) from exc


def _lines(file: BinaryIO, problem_of_line: ProblemOfLine, *, is_json: bool) -> Iterator[InputRow]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield InputRow(number, None, f"is longer than {MAX_ROW_BYTES >> 20} MiB", is_refused=True)
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if problem := problem_of_line(line):
            yield InputRow(number, None, problem, is_refused=True)
        elif line.strip():
            yield _of_line(number, line, is_json=is_json)


def _of_line(number: int, line: bytes, *, is_json: bool) -> InputRow:
    try:
        text = line.decode()
    except UnicodeDecodeError as exc:
        return InputRow(number, None, f"is not UTF-8 at byte {exc.start}")
    if not is_json:
        return InputRow(number, text.rstrip("\r\n"))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return InputRow(number, None, f"is not JSON: {exc}")
    if not isinstance(value, str | dict):
        return InputRow(number, None, f"is a JSON {type(value).__name__}, neither an object nor a text")
    return InputRow(number, value)


def _csv_rows(file: BinaryIO) -> Iterator[InputRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.DictReader(TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""), restkey=_MORE, restval=None)
    try:
        for record in reader:
            yield _of_record(reader.line_num, record, len(reader.fieldnames or ()))
    except csv.Error as exc:
        raise BatchError(
            f"line {reader.line_num} of the CSV: {exc}", "a quote may be open; records end at a line outside quotes"
        ) from exc


def _of_record(number: int, record: dict[Any, Any], num_columns: int) -> InputRow:
    if _MORE in record or None in record.values():
        return InputRow(number, None, f"has another number of columns than the first line, which has {num_columns}")
    text = "".join(record.values())
    if any("\udc80" <= character <= "\udcff" for character in text):
        return InputRow(number, None, "is not UTF-8")
    record.pop("", None)  # pandas writes its index without a name
    return InputRow(number, record)


def _parquet_rows(file: BinaryIO) -> Iterator[InputRow]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as exc:
        raise BatchError(
            "Parquet needs pyarrow, which is not installed", "install pyarrow, or convert the input to JSONL"
        ) from exc
    try:
        values: Iterable[Any] = (record for batch in ParquetFile(file).iter_batches(1024) for record in batch.to_pylist())
        for number, value in enumerate(values, 1):
            yield InputRow(number, {name: held for name, held in value.items() if held is not None})
    except ArrowException as exc:
        raise BatchError(f"not readable as Parquet: {exc}", "check the file, or give --format") from exc
