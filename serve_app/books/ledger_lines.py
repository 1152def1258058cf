"""These structs are the lines of a ledger: an ingress writes one for each request at its outcome, and `serve-app ledger verify` reads them.

    ledger-<start>-<ingress>-000000.jsonl
        {"ledger": 1, ...}     `Head`: the ingress's counts when the file began
        {"seq": 0, ...}        `LedgerLine`: one request
        {"closed": ..., ...}   `Last`: in the last file of an ingress that was stopped in order

``seq`` counts the lines that an ingress wanted to write, and ``number`` the requests that came to it, both from 0 and over all its files.
So a reader sees which lines are missing, and which requests have no line, and which have two.
"""

import fcntl
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

VERSION = 1
Outcome = Literal["complete", "failed", "rejected", "aborted"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""`serve_app_requests_total` splits `failed` and `rejected` further: `ingress/exchange/outcomes.py`."""
MAX_ATTEMPTS_LISTED = 32
NO_LINE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the decoder raises for bytes that are no line: a flipped bit in a text makes it no UTF-8."""
_END_OF_9999 = 253_402_300_799
"""The last second that has a date, in seconds since the epoch. A line with a later time was changed."""


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an ingress at one moment."""

    seq: int
    """Number of lines so far; the next line has this number."""
    begun: int
    """Number of requests so far; the next request has this number."""
    open: list[int]
    """Numbers of the requests that had no outcome."""
    outcomes: dict[str, int]
    """Outcome -> number of requests."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    ledger: int = VERSION
    ingress: str
    started: float
    """When the ingress began its ledger; seconds since the epoch, as all times of the day here."""
    time: float
    file: int
    """Number of the file, from 0."""
    counts: LedgerCounts


class LedgerRoute(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt went to its replica."""

    reason: str
    """A `core.routing.Reason`."""
    start_s: float
    """Time from the head of the request to the start."""
    hit_tokens: int = 0
    """Prompt tokens that were expected in the replica's prefix cache."""
    tokens_before: int = 0
    """Tokens that the replica had still to do for this ingress."""
    saves_s: float = 0.0
    """Seconds that requests were expected to wait less there in sum; 0 if the choice was not made by that."""


class LedgerMove(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision that a request leaves a replica that lives."""

    attempt: int
    """The attempt that is to end: its place in `LedgerLine.replicas`, from 0."""
    at_s: float
    """Time from the head of the request to the decision."""
    cause: str
    """``drain``, ``prompts``, ``balance`` (as in `serve_app_hand_overs_asked_total`), or ``new_replica``."""
    saves_s: float = 0.0
    """Seconds that the move was expected to save."""
    read_s: float | None = None
    """Seconds that the read of the KV was expected to take. None: no KV was to move."""
    result: str = ""
    """As in `serve_app_hand_overs_total`, or ``without_kv``; empty if it was not known when the request ended."""
    read_tokens: int = 0
    """Tokens whose KV was read."""


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    seq: int
    number: int
    time: Annotated[float, msgspec.Meta(ge=0, le=_END_OF_9999)]
    """When the head of the request was read."""
    id: str
    """The client's id, from the header X-Request-Id or the field request_id, or else the answer's id. Empty: there is neither."""
    key: str | None
    """The id of the API key, with `ingress.api_keys_file` the first 12 hex digits of its SHA-256; None: the ingress asks for no key."""
    tenant: str | None = None
    """The tenant of the key; None: the ingress asks for no key, or is of an older release."""
    model: str | None
    """The model; None: the request names no served model."""
    path: str
    stream: bool
    outcome: Outcome
    status: int | None
    """Status of the HTTP answer. None: the client went away before the answer began."""
    reason: str
    """The engine's finish reason, the `type` of an error of the fleet, ``http_<status>``, or why there was no whole answer."""
    engine_requests: int
    """Engine requests made of this request: each choice (n), each prompt of a list, and each beam and step of a beam search is one."""
    attempts: int
    """Attempts of all engine requests; more than ``engine_requests`` if one moved to another replica."""
    replicas: list[str]
    """The replicas of the first `MAX_ATTEMPTS_LISTED` attempts."""
    ends: list[str]
    """Why each of these attempts ended: a finish reason, an outcome, ``moved``, or how the link to the replica ended."""
    routes: list[LedgerRoute] = []
    """Why these attempts went to their replicas; empty in lines of older releases."""
    moves: list[LedgerMove] = []
    """Decisions to leave one of these attempts' replicas."""
    prompt_tokens: int
    """Tokens of each prompt, once for all its choices and beams. For a beam search over a list of prompts: of the first prompt alone."""
    cached_tokens: int | None = None
    """How many of these an engine found in its prefix cache. None: no engine reported it, or the line is of an older release."""
    output_tokens: int
    """Tokens from the engines, without those that a replay repeated. If a stop string ends an answer, tokens behind it may count."""
    queued_s: float | None
    """Time from an engine request's arrival to its first start, the longest of several requests. None: none was started."""
    first_token_s: float | None
    """Time from the head of the request to the first token."""
    total_s: float
    """Time from the head of the request to its end."""
    gpu_s: float | None = None
    """GPU-seconds, from the step costs that replicas measured. None: they measured none, or the line is of an older release."""
    gaps_s: list[float]
    """For each change of replica within an answer: the silence between the last token before it and the first new token after it."""


class Last(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of an ingress that was stopped in order."""

    closed: float
    counts: LedgerCounts


def file_name(ingress: str, started: float, file: int) -> str:
    """Return a name by which files sort by the start of their ingress."""
    safe = re.sub(r"[^A-Za-z0-9_.]", "_", ingress)[-64:]
    return f"ledger-{round(started * 1000):013d}-{safe}-{file:06d}.jsonl"


def ledger_files(folder: Path) -> list[Path]:
    """Return the ledger's files in the folder, by the start of their ingresses."""
    return sorted(folder.glob("ledger-*.jsonl"))


def is_written(path: Path) -> bool:
    """Return whether a running ingress writes the file. The ingress holds a lock on the file; a copy of the file has none.

    On a file system without locks no file seems to be written.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
