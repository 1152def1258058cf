"""The records are the files that a run leaves on disk; this module defines their lines and reads them.

    RUN/manifest.json    `Manifest`: what ran against what, and how it ended
    RUN/schedule.jsonl   one `ScheduledRequest` a line, in the order of `id`
    RUN/rows.jsonl       one `Row` a line for each request that was sent or given up, flushed every second
    RUN/health.jsonl     one `HealthSample` a line: each worker, each second
    RUN/server.jsonl     one `ServerSample` a line: what the target said of itself
    RUN/events.jsonl     one `RunEvent` a line: phases, faults
    RUN/seal.jsonl       one `loadtest.seal.Seal` a line: digests of rows and health, as they were recorded
    RUN/tokens.jsonl    one `TokenCount` a line, if the scenario has a tokenizer; made from the texts after the run
    RUN/summary.json     `loadtest.judge.summary.Summary`; made from the files above, and can be made again

Every time of a run is in seconds from its epoch (the manifest's ``epoch_unix_s``), taken from one monotonic clock per process.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, overload
from uuid import uuid4

import msgspec

from loadtest.errors import UsageError
from loadtest.inputs import open_bytes, regular

PUT_BACK = "put back the file as the run wrote it, or run the scenario again"
"""The way out in errors about a changed record."""
UnixSeconds = Annotated[float, msgspec.Meta(ge=-62_135_596_800, lt=253_402_300_800)]
"""A Unix time in the years 1 to 9999, the range of `datetime`."""
MoreOrLess = Annotated[float, msgspec.Meta(gt=-253_402_300_800, lt=253_402_300_800)]
"""A difference of two such times in seconds, of either sign."""
MAX_WORKERS = 256
"""Most workers of a run: the most that a scenario may have."""
Milliseconds = Annotated[float, msgspec.Meta(gt=-253_402_300_800_000, lt=253_402_300_800_000)]
"""Such a difference in milliseconds."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A count that fits into an array of 64-bit numbers."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=200_000_000)]
"""Tokens of one answer. The client accepts at most 100,000,000 from the server's usage; without usage it counts one per event."""
State = Literal[
    "ok",  # complete: [DONE] or the end of a whole body came
    "http_error",  # a status of 300 or more, another encoding or media type than was asked for, or no HTTP at all
    "stream_error",  # an error event inside a stream
    "truncated",  # the connection or the stream ended without its end mark
    "timeout",  # later than timeout_s after due, or unfinished when the drain ended
    "connect_error",
    "cancelled",  # the load generator disconnected on purpose
    "never_sent",  # `reason` says why
]


class ScheduledRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One planned request. Its content follows from the scenario, its ``id`` and these fields."""

    id: Count
    due_s: MoreOrLess | None
    """Due time; None in a closed loop, which sends when a client is free, and for a later turn (``after``)."""
    cls: str
    input_tokens: Count
    """Tokens of the prompt; for a turn of a conversation, of the user's message in it. All earlier messages are sent too."""
    output_tokens: Count
    session: str = ""
    blocks: tuple[int, ...] = ()
    """For a trace that records shared parts of prompts: an id per 512 tokens of the prompt; equal ids mean equal tokens."""
    after: int | None = None
    """For a later turn of a conversation: the id of the previous turn, whose answer it waits for; smaller than ``id``."""
    think_s: float = 0.0
    """For a later turn: seconds from the end of the previous answer until it is due."""
    workload: str = ""
    """Only for id 0: SHA-256 of all other inputs of the bodies, so that the file's own hash covers them."""
    shared: dict[str, Count] | None = None
    """Only for id 0: the tokens with which all prompts of a class begin, for each class that has such tokens."""


