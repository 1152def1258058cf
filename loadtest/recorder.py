"""The recorder writes the files of a run in whole lines, and checks their number against the workers' own counts.

Only Locust's master (or the only process of a local run) writes rows; workers hand their rows over in numbered batches.
`BatchLedger` is pure: a batch that is missing or came twice makes the run invalid.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from loadtest.errors import UsageError
from loadtest.records import Manifest, RunEvent, part_of
from loadtest.seal import SEALS, Seal, Sealed

_ENCODER = msgspec.json.Encoder()


class Batch(msgspec.Struct):
    """The rows that a worker hands over once a second. ``number`` counts from 0 without gaps."""

    worker: int
    number: int
    num_rows: int
    rows: bytes
    """Lines of `loadtest.records.Row`; ``health`` has lines of `loadtest.records.HealthSample`."""
    health: bytes


class End(msgspec.Struct):
    """A worker's last message: the number of batches and rows that it handed over."""

    worker: int
    num_batches: int
    num_rows: int


class BatchLedger:
    """A count of the rows received from each worker, to compare with the worker's own count."""

    def __init__(self, num_workers: int) -> None:
        self._numbers: list[list[int]] = [[] for _ in range(num_workers)]
        self._rows = [0] * num_workers
        self._ends: list[End | None] = [None] * num_workers

    def add(self, batch: Batch) -> None:
        self._numbers[batch.worker].append(batch.number)
        self._rows[batch.worker] += batch.num_rows

    def end(self, end: End) -> None:
        self._ends[end.worker] = end

    def num_rows(self) -> int:
        return sum(self._rows)

    def num_ended(self) -> int:
        return sum(end is not None for end in self._ends)

    def all_ended(self) -> bool:
        return self.num_ended() == len(self._ends)

    def problems(self) -> list[str]:
        """Return one sentence for each worker whose records did not arrive exactly once."""
        found = []
        for worker, (numbers, num_rows, end) in enumerate(zip(self._numbers, self._rows, self._ends, strict=True)):
            if end is None:
                found.append(f"worker {worker} never reported that it was done; {num_rows} of its rows are here")
            elif numbers != list(range(end.num_batches)) or num_rows != end.num_rows:
                came = f"{len(numbers)} batches with {num_rows} rows"
                found.append(f"worker {worker} sent {end.num_batches} batches with {end.num_rows} rows, {came} came")
        return found


class LineFile:
    """A file to which whole lines are appended at once, without a buffer that a crash could cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        """Number of bytes written so far, which ``digest`` covers."""
        self.digest = hashlib.sha256()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, lines: bytes) -> None:
        """Append ``lines``, each of which has a line end, the last one too.

        Raises:
            OSError: The disk is full, for example: the file then ends with the last complete line that fitted. Or the file was removed.
        """
        before, written = os.fstat(self._fd), 0
        if not before.st_nlink:
            raise FileNotFoundError(errno.ENOENT, f"{self.path} was removed during the run")
        try:
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except OSError:
            written = lines.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):  # a device has no length
                os.ftruncate(self._fd, before.st_size + written)
            raise
        finally:
            self.digest.update(memoryview(lines)[:written])
            self.num_bytes += written

    def close(self) -> None:
        os.close(self._fd)


class Recorder:
    """The files of a running run; each is opened for its first line."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._files: dict[str, LineFile] = {}

    def append(self, name: str, lines: bytes) -> None:
        """Append to one of the files that `loadtest.records` lists.

        Raises:
            OSError: As `LineFile.append`.
        """
        if name not in self._files:
            self._files[name] = LineFile(self._out / name)
        self._files[name].append(lines)

    def add(self, batch: Batch) -> None:
        """Append a worker's batch and its seals.

        Raises:
            OSError: As `LineFile.append`.
        """
        self.append("health.jsonl", batch.health)
        self.append("rows.jsonl", batch.rows)
        self.append(SEALS, as_lines(self.seals()))

    def seals(self) -> list[Seal]:
        """Return the seals of the files so far."""
        names: tuple[Sealed, ...] = get_args(Sealed)
        there = [(name, self._files[name]) for name in names if name in self._files]
        return [Seal(name, file.num_bytes, file.digest.hexdigest()) for name, file in there]

    def event(self, event: RunEvent) -> None:
        self.append("events.jsonl", as_lines([event]))

    def sealed(self) -> dict[str, str]:
        """Return the digests of the sealed files for the manifest."""
        return {seal.file: seal.sha256 for seal in self.seals()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def as_lines(records: Sequence[msgspec.Struct]) -> bytes:
    return _ENCODER.encode_lines(records)


def claim(out: Path, *, marker: str = "manifest.json") -> bool:
    """Make the folder of a run with an empty ``marker``, for this process alone. Return whether the folder is new.

    Raises:
        UsageError: The folder is not empty, or cannot be made.
    """
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if not any(out.iterdir()):
            (out / marker).touch(exist_ok=False)  # if two runs start at the same time, one fails here
            return is_new
    except FileExistsError:
        pass
    except OSError as exc:
        raise UsageError(str(out), exc.strerror or str(exc)) from exc
    raise UsageError(str(out), "is not empty, and two runs in one folder would mix; take another --out or remove it")


def give_up(out: Path, names: Sequence[str], *, is_new: bool) -> None:
    """Remove the named files that were made since `claim`, and the folder if `claim` returned ``is_new``; other files stay."""
    with contextlib.suppress(OSError):
        for name in names:
            (out / name).unlink(missing_ok=True)
        if is_new:
            out.rmdir()


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically: readers see the old or the new content.

    Raises:
        OSError: The disk is full, for example; ``filename`` is the path. An old file stays.
    """
    part = part_of(path)
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(exc, OSError):  # the error of a full disk names no file
            exc.filename = str(path)
        raise


def write_json(path: Path, record: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(record)))


def write_manifest(out: Path, manifest: Manifest) -> None:
    write_json(out / "manifest.json", manifest)
