"""These structs are the lines of a ledger: an ingress writes one for each request at its outcome, and `serve-app ledger verify` reads them.

    ledger-<start>-<ingress>-000000.jsonl
        {"ledger": 1, ...}     `Head`: what the ingress had counted when the file began
        {"seq": 0, ...}        `LedgerLine`: one request
        {"closed": ..., ...}   `Last`: of an ingress that was stopped in order, in its last file

``seq`` counts the lines that an ingress wanted to write, ``number`` the requests that came to it, both from 0 and over all its files. So a
reader sees which lines are missing, and which requests have none or two.
"""

import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

VERSION = 1
Outcome = Literal["complete", "failed", "rejected", "aborted"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""`serve_app_requests_total` splits `failed` and `rejected` further: `ingress/exchange/outcomes.py`."""
MAX_ATTEMPTS_LISTED = 32


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What an ingress had counted at one moment."""

    seq: int
    """Lines; the next one has this number."""
    begun: int
    """Requests that had come; the next one has this number."""
    open: list[int]
    """Numbers of those that had no outcome."""
    outcomes: dict[str, int]
    """How many had which."""


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


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    seq: int
    number: int
    time: float
    """When its head had been read."""
    id: str
    """The client's own, of the header X-Request-Id or the field request_id; else that of the answer. Empty: it had neither."""
    key: str | None
    """The first 12 hex digits of the SHA-256 of its API key; None: no key was asked for."""
    model: str | None
    """None: none of those that are served."""
    path: str
    stream: bool
    outcome: Outcome
    status: int | None
    """Of the HTTP answer. None: the client went away before it began."""
    reason: str
    """The engine's finish reason, the `type` of an error of the fleet, ``http_<status>``, or why there was no whole answer."""
    engine_requests: int
    """Of the engine that this request came to: choices (n), prompts of a list, and beams and steps of a beam search count each."""
    attempts: int
    """Of all of them; more than ``engine_requests`` if one moved to another replica."""
    replicas: list[str]
    """Of the first `MAX_ATTEMPTS_LISTED` attempts."""
    ends: list[str]
    """Why each of these ended: a finish reason, an outcome, ``moved``, or how the link to the replica ended."""
    prompt_tokens: int
    """Of each prompt once, however many choices or beams it has. Of a beam search over a list of prompts: of the first prompt alone."""
    output_tokens: int
    """That the engines gave and no replay repeated. Of an answer that a stop string ends, tokens behind it may count."""
    queued_s: float | None
    """From the coming of the engine request to its first start, the longest of several. None: none was started."""
    first_token_s: float | None
    """From the head of the request to the first token; ``total_s`` to the end."""
    total_s: float
    gaps_s: list[float]
    """For each change of replica within an answer: the silence between the last token before and the first new one after it."""


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
