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
"""The way out of a record that was changed."""
UnixSeconds = Annotated[float, msgspec.Meta(ge=-62_135_596_800, lt=253_402_300_800)]
"""Of the years 1 to 9999, which is what a `datetime` can say."""
MoreOrLess = Annotated[float, msgspec.Meta(gt=-253_402_300_800, lt=253_402_300_800)]
"""Seconds from one of those years to another, either way."""
MAX_WORKERS = 256
"""Of a run: as many as a scenario may ask for."""
Milliseconds = Annotated[float, msgspec.Meta(gt=-253_402_300_800_000, lt=253_402_300_800_000)]
"""The same in thousandths."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""What fits into an array of 64-bit numbers."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=200_000_000)]
"""Of one answer. The client takes 100,000,000 at most from the server's usage, and counts one for each event of an answer without it."""
State = Literal[
    "ok",  # complete: [DONE] or the end of a whole body came
    "http_error",  # a status of 300 or more, another encoding or media type than was asked for, or no HTTP at all
    "stream_error",  # an explicit error event inside a stream
    "truncated",  # the connection ended, or the stream did, without its end mark
    "timeout",  # later than timeout_s after due, or unfinished when the drain ended
    "connect_error",
    "cancelled",  # we went away on purpose
    "never_sent",  # `reason` says why
]


class ScheduledRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One planned request. What it asks follows from the scenario, its ``id`` and these fields."""

    id: Count
    due_s: MoreOrLess | None
    """None in a closed loop, which sends when a client is free, and of a later turn (``after``)."""
    cls: str
    input_tokens: Count
    """Of a turn of a conversation: of what the user says in it; all that was said before is sent with it."""
    output_tokens: Count
    session: str = ""
    blocks: tuple[int, ...] = ()
    """Of a trace that tells which prompts share what: an id per 512 tokens of the prompt; equal ids are equal tokens."""
    after: int | None = None
    """Of a later turn of a conversation: the id of the turn before it, whose answer it waits for. It is smaller than ``id``."""
    think_s: float = 0.0
    """Of a later turn: from the end of that answer until it is due."""
    workload: str = ""
    """Of id 0: SHA-256 of what the bodies follow from beside these fields, so that the file's own hash covers it."""


class Chunks(Sequence[tuple[float, int]]):
    """The chunks of a row in 12 bytes each; the list of pairs that JSON gives takes 100."""

    def __init__(self, pairs: Iterable[tuple[float, int]] = ()) -> None:
        columns = tuple(zip(*pairs, strict=True)) or ((), ())
        self.ms = array("d", columns[0])
        """After ``sent_s``."""
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
    """What became of one scheduled request. Times are seconds from the epoch; None: it did not come so far."""

    id: Count
    worker: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]
    due_s: MoreOrLess
    """In a closed loop the time at which a client became free; of a later turn, when the user had read and thought."""
    state: State
    reason: str = ""
    """For people, and empty for ok; at most 300 characters."""
    sent_s: MoreOrLess | None = None
    """Before connecting; `sent_s - due_s` is the generator's own lag."""
    connected_s: MoreOrLess | None = None
    headers_s: MoreOrLess | None = None
    first_s: MoreOrLess | None = None
    """First generated payload of any kind: content, reasoning, tool call."""
    last_s: MoreOrLess | None = None
    end_s: MoreOrLess | None = None
    """End of the answer, of whatever kind."""
    status: Annotated[int, msgspec.Meta(ge=0, le=999)] = 0
    retry_after_s: MoreOrLess | None = None
    chunks: Sequence[tuple[Milliseconds, Tokens]] = []
    """Per received chunk that held generated tokens: (ms after sent_s, tokens in it). A `Chunks` where rows are read in bulk."""
    num_coalesced: Count = 0
    """Reads from the socket that held several events."""
    prompt_tokens: Tokens | None = None
    """By the server's usage, as is ``output_tokens``."""
    output_tokens: Tokens | None = None
    retokenized: Tokens | None = None
    """Output tokens as the scenario's tokenizer counts the text; `read_rows` takes it from tokens.jsonl."""
    text: str = ""
    text_sha256: str = ""
    finish_reason: str = ""
    server_id: str = ""
    """The id that the server gave the answer."""

    @property
    def seen_s(self) -> float | None:
        """When its user saw the first of the answer: one that is no stream shows nothing before its end."""
        return self.first_s if self.first_s is not None else self.end_s


