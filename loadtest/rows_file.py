"""This module writes and reads rows.jsonl as Parquet, for readers of many rows: one column per field, by due time, in a stream.

The lines of rows.jsonl are recorded and sealed; a Parquet file cannot be appended to line by line and survive a crash. rows.parquet is
made from the lines whenever a run is analysed, so the two always agree. Its columns are those of `loadtest.records.Row`, except that
``chunks`` is two lists, ``chunk_us`` (microseconds after ``sent_s``) and ``chunk_tokens``, and ``text`` is left out.
"""

from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from loadtest.errors import UsageError
from loadtest.inputs import open_bytes
from loadtest.records import Row, part_of, unreadable

BATCH_ROWS = 1024
"""Rows in memory at a time: with 128 chunks each, 25 MB of Python objects while they are written, 2 MB when they are read."""

_FLOATS = ("due_s", "sent_s", "connected_s", "headers_s", "first_s", "last_s", "end_s", "retry_after_s")
_COUNTS = ("num_coalesced", "prompt_tokens", "output_tokens", "retokenized")
_WORDS = ("state", "reason", "finish_reason")
_TEXTS = ("text_sha256", "server_id")
SCHEMA = pa.schema(
    [("id", pa.int64()), ("worker", pa.int32()), ("status", pa.int16())]
    + [(name, pa.float64()) for name in _FLOATS]
    + [(name, pa.int64()) for name in _COUNTS]
    + [(name, pa.string()) for name in (*_WORDS, *_TEXTS)]
    + [("chunk_us", pa.list_(pa.int64())), ("chunk_tokens", pa.list_(pa.int32()))]
)


class _Key(msgspec.Struct):
    id: int
    due_s: float


class _Lines:
    """The begin of each line of rows.jsonl, and its request's due time: 24 bytes per row."""

    def __init__(self, path: Path) -> None:
        self.offsets, self.due_s = array("q"), array("d")
        decoder, at = msgspec.json.Decoder(_Key), 0
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if line != b"\n":
                    try:
                        self.due_s.append(decoder.decode(line).due_s)
                    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                        if not line.endswith(b"\n"):
                            return  # cut off by a crash
                        raise UsageError(f"{path}:{number}", unreadable(line, exc)) from exc
                    self.offsets.append(at)
                at += len(line)

    def in_order_of_due(self) -> npt.NDArray[np.int64]:
        order = np.argsort(np.frombuffer(self.due_s), kind="stable") if self.due_s else np.empty(0, dtype=np.int64)
        return np.frombuffer(self.offsets, dtype=np.int64)[order] if self.offsets else np.empty(0, dtype=np.int64)


def write_parquet(rows: Path, to: Path) -> Any:
    """Write the rows of a rows.jsonl, if there is one, as Parquet; a last line that was cut off by a crash is left out.

    Returns:
        The file, open for `read_batches`. Its content stays the same if another process replaces or removes the file of this name.
    Raises:
        UsageError: A line that is not the last one cannot be read; the message has its number.
        OSError: The file cannot be written.
    """
    part = part_of(to)
    try:
        _write(rows, part)
        file = pa.OSFile(str(part))
        part.replace(to)
        return file
    finally:
        if part.is_file():
            part.unlink()


def _write(rows: Path, part: Path) -> None:
    with parquet.ParquetWriter(part, SCHEMA, compression="zstd", use_dictionary=list(_WORDS)) as writer:
        for batch in _batches(rows) if rows.exists() else ():
            writer.write_table(pa.Table.from_batches([_record_batch(batch)]))


def _batches(path: Path) -> Iterator[list[Row]]:
    offsets = _Lines(path).in_order_of_due()
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as file:
        for first in range(0, offsets.size, BATCH_ROWS):
            batch = []
            for offset in offsets[first : first + BATCH_ROWS].tolist():
                file.seek(offset)
                line = file.readline()
                try:
                    batch.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise UsageError(f"{path} at byte {offset}", unreadable(line, exc)) from exc
            yield batch


def _record_batch(rows: list[Row]) -> Any:
    starts = np.cumsum([0, *(len(row.chunks) for row in rows)]).astype(np.int32)
    flat = chain.from_iterable(chain.from_iterable(row.chunks for row in rows))
    pairs = np.fromiter(flat, dtype=np.float64, count=2 * int(starts[-1])).reshape(-1, 2)
    chunk_us, chunk_tokens = np.rint(pairs[:, 0] * 1000).astype(np.int64), pairs[:, 1].astype(np.int32)
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names if "chunk" not in name}
    arrays = [pa.array(columns[name], type=SCHEMA.field(name).type) for name in columns]
    lists = (pa.ListArray.from_arrays(pa.array(starts), pa.array(values)) for values in (chunk_us, chunk_tokens))
    return pa.RecordBatch.from_arrays([*arrays, *lists], schema=SCHEMA)


def read_batches(file: Any, columns: list[str]) -> Iterator[Any]:
    """Yield `pyarrow.RecordBatch` with these columns, in the order of due times, `BATCH_ROWS` rows at most. The file stays open."""
    with parquet.ParquetFile(file, pre_buffer=False) as table:
        yield from table.iter_batches(batch_size=BATCH_ROWS, columns=columns, use_threads=False)
