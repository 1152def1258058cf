"""`File` and `Batch` are the stored records, in the terms of OpenAI's API. Pure: time is a number of seconds since 1970.

validating -> in_progress -> finalizing -> completed
     |             |-> expired                            the window is over
     |-> failed                                           the input is wrong
in_progress, finalizing -> failed                         the input or the journal is lost
validating, in_progress, finalizing -> cancelling -> cancelled
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from serve_app.errors import BadRequest

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]

_NEXT: dict[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling"}),
    "in_progress": frozenset({"finalizing", "expired", "failed", "cancelling"}),
    "finalizing": frozenset({"completed", "failed", "cancelling"}),
    "cancelling": frozenset({"cancelled"}),
}
STATUSES: tuple[Status, ...] = get_args(Status)
OPEN: tuple[Status, ...] = tuple(_NEXT)
"""The statuses of a batch that has not ended."""

_TIMES = tuple(f"{status}_at" for status in STATUSES if status != "validating")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512

PURPOSES = ("batch", "batch_output")
"""The purposes of files: the input of a batch, or its output."""


class Owner(NamedTuple):
    """Who makes a file or a batch. Files and batches belong to the tenant, so that a new key finds what an old key has made."""

    tenant: str
    """Name of the tenant, "" where the ingress asks for no key."""
    key: str
    """Id of the API key. A batch runs only as long as this key is valid."""


NO_OWNER = Owner("", "")
KeyState = Literal["valid", "ended", "unknown"]
"""The state of the key by which a batch was made. An `ended` key has expired, was revoked or lost the scope `batch`. An `unknown` key is
not in the file of keys: it was removed, or this ingress has not read the file with the new key yet."""


@dataclass(frozen=True, slots=True)
class File:
    """A stored file. ``owner`` names the tenant, "" where the ingress asks for no key. ``purpose`` is one of `PURPOSES`."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    def as_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class LineError:
    """Why an input is refused, or a batch cannot continue. ``line`` counts from 1; None means the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class Batch:
    """One batch.

    ``times`` holds when the batch entered each status after the first. ``keep_output_s`` says how long its answers are kept. After the
    batch's end, ``output_file_id`` names the file of answers and ``error_file_id`` the file of failures, if there are any.
    """

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    keep_output_s: int
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[LineError, ...] = ()
    key: str = ""
    """Id of the API key by which the batch was made; "" in a record of an older release, which any key of the owner continues."""
    total: int = 0
    lines: Mapping[str, int] = field(default_factory=dict)
    """Model -> number of the input's lines that ask for it; empty while the batch is validating."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Model -> number of answered or failed lines. Their sum is below ``completed`` + ``failed`` if an older ingress ran a part."""
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def moved(self, status: Status, *, now: float, **changes: Any) -> Self:
        """Return the batch in another status.

        Raises:
            ValueError: A batch cannot go from its status to that status.
        """
        if status not in _NEXT.get(self.status, ()):
            raise ValueError(f"a batch that is {self.status} does not become {status}")
        return replace(self, status=status, times={**self.times, f"{status}_at": int(now)}, **changes)

    def counted(self, completed: int, failed: int, ended: Mapping[str, int]) -> Self:
        """Return the batch with the larger counts: after a crash lines are counted anew, but a reported count never goes down."""
        return replace(
            self,
            completed=max(self.completed, completed),
            failed=max(self.failed, failed),
            ended=dict(Counter(self.ended) | Counter(ended)),
        )

    def as_object(self) -> dict[str, Any]:
        errors = [
            {"code": error.code, "line": error.line, "message": error.message, "param": error.param} for error in self.errors
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": None if self.metadata is None else dict(self.metadata),
        }


def is_id(text: str) -> bool:
    """Return whether a text has the form of the ids of files and batches. SQLite takes no text with half a surrogate pair."""
    return re.fullmatch(r"(file-|batch_)[0-9a-z]{1,64}", text) is not None


def seconds_of(window: object, *, limit_s: float) -> int:
    """Return the seconds of a `completion_window` such as 24h, 90m, 7d or 600s.

    Raises:
        BadRequest: The window has another form, or is longer than ``limit_s``.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window) if isinstance(window, str) else None
    if found is None:
        raise BadRequest(param="completion_window", problem=f"is {str(window)[:80]!r}; give a time such as 24h, 90m, 7d or 600s")
    window_s = int(found[1]) * _UNITS_S[found[2]]
    if window_s > limit_s:
        raise BadRequest(param="completion_window", problem=f"is {found[0]}, which is {window_s} s, limit {limit_s:.0f} s")
    return window_s


def checked_metadata(metadata: object) -> dict[str, str] | None:
    """Return the metadata as it is.

    Raises:
        BadRequest: The metadata is not a mapping of short texts.
    """
    if metadata is None:
        return None
    limits = f"give up to {_MAX_PAIRS} texts of {_MAX_VALUE_CHARS} characters, under keys of {_MAX_KEY_CHARS}"
    if not isinstance(metadata, dict) or len(metadata) > _MAX_PAIRS:
        raise BadRequest(param="metadata", problem=f"is not a mapping, or too large; {limits}")
    for key, value in metadata.items():
        clean = f"{key}{value}".encode("utf-8", "ignore").decode()
        if not isinstance(value, str) or len(value) > _MAX_VALUE_CHARS or len(key) > _MAX_KEY_CHARS or clean != f"{key}{value}":
            raise BadRequest(param=f"metadata.{key[:_MAX_KEY_CHARS]}", problem=f"is not a Unicode text, or too long; {limits}")
    return metadata


def kept_for_s(expiry: object, *, param: str, limit_s: float) -> int:
    """Return for how many seconds a file is kept, by OpenAI's `expires_after`; None asks for the longest time.

    Raises:
        BadRequest: ``expiry`` is not an `expires_after`, or its seconds are out of range.
    """
    if expiry is None:
        return int(limit_s)
    given = expiry if isinstance(expiry, dict) else {}
    seconds = given.get("seconds")
    if given.get("anchor") != "created_at" or not isinstance(seconds, int) or isinstance(seconds, bool):
        raise BadRequest(param=param, problem='give {"anchor": "created_at", "seconds": N}')
    if not 3600 <= seconds <= limit_s:
        raise BadRequest(param=param, problem=f"seconds is {str(seconds)[:20]}, not between 3600 and {limit_s:.0f}")
    return seconds