class Chunks(Sequence[tuple[float, int]]):
    """The chunks of a row in 12 bytes each; a list of pairs, as decoded from JSON, takes 100."""

    def __init__(self, pairs: Iterable[tuple[float, int]] = ()) -> None:
        columns = tuple(zip(*pairs, strict=True)) or ((), ())
        self.ms = array("d", columns[0])
        """Milliseconds after ``sent_s``."""
        self.tokens = array("i", columns[1])

    def __len__(self) -> int:
        return len(self.ms)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return zip(self.ms, self.tokens, strict=True)

    @overload
    def __getitem__(self, k: int) -> tuple[float, int]: ...
    @overload
    def __getitem__(self, k: slice) -> list[tuple[float, int]]: ...
    def __getitem__(self, k: int | slice) -> tuple[float, int] | list[tuple[float, int]]:
        return list(zip(self.ms[k], self.tokens[k], strict=True)) if isinstance(k, slice) else (self.ms[k], self.tokens[k])


class Row(msgspec.Struct, omit_defaults=True, gc=False):
    """The outcome of one scheduled request. Times are seconds from the epoch; None: the request did not come so far."""

    id: Count
    worker: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]
    due_s: MoreOrLess
    """Due time. In a closed loop, the time at which a client became free; for a later turn, the end of the user's pause."""
    state: State
    reason: str = ""
    """Reason of the outcome in words; empty for ok, at most 300 characters."""
    sent_s: MoreOrLess | None = None
    """Time of sending, taken before connecting; `sent_s - due_s` is the generator's own lag."""
    connected_s: MoreOrLess | None = None
    headers_s: MoreOrLess | None = None
    first_s: MoreOrLess | None = None
    """Time of the first generated payload of any kind: content, reasoning, tool call."""
    last_s: MoreOrLess | None = None
    end_s: MoreOrLess | None = None
    """End of the answer, complete or not."""
    status: Annotated[int, msgspec.Meta(ge=0, le=999)] = 0
    retry_after_s: MoreOrLess | None = None
    chunks: Sequence[tuple[Milliseconds, Tokens]] = []
    """Per received chunk with generated tokens: (ms after sent_s, tokens). A `Chunks` if rows are read in bulk."""
    num_coalesced: Count = 0
    """Number of reads from the socket that had several events."""
    prompt_tokens: Tokens | None = None
    """Tokens of the prompt by the server's usage; ``output_tokens`` likewise."""
    output_tokens: Tokens | None = None
    retokenized: Tokens | None = None
    """Output tokens by the scenario's tokenizer; `read_rows` takes the number from tokens.jsonl."""
    text: str = ""
    text_sha256: str = ""
    finish_reason: str = ""
    server_id: str = ""
    """The id that the server gave the answer."""

    @property
    def seen_s(self) -> float | None:
        """Return when the user saw the begin of the answer; an answer that is no stream shows nothing before its end."""
        return self.first_s if self.first_s is not None else self.end_s


class TokenCount(msgspec.Struct, frozen=True):
    """Output tokens of one row's text, by the scenario's tokenizer. They are not in the row itself, which is sealed."""

    id: Count
    tokens: Tokens


class HealthSample(msgspec.Struct, omit_defaults=True):
    """The measurements of one worker process in one second."""

    t_s: float
    worker: int
    cpu: float
    """CPU seconds per second of this process."""
    lag_max_s: float
    """Largest delay of the event loop, from ``read_late_ms``."""
    gc_s: float
    """Seconds in the garbage collector."""
    in_flight: int
    num_sent: int
    """Requests sent since the start; ``num_rows`` likewise."""
    num_rows: int
    throttled: int = 0
    """Periods since the start in which the cgroup was throttled."""
    read_late_ms: list[float] = []
    """A timer became readable about 100 times in this second; the delay of each read."""


class ServerSample(msgspec.Struct, omit_defaults=True):
    """One scrape. Names in ``values`` are those of `loadtest.control.observe`."""

    t_s: float
    source: Literal["metrics", "serve", "kubernetes", "fleet"]
    values: dict[str, float] = {}
    error: str = ""


class RunEvent(msgspec.Struct, omit_defaults=True):
    """A single event: a phase began, a fault was injected, a worker was lost."""

    t_s: float
    kind: Literal["phase", "fault", "fault-end", "worker-lost", "interrupted", "note"]
    text: str


class Machine(TypedDict, total=False):
    """The machine that made the load."""

    cores: int | None
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    system: str
    load: float


