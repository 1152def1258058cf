"""The columns hold a run's requests and rows as arrays of numbers, so that the analysis can compute with any number of them. No IO.

A million rows take 150 MB. Their chunks, 16 bytes each, pass `chunk_facts` once and are not kept; the gaps between tokens are read
again from the run's rows.parquet when they are needed (`loadtest.judge.gaps`).
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from loadtest.quantiles import Floats
from loadtest.records import Row, ScheduledRequest, State

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STATES: tuple[str, ...] = get_args(State)
CODES = {state: np.int8(code) for code, state in enumerate(STATES)}
NONE = -1
"""Value of a count that the row does not have; a missing time is NaN."""
MAX_REASONS = 1000
"""Number of different reasons that are kept; any further reason counts as `OTHER`."""
MERGED = 64
"""Number of batches that `ColumnsBuilder` merges into one."""
OTHER = "for another reason"
_TIMES = ("due_s", "sent_s", "first_s", "last_s", "end_s")
_COUNTS = ("prompt_tokens", "output_tokens", "retokenized", "num_coalesced", "worker", "status", "id")
SCALARS = (*_TIMES, *_COUNTS, "state", "reason")


@dataclass(frozen=True)
class ScheduleColumns:
    """The requests of a schedule as columns, in the schedule's order."""

    id: Ints
    due_s: Floats
    """Due times; NaN in a closed loop, and for later turns."""
    cls: Ints
    """Index into ``classes``."""
    output_tokens: Ints
    turn: Ints
    """Number of the turn in its conversation, from 0; 0 for any request that is no later turn."""
    classes: tuple[str, ...]

    @classmethod
    def of(cls, schedule: Iterable[ScheduledRequest]) -> "ScheduleColumns":
        """Return the columns of the requests, which may be an iterator over a file."""
        names: dict[str, int] = {}
        ids, due_s, which, tokens, turns = array("q"), array("d"), array("q"), array("q"), array("q")
        for request in schedule:
            ids.append(request.id)
            due_s.append(math.nan if request.due_s is None else request.due_s)
            which.append(names.setdefault(request.cls, len(names)))
            tokens.append(request.output_tokens)
            turns.append(0 if request.after is None else turns[request.after] + 1)
        ints = [np.array(column, dtype=np.int64) for column in (ids, which, tokens, turns)]
        return cls(ints[0], np.array(due_s, dtype=np.float64), ints[1], ints[2], ints[3], tuple(names))


@dataclass(frozen=True)
class RowColumns:
    """Rows as columns; each array has one value per row. Rows from a file are in the order of their due times."""

    id: Ints
    worker: Ints
    status: Ints
    state: npt.NDArray[np.int8]
    """Index into `STATES`."""
    due_s: Floats
    sent_s: Floats
    first_s: Floats
    last_s: Floats
    end_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    retokenized: Ints
    num_coalesced: Ints
    reason: Ints
    """Index into ``reasons``."""
    reasons: tuple[str, ...]
    num_chunks: Ints
    chunk_tokens: Ints
    """Tokens in all chunks of the row."""
    num_gaps: Ints
    """Gaps between tokens: one less than ``chunk_tokens``."""
    max_gap_us: Ints
    num_stalls: Ints
    """Gaps between chunks above the scenario's ``stall_s``."""
    gaps_within: dict[float, Ints] = field(default_factory=dict)
    """By limit of ITL in seconds: number of gaps inside the limit."""

    def __len__(self) -> int:
        return self.id.size

    def is_state(self, *states: State) -> Bools:
        return np.isin(self.state, [CODES[state] for state in states])

    @property
    def is_sent(self) -> Bools:
        return ~np.isnan(self.sent_s)

    @property
    def seen_s(self) -> Floats:
        """As `loadtest.records.Row.seen_s`."""
        return np.where(np.isnan(self.first_s), self.end_s, self.first_s)

    @property
    def num_output_tokens(self) -> Ints:
        """Return the output tokens by the server's usage, else as received."""
        return np.where(self.output_tokens == NONE, self.chunk_tokens, self.output_tokens)

    def has_reason(self, reason: str) -> Bools:
        found = [code for code, text in enumerate(self.reasons) if text == reason]
        return np.isin(self.reason, found)

    @classmethod
    def of(cls, rows: Sequence[Row], *, stall_s: float = 1.0, limits_s: Sequence[float] = ()) -> "RowColumns":
        """Return the columns of rows in memory, in the order of the rows."""
        builder = ColumnsBuilder(stall_s, limits_s)
        scalars = {name: [getattr(row, name) for row in rows] for name in SCALARS}
        pairs = np.array([pair for row in rows for pair in row.chunks], dtype=np.float64).reshape(-1, 2)
        offsets = np.cumsum([0, *(len(row.chunks) for row in rows)]).astype(np.int64)
        builder.add(scalars, Chunked(np.rint(pairs[:, 0] * 1000).astype(np.int64), pairs[:, 1].astype(np.int64), offsets))
        return builder.build()