class TokenCount(msgspec.Struct, frozen=True):
    """Output tokens of one row's text, by the scenario's tokenizer. Not in the row itself, which is sealed."""

    id: Count
    tokens: Tokens


class HealthSample(msgspec.Struct, omit_defaults=True):
    """One second of one worker process."""

    t_s: float
    worker: int
    cpu: float
    """CPU seconds per second of this process."""
    lag_max_s: float
    """Largest delay of the event loop; of ``read_late_ms``."""
    gc_s: float
    """Seconds in the garbage collector."""
    in_flight: int
    num_sent: int
    """Since the start, as ``num_rows``."""
    num_rows: int
    throttled: int = 0
    """Periods in which the cgroup was throttled since the start."""
    read_late_ms: list[float] = []
    """How late each of the about 100 times was read at which a timer became readable in this second."""


class ServerSample(msgspec.Struct, omit_defaults=True):
    """One scrape. Names in ``values`` are those of `loadtest.control.observe`."""

    t_s: float
    source: Literal["metrics", "serve", "kubernetes", "fleet"]
    values: dict[str, float] = {}
    error: str = ""


class RunEvent(msgspec.Struct, omit_defaults=True):
    """Something that happened once: a phase began, a fault was injected, a worker was lost."""

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
    """What ran. Written before the first request with state ``running`` and again at the end."""

    state: Literal["running", "finished", "interrupted"]
    scenario: dict[str, Any]
    schedule_sha256: str
    num_scheduled: Annotated[int, msgspec.Meta(ge=0)]
    target: str
    model: str
    """What the classes of requests ask that name no model of their own; where all do, the first one's."""
    epoch_unix_s: UnixSeconds
    command: list[str]
    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    ended_s: MoreOrLess | None = None
    clock_drift_s: MoreOrLess = 0.0
    """Wall clock minus monotonic clock over the run; not 0: the wall clock was stepped. No figure depends on it."""
    versions: dict[str, str] = {}
    machine: Machine = {}
    target_info: dict[str, Any] = {}
    """What the target says of itself: /version, Server header."""
    problems: list[str] = []
    """Reasons why the run is invalid that only the running generator could see, such as a lost worker."""
    sealed: dict[str, str] = {}
    """SHA-256 of ``scenario``, and at the end of the run of each file that `loadtest.seal` watches."""
    num_left_out: int = 0
    """Of a trace: requests without tokens, which are not asked; ``num_after_end`` come after ``duration_s``, and are not either."""
    num_after_end: int = 0


T = TypeVar("T")
REJECTIONS = (429, 503)
"""Statuses with which a server says that it is too busy."""
TEXT_SHOWN = 60
"""Letters of an answer that a finding of the audit quotes."""


def part_of(path: Path) -> Path:
    """Return where to write a file before it takes the place of ``path``: another name for each call, so that no two writers share it."""
    return path.with_name(f"{path.stem}.{uuid4().hex[:12]}.part")


def id_prefix(manifest: Manifest) -> str:
    """Return what stands before a request's id in its header X-Request-Id."""
    return f"lt-{manifest.schedule_sha256[:8]}-"


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records of a .jsonl file; a last line that was cut off by a crash is left out.

    Raises:
        UsageError: A line that is not the last one cannot be read; the message has its number.
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
    """Return what is wrong with a record, whose value where it can be told, and the way out."""
    return f"{exc}{_got(line, str(exc))}; {PUT_BACK}"


def read_rows(run: Path) -> list[Row]:
    """Read all rows of a run, none without the file, for figures of them all: chunks as `Chunks`, texts cut to `TEXT_SHOWN` letters.

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
    """Return the value that msgspec complains of, if it is inside mappings alone; of what is no JSON, its beginning."""
    path = re.search(r"`\$\.([\w.]+)`$", complaint)
    if path is None:
        return f" (got {content[:60]!r})" if "malformed" in complaint else ""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # something else is wrong behind it
        return ""
    for name in path[1].split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return f" (got {repr(value)[:60]})"
