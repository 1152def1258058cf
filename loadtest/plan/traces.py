"""This module reads recorded traffic: files with the times of requests and the lengths of prompts and answers.

    CSV    TIMESTAMP, ContextTokens, GeneratedTokens                        Azure LLM inference traces (date and time)
    CSV    Timestamp, Request tokens, Response tokens [, Session ID]        BurstGPT (seconds)
    JSONL  timestamp, input_length, output_length [, hash_ids, session_id]  Mooncake (milliseconds; an id per 512 prompt tokens)
    JSONL  schedule.jsonl and rows.jsonl of a run (rows by due time and the server's own token counts)

The columns decide the format, not the file's name. Times count from the first request; times of the kit's own files are not changed.
"""

import csv
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from loadtest.errors import UsageError
from loadtest.inputs import bounded_lines, regular
from loadtest.plan.arrivals import MAX_REQUESTS, Times, generator
from loadtest.records import ScheduledRequest

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
BlockId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e13)]


class Recorded(NamedTuple):
    """A trace, sorted by time; ``due_s`` is as recorded, ``cls`` empty unless the file names classes."""

    requests: list[ScheduledRequest]
    num_left_out: int
    """Requests without tokens: failures of the recorded system."""


class _Azure(msgspec.Struct):
    at: datetime = msgspec.field(name="TIMESTAMP")
    input_tokens: Count = msgspec.field(name="ContextTokens")
    output_tokens: Count = msgspec.field(name="GeneratedTokens")

    def request(self) -> ScheduledRequest:
        at = self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)
        return ScheduledRequest(0, at.timestamp(), "", self.input_tokens, self.output_tokens)


class _BurstGpt(msgspec.Struct):
    at_s: Number = msgspec.field(name="Timestamp")
    input_tokens: Count = msgspec.field(name="Request tokens")
    output_tokens: Count = msgspec.field(name="Response tokens")
    session: str = msgspec.field(name="Session ID", default="")

    def request(self) -> ScheduledRequest:
        return ScheduledRequest(0, self.at_s, "", self.input_tokens, self.output_tokens, self.session)


class _Mooncake(msgspec.Struct):
    timestamp: Number
    input_length: Count
    output_length: Count
    hash_ids: tuple[BlockId, ...] = ()
    session_id: str | int = ""

    def request(self) -> ScheduledRequest:
        session = str(self.session_id)
        return ScheduledRequest(0, self.timestamp / 1000, "", self.input_length, self.output_length, session, self.hash_ids)


class _Scheduled(msgspec.Struct):
    due_s: Number  # null is a closed loop's due time; such a schedule is no trace
    cls: str
    input_tokens: Count
    output_tokens: Count
    session: str = ""
    blocks: tuple[BlockId, ...] = ()

    def request(self) -> ScheduledRequest:
        return ScheduledRequest(0, self.due_s, self.cls, self.input_tokens, self.output_tokens, self.session, self.blocks)


class _Sent(msgspec.Struct):
    due_s: Number
    state: str
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None

    def request(self) -> ScheduledRequest:
        return ScheduledRequest(0, self.due_s, "", self.prompt_tokens or 0, self.output_tokens or 0)


_Line: TypeAlias = _Azure | _BurstGpt | _Mooncake | _Scheduled | _Sent
_FORMATS: tuple[type[_Line], ...] = (_Azure, _BurstGpt, _Mooncake, _Scheduled, _Sent)


def read_trace(path: Path) -> Recorded:
    """Read the whole file.

    Raises:
        UsageError: ``file:line``, what is wrong there and the way out; or the file holds no request.
    """
    read, ours = _requests(path, bounded_lines(regular(path), max_lines=MAX_REQUESTS))
    kept = sorted(
        (r for r in read if r.input_tokens and r.output_tokens), key=recorded_s
    )  # a stable sort: turns of a session keep their order
    if not kept:
        raise UsageError(str(path), f"{len(kept)} of {len(read)} requests have tokens; give a trace of 1 to {MAX_REQUESTS:,}")
    start_s = 0.0 if ours else recorded_s(kept[0])
    shifted = [msgspec.structs.replace(r, id=number, due_s=recorded_s(r) - start_s) for number, r in enumerate(kept)]
    return Recorded(shifted, len(read) - len(kept))


def replay_times(recorded: Times, *, speed: float, dequantise_s: float, seed: int) -> Times:
    """Return the due times of a sorted trace, sorted, so that the requests keep the file's order.

    Args:
        dequantise_s: Resolution of the recorded times: a time t means [t, t + step) and becomes a random time in that interval.
    """
    spread = generator(seed, "dequantise").random(recorded.size) * dequantise_s
    times: Times = np.sort(recorded + spread) / speed
    return times


def recorded_s(request: ScheduledRequest) -> float:
    """Return the request's due time, which must not be ``None``."""
    assert request.due_s is not None
    return request.due_s


def _requests(path: Path, lines: Iterator[str]) -> tuple[list[ScheduledRequest], bool]:
    """Return the file's requests, with times as written, and whether the file is in the kit's own format."""
    kind: type[_Line] | None = None
    requests = []
    for line, values in _objects(path, lines):
        kind = kind or _format_of(path, line, values)
        try:
            requests.append(msgspec.convert(values, kind, strict=False).request())
        except msgspec.ValidationError as exc:
            raise _wrong(path, line, ",".join(map(str, values.values())), exc) from exc
    return requests, kind in (_Scheduled, _Sent)


def _objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and columns: a JSON object per line, or the records below a CSV file's header."""
    first, before = next(lines, ""), 0
    while first and not first.strip():  # the csv module skips blank lines too
        first, before = next(lines, ""), before + 1
    if not first.lstrip().startswith("{"):
        reader = csv.DictReader(itertools.chain([first], lines), restkey="", skipinitialspace=True)
        try:
            yield from ((before + reader.line_num, values) for values in reader)
        except csv.Error as exc:
            raise _wrong(path, before + reader.line_num, "", exc) from exc
        return
    for number, text in enumerate(itertools.chain([first], lines), before + 1):
        if text.strip():
            try:
                yield number, msgspec.json.decode(text, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as exc:
                raise _wrong(path, number, text.strip(), exc) from exc


def _format_of(path: Path, line: int, values: dict[str, Any]) -> type[_Line]:
    for kind in _FORMATS:
        if {f.encode_name for f in msgspec.structs.fields(kind) if f.required} <= values.keys():
            return kind
    known = "; ".join(", ".join(f.encode_name for f in msgspec.structs.fields(kind) if f.required) for kind in _FORMATS)
    raise UsageError(f"{path}:{line}", f"columns {', '.join(map(str, values))[:200]} are of no known format; known: {known}")


def _wrong(path: Path, line: int, text: str, exc: Exception) -> UsageError:
    return UsageError(f"{path}:{line}", f"{exc} (got {text[:80]!r}); correct or remove the line")