@dataclass(frozen=True)
class Chunked:
    """The chunks of some rows: those of row k are ``us[offsets[k]:offsets[k + 1]]``, microseconds after the row's ``sent_s``."""

    us: Ints
    tokens: Ints
    offsets: Ints

    @property
    def row_tokens(self) -> Ints:
        return np.diff(np.concatenate([[0], np.cumsum(self.tokens)])[self.offsets])

    def gaps_us(self) -> tuple[Ints, Ints]:
        """Return all gaps between tokens, row after row, and the number of each row's gaps; as `loadtest.judge.metrics.gaps_s`."""
        ends = np.cumsum(self.tokens)
        first = ends - self.tokens  # index of each chunk's first token, counted over all rows
        starts = np.concatenate([[0], ends])[self.offsets]
        num_tokens = np.diff(starts)
        chunk_ends = np.repeat(starts[1:], np.diff(self.offsets))
        inside = first < chunk_ends
        inside[self.offsets[:-1][np.diff(self.offsets) > 0]] = False  # a row's first chunk has no gap before it
        gaps = np.zeros(int(starts[-1]), dtype=np.int64)
        waits = np.diff(self.us, prepend=0)
        if (self.tokens > 0).all():
            gaps[first[inside]] = np.maximum(waits[inside], 0)
        else:  # 5 times as slow: the wait before a chunk without tokens is added to the gap before the next token
            np.add.at(gaps, first[inside], np.maximum(waits[inside], 0))
        kept = np.ones(gaps.size, dtype=bool)
        kept[starts[:-1][num_tokens > 0]] = False
        return gaps[kept], np.maximum(num_tokens - 1, 0)

    def num_over(self, limit_us: float) -> Ints:
        """Return, for each row, the number of longer waits between two chunks."""
        over = np.diff(self.us, prepend=0) > limit_us
        over[self.offsets[:-1][np.diff(self.offsets) > 0]] = False
        return _sums(over, self.offsets)


def _sums(values: npt.NDArray[Any], offsets: Ints) -> Ints:
    """Return the sum of each row's values."""
    return np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[offsets])


class ColumnsBuilder:
    """A builder that makes `RowColumns` from batches of rows, in order."""

    def __init__(self, stall_s: float, limits_s: Sequence[float] = ()) -> None:
        self._stall_us = stall_s * 1e6
        self._limits_s = tuple(dict.fromkeys(limits_s))
        self._codes: dict[str, int] = {}
        self._parts: list[dict[str, npt.NDArray[Any]]] = []
        self._merged: list[dict[str, npt.NDArray[Any]]] = []

    def add(self, scalars: dict[str, list[Any]], chunks: Chunked) -> None:
        """Add rows: a list for each of `SCALARS`, and their chunks."""
        part: dict[str, npt.NDArray[Any]] = {name: np.array(scalars[name], dtype=np.float64) for name in _TIMES}
        for name in _COUNTS:
            part[name] = np.array([NONE if value is None else value for value in scalars[name]], dtype=np.int64)
        part["state"] = np.array([CODES[state] for state in scalars["state"]], dtype=np.int8)
        part["reason"] = np.array([self._code(reason) for reason in scalars["reason"]], dtype=np.int64)
        gaps, num_gaps = chunks.gaps_us()
        ends = np.concatenate([[0], np.cumsum(num_gaps)])
        part["num_chunks"], part["chunk_tokens"], part["num_gaps"] = np.diff(chunks.offsets), chunks.row_tokens, num_gaps
        part["max_gap_us"] = np.zeros(num_gaps.size, dtype=np.int64)
        if gaps.size:
            part["max_gap_us"][num_gaps > 0] = np.maximum.reduceat(gaps, ends[:-1][num_gaps > 0])
        part["num_stalls"] = chunks.num_over(self._stall_us)
        for number, limit_s in enumerate(self._limits_s):
            part[f"within/{number}"] = _sums(gaps / 1e6 <= limit_s, ends)
        self._parts.append(part)
        if len(self._parts) == MERGED:
            self._merge()

    def _merge(self) -> None:
        """Merge many parts into one: the C library's heap returns only large arrays to the system."""
        if self._parts:
            self._merged.append({name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]})
        self._parts.clear()

    def _code(self, reason: str) -> int:
        known = self._codes.get(reason)
        if known is None:
            reason = reason if len(self._codes) < MAX_REASONS else OTHER
            known = self._codes.setdefault(reason, len(self._codes))
        return known

    def build(self) -> RowColumns:
        if not self._parts and not self._merged:
            none = Chunked(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1, np.int64))
            self.add({name: [] for name in SCALARS}, none)
        self._merge()
        # Column by column: all parts and all columns together would take twice the memory.
        columns = {name: np.concatenate([part.pop(name) for part in self._merged]) for name in list(self._merged[0])}
        within = {limit_s: columns.pop(f"within/{number}") for number, limit_s in enumerate(self._limits_s)}
        return RowColumns(**columns, reasons=tuple(self._codes), gaps_within=within)


def count_states(rows: RowColumns, index: Ints) -> Counter[str]:
    """Count the states of the rows at these positions."""
    counts = np.bincount(rows.state[index], minlength=len(STATES)) if index.size else np.zeros(len(STATES), dtype=np.int64)
    return Counter({state: int(num) for state, num in zip(STATES, counts, strict=True) if num})
