"""This module streams schedule.jsonl and rows.jsonl into columns, and writes the rows as rows.parquet beside them."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtest.errors import UsageError
from loadtest.inputs import open_bytes
from loadtest.judge.columns import SCALARS, Chunked, ColumnsBuilder, RowColumns, ScheduleColumns
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import follows
from loadtest.records import PUT_BACK, ScheduledRequest, TokenCount, read_lines, unreadable
from loadtest.rows_file import read_batches, write_parquet

PARQUET = "rows.parquet"


def read_schedule_columns(path: Path) -> tuple[ScheduleColumns, str]:
    """Read a schedule as `loadtest.plan.schedule.read_schedule` does; return its columns and the SHA-256 of the file.

    Raises:
        UsageError: As there.
    """
    if not path.exists():
        raise UsageError(str(path), f"the schedule is missing; {PUT_BACK}")
    digest = hashlib.sha256()
    return ScheduleColumns.of(_requests(path, digest)), digest.hexdigest()


def _requests(path: Path, digest: Any) -> Iterator[ScheduledRequest]:
    decoder, due_s, number = msgspec.json.Decoder(ScheduledRequest), 0.0, -1
    with open_bytes(path) as file:
        for number, line in enumerate(file):
            digest.update(line)
            if not line.endswith(b"\n"):
                number -= 1
                break
            try:
                request = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise UsageError(f"{path}:{number + 1}", unreadable(line, exc)) from exc
            if not follows(request, number, due_s):
                out = f"id {request.id} at {request.due_s} s is out of order; {PUT_BACK}"
                raise UsageError(f"{path}:{number + 1}", out)
            due_s = request.due_s or due_s
            yield request
        else:
            if number >= 0:
                return
    raise UsageError(f"{path}:{number + 2}", f"the schedule is empty or its last line is cut off; {PUT_BACK}")


def read_columns(run: Path, scenario: Scenario) -> tuple[RowColumns, Callable[[], Iterator[Chunked]]]:
    """Return the rows of a run as columns, in the order of due times, and a function that reads their chunks again.

    rows.parquet is rewritten from rows.jsonl, in a temporary folder if the run's folder is not writable. It is opened once, so that all
    passes read the same rows even if another process rewrites the file.

    Raises:
        UsageError: A row cannot be read.
        OSError: rows.parquet can be written neither to the run's folder, which ``filename`` names, nor to a temporary folder.
    """
    file = _make_parquet(run)
    limits_s = [limit.limit_s for limit in scenario.slo.limits if limit.metric == "itl"]
    builder = ColumnsBuilder(scenario.stall_s, limits_s)
    tokens = run / "tokens.jsonl"
    counted = {count.id: count.tokens for count in read_lines(tokens, TokenCount)} if tokens.exists() else {}
    for batch in read_batches(file, [*SCALARS, "chunk_us", "chunk_tokens"]):
        scalars = {name: batch.column(name).to_pylist() for name in SCALARS}
        if counted:
            pairs = zip(scalars["id"], scalars["retokenized"], strict=True)
            scalars["retokenized"] = [counted.get(number, known) for number, known in pairs]
        builder.add(scalars, _chunked(batch))
    return builder.build(), _Chunks(file)


class _Chunks:
    """A function object that reads the chunks of all rows at each call."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __call__(self) -> Iterator[Chunked]:
        for batch in read_batches(self._file, ["chunk_us", "chunk_tokens"]):
            yield _chunked(batch)


def _make_parquet(run: Path) -> Any:
    """Return rows.parquet, open. A file in a temporary folder is removed at once and exists only while it is open."""
    rows = run / "rows.jsonl"
    try:
        return write_parquet(rows, run / PARQUET)
    except OSError as exc:
        number = exc.errno or errno.EIO
    try:
        with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
            return write_parquet(rows, Path(folder) / PARQUET)
    except OSError as exc:  # report the error of the run's folder; pyarrow's error names no file
        raise OSError(number, os.strerror(number), str(run / PARQUET)) from exc


def _chunked(batch: Any) -> Chunked:
    us, tokens = batch.column("chunk_us"), batch.column("chunk_tokens")
    offsets = us.offsets.to_numpy().astype(np.int64)
    values, counts = us.values.to_numpy()[offsets[0] : offsets[-1]], tokens.flatten().to_numpy()
    return Chunked(values, counts.astype(np.int64), offsets - offsets[0])