class Manifest(msgspec.Struct, omit_defaults=True):
    """The description of a run. It is written before the first request, with state ``running``, and again at the end."""

    state: Literal["running", "finished", "interrupted"]
    scenario: dict[str, Any]
    schedule_sha256: str
    num_scheduled: Annotated[int, msgspec.Meta(ge=0)]
    target: str
    model: str
    """Model of the classes of requests that set none; if all set one, the model of the first class."""
    epoch_unix_s: UnixSeconds
    command: list[str]
    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    ended_s: MoreOrLess | None = None
    clock_drift_s: MoreOrLess = 0.0
    """Wall clock minus monotonic clock over the run; if not 0, the wall clock was stepped. No figure depends on the wall clock."""
    versions: dict[str, str] = {}
    machine: Machine = {}
    target_info: dict[str, Any] = {}
    """The target's own description: /version, Server header."""
    problems: list[str] = []
    """Reasons for an invalid run that only the running generator can see, such as a lost worker."""
    sealed: dict[str, str] = {}
    """SHA-256 of ``scenario`` and, at the end of the run, of each file that `loadtest.seal` seals."""
    num_left_out: int = 0
    """Requests of a trace without tokens, which are not sent; ``num_after_end``, after ``duration_s``, are not sent either."""
    num_after_end: int = 0


T = TypeVar("T")
REJECTIONS = (429, 503)
"""Statuses of a server that is too busy."""
TEXT_SHOWN = 60
"""Characters of an answer that a finding of the audit quotes."""


def part_of(path: Path) -> Path:
    """Return a path for writing a file before it replaces ``path``. Each call returns another name, so that writers do not collide."""
    return path.with_name(f"{path.stem}.{uuid4().hex[:12]}.part")


def id_prefix(manifest: Manifest) -> str:
    """Return the text before a request's id in its X-Request-Id header."""
    return f"lt-{manifest.schedule_sha256[:8]}-"


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records of a .jsonl file; a last line that was cut off by a crash is left out.

    Raises:
        UsageError: A line other than the last cannot be read; the message has its number.
    """
    decoder = msgspec.json.Decoder(kind)
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                if not line.endswith(b"\n"):
                    return
                raise UsageError(f"{path}:{number}", unreadable(line, exc)) from exc


def unreadable(line: bytes, exc: Exception) -> str:
    """Return the error of a record, the wrong value if it is known, and the way out."""
    return f"{exc}{_got(line, str(exc))}; {PUT_BACK}"


def read_rows(run: Path) -> list[Row]:
    """Read all rows of a run (none without the file), for figures over all rows: with `Chunks`, and texts cut to `TEXT_SHOWN` characters.

    Raises:
        UsageError: As `read_lines`.
    """
    path, counts, rows = run / "rows.jsonl", run / "tokens.jsonl", []
    tokens = {count.id: count.tokens for count in read_lines(counts, TokenCount)} if counts.exists() else {}
    for row in read_lines(path, Row) if path.exists() else ():
        row.chunks, row.text = Chunks(row.chunks), row.text[:TEXT_SHOWN]
        row.retokenized = tokens.get(row.id, row.retokenized)
        rows.append(row)
    return rows


def read_manifest(run: Path) -> Manifest:
    """Read the manifest of a run.

    Raises:
        UsageError: The folder holds no run, or its manifest was changed; the message has the key.
    """
    path, content = run / "manifest.json", b""
    try:
        content = regular(path).read_bytes()
        return msgspec.json.decode(content, type=Manifest)
    except OSError as exc:
        raise UsageError(str(run), f"holds no run: {path.name}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(str(path), unreadable(content, exc)) from exc


def _got(content: bytes, complaint: str) -> str:
    """Return the value that msgspec reports, if its path has only mappings; if the content is no JSON, its beginning."""
    path = re.search(r"`\$\.([\w.]+)`$", complaint)
    if path is None:
        return f" (got {content[:60]!r})" if "malformed" in complaint else ""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # there is another error after it
        return ""
    for name in path[1].split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return f" (got {repr(value)[:60]})"
