"""The decision log records, every second, what the autoscaler saw and decided: JSON lines in Serve's log folder on the head node.

Every `SNAPSHOT_EVERY` records, a record also holds all that the scaler remembered. So any longer piece of the log can be decided again,
exactly. The log takes about 1 KB per second and model; `MAX_FILES` files of `MAX_FILE_BYTES` are kept. A thread of its own writes: the
policy neither waits for a disk nor fails with it. Records that could not be written are missing, which their numbers show.
"""

import copy
import gzip
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.autoscaling.decision import Decision
from serve_app.autoscaling.fleet import FleetObservation, FleetScaler

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller: its log is where people look

SNAPSHOT_EVERY = 600
MAX_FILES, MAX_FILE_BYTES = 4, 64 << 20
LONGEST_TICK_S = 10.0
"""A longer time between two records is a gap: the controller was away, or a clock was set."""
QUEUED = 1000
"""Records that wait for the disk; more are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One observation and the decisions from it."""

    number: int
    """Consecutive in one controller."""
    time: float
    """Seconds since the epoch."""
    seen: FleetObservation
    decided: dict[str, Decision]
    """Model -> decision; `INGRESSES` is the key of the ingresses."""
    scaler: FleetScaler | None = None
    """All that the scaler remembered before this observation."""


_RECORD, _SCALER, _DECISION = TypeAdapter(Record), TypeAdapter(FleetScaler), TypeAdapter(Decision)
_TIME = re.compile(r'"time":([0-9.e+]+)')


class DecisionLog:
    """Writes one application's log. ``path`` None: nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._writer = None if path is None else _writer(path)
        self._number = 0

    def observe(self, scaler: FleetScaler, seen: FleetObservation, *, time: float) -> dict[str, Decision]:
        """Return and log the decisions of ``scaler``. ``time``: seconds since the epoch. A new log begins with a snapshot."""
        number, self._number = self._number, self._number + 1
        snapshot = _SCALER.dump_json(scaler, by_alias=True) if self._writer is not None and number % SNAPSHOT_EVERY == 0 else b""
        decided = scaler.observe(seen)
        if self._writer is not None:
            record = Record(number=number, time=time, seen=seen, decided=decided)
            line = _RECORD.dump_json(record, exclude_defaults=True, by_alias=True)
            if snapshot:  # with all fields: the code that reads the log may have other defaults
                line = b'%b,"scaler":%b}' % (line[:-1], snapshot)
            self._writer.info("%s", line.decode())
        return decided


class _QueueHandler(QueueHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # the library's name
        """Drop the record: the queue is full."""


class _FileHandler(RotatingFileHandler):
    fails = False

    def emit(self, record: logging.LogRecord) -> None:
        failed, self.fails = self.fails, False
        super().emit(record)
        if self.fails and not failed:
            logger.error("decisions of the autoscaler are not logged while %s cannot be written", self.baseFilename)

    def handleError(self, record: logging.LogRecord) -> None:  # the library's name
        """Note that the disk is full, or the folder is gone."""
        self.fails = True


@cache
def _writer(path: Path) -> logging.Logger:
    """Return this process's only writer of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = logging.Logger(str(path))  # not among the process's named loggers, which other code configures and closes
    queue: Queue[logging.LogRecord] = Queue(QUEUED)
    writer.addHandler(_QueueHandler(queue))
    file = _FileHandler(path, maxBytes=MAX_FILE_BYTES, backupCount=MAX_FILES - 1, encoding="utf-8", delay=True)
    QueueListener(queue, file).start()
    return writer


def log_path(name: str) -> Path | None:
    """Return the file of the application's log in this Ray session; None outside Ray."""
    import ray
    from ray.serve._private.logging_utils import get_serve_logs_dir

    return Path(get_serve_logs_dir()) / f"autoscaling_{name}.jsonl" if ray.is_initialized() else None


def files(path: Path) -> list[Path]:
    """Return the existing files of a log, the oldest first."""
    rotated = [path.with_name(f"{path.name}.{number}") for number in range(MAX_FILES - 1, 0, -1)]
    return [file for file in (*rotated, path) if file.exists()]


def export(path: Path, since: float) -> bytes:
    """Return the lines from the last snapshot at or before ``since`` (seconds since the epoch), compressed by gzip."""
    kept: list[str] = []
    for file in files(path):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                found = _TIME.search(line, 0, 80)
                if '"scaler":' in line and found is not None and float(found[1]) <= since:
                    kept.clear()
                kept.append(line)
    return gzip.compress("".join(kept).encode(), compresslevel=1)


def read(lines: Iterable[str]) -> tuple[list[Record], int]:
    """Return the records in ``lines``, and the number of lines that are no record: cut off, or of another version."""
    records: list[Record] = []
    num_unreadable = 0
    for line in lines:
        try:
            record = _RECORD.validate_json(line)
            datetime.fromtimestamp(record.time, UTC)
            records.append(record)
        except (ValidationError, ValueError, OverflowError, OSError):
            num_unreadable += 1
    return records, num_unreadable


def row_of(decision: Decision) -> dict[str, Any]:
    """Return a decision under the keys of the log."""
    return dict(_DECISION.dump_python(decision, by_alias=True))


def follows(record: Record, before: Record | None) -> bool:
    """Return whether no record is missing between the two, so that the later is decided from what the earlier remembered."""
    return before is not None and record.number == before.number + 1 and 0 < record.time - before.time < LONGEST_TICK_S


def stretches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the stretches without gaps, each from a snapshot on, in which models and rules stay the same."""
    stretch: list[Record] = []
    for record in records:
        if stretch and not (follows(record, stretch[-1]) and record.seen.models.keys() == stretch[0].seen.models.keys()):
            yield stretch
            stretch = []
        if stretch or record.scaler is not None:
            stretch.append(record)
    if stretch:
        yield stretch


def differing(record: Record, decided: Mapping[str, Decision]) -> list[str]:
    """Return the models, and `INGRESSES`, whose decision differs from the logged one."""
    logged = record.decided
    names = dict.fromkeys((*logged, *decided))
    return [n for n in names if n not in logged or n not in decided or not _same(logged[n], decided[n])]


def _same(one: Decision, other: Decision) -> bool:
    """Return whether two decisions are equal up to the last digits of quantities, which depend on the processor: the fit uses LAPACK."""
    return (
        one.inputs.keys() == other.inputs.keys()
        and replace(one, inputs=other.inputs) == other
        and all(math.isclose(value, other.inputs[name], rel_tol=1e-6, abs_tol=1e-9) for name, value in one.inputs.items())
    )


def decided_again(stretch: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Decision]]]:
    """Yield each record of a stretch with the decisions of the present code."""
    scaler = copy.deepcopy(stretch[0].scaler)
    assert scaler is not None  # every stretch begins with a snapshot
    for record in stretch:
        yield record, scaler.observe(record.seen)
