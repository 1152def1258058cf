"""This module reads the server's request log for the audit. Each line of a request must hold the client's X-Request-Id.

    JSON lines   serve-app's ledger; the law server's log; access logs of nginx, Envoy, Traefik or an application written as JSON
    text         the same as text; vLLM with --enable-log-requests, of which the lines with "Received request" count

In JSON lines, these keys are compared if they exist: status, outcome (whether the answer was complete), output tokens, the text's
SHA-256; and a time excludes lines of another run of the same schedule. Text lines show only that the request came.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from loadtest.errors import UsageError
from loadtest.inputs import bounded_lines

_TIMES = ("arrival_unix_s", "timestamp", "time", "ts", "start_time", "@timestamp")
_STATUSES = ("status", "status_code", "http_status", "response_code")
_OUTCOMES = {
    **dict.fromkeys(("complete", "ok"), True),
    **dict.fromkeys(("failed", "rejected", "aborted"), False),
    **dict.fromkeys(("dropped", "truncated", "error_event", "status", "html", "client_gone", "shutdown"), False),
}
"""For each outcome in serve-app's ledger and the law server's log: whether the whole answer was sent."""
_TOKENS = ("tokens_sent", "output_tokens", "completion_tokens")


@dataclass(frozen=True)
class ServerLog:
    """A server's logs and the options of `read_server_log`. A folder means its files ``*.jsonl``, like a ledger's folder."""

    paths: Sequence[Path]
    id_key: str = ""
    containing: str = ""

    def files(self) -> list[Path]:
        """Return the files; the files of a folder are sorted by name.

        Raises:
            UsageError: A folder has none.
        """
        found: list[Path] = []
        for path in self.paths:
            files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
            if not files:
                raise UsageError(str(path), "is a folder without a file *.jsonl")
            found += files
        return found


class LogLine(msgspec.Struct, frozen=True):
    """One request as the server saw it. None or empty: the line does not have the field."""

    id: int
    """The id of the schedule; the schedule may lack it."""
    at_unix_s: float | None = None
    status: int | None = None
    output_tokens: int | None = None
    text_sha256: str = ""
    outcome: str = ""

    @property
    def complete(self) -> bool | None:
        """Return whether the server sent the whole answer; None if the line has no outcome, or an unknown one."""
        return _OUTCOMES.get(self.outcome)


def read_server_log(path: Path, *, id_prefix: str, id_key: str = "", containing: str = "") -> Iterator[LogLine]:
    """Yield the lines with an id of this schedule; a last line that was cut off by a crash is left out.

    Args:
        id_prefix: The text before the schedule's id in the client's header.
        id_key: The id must be in this key of a JSON line (in ``a.b``: key b of the object a); empty: anywhere in the line.
        containing: Lines without these words are left out; for servers that write several lines per request.
    Raises:
        UsageError: The file cannot be read, or a line begins like JSON but is none; the message has its number.
    """
    ours = re.compile(re.escape(id_prefix) + r"(\d{1,18})(?!\d)")
    for number, line in enumerate(bounded_lines(path, errors="replace"), 1):
        if containing not in line:
            continue
        values: dict[str, Any] = {}
        if line.startswith("{"):
            try:
                values = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as exc:
                if not line.endswith("\n"):
                    return
                raise UsageError(f"{path}:{number}", str(exc)) from exc
        if match := ours.search(str(_value(values, id_key)) if id_key else line):
            yield LogLine(int(match[1]), *_fields(values))


def _fields(values: Mapping[str, Any]) -> tuple[float | None, int | None, int | None, str, str]:
    usage = values.get("usage")
    tokens = _number({**(usage if isinstance(usage, dict) else {}), **values}, _TOKENS)
    status = _number(values, _STATUSES)
    return (
        next((at for key in _TIMES if (at := _unix_s(values.get(key))) is not None), None),
        None if status is None else int(status),
        None if tokens is None else int(tokens),
        str(values.get("text_sha256") or ""),
        str(values.get("outcome") or ""),
    )


def _value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of the key, or of the keys separated by dots; empty if there is none."""
    found: Any = values
    for part in [key] if key in values else key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return "" if found is None else found


def _number(values: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    """Return the first number, or text with a number (nginx quotes all values), among the keys."""
    for key in keys:
        try:
            return float(values[key])
        except (LookupError, TypeError, ValueError):
            continue
    return None


def _unix_s(value: Any) -> float | None:
    """Return a Unix time in seconds from a number of seconds or milliseconds, or from ISO 8601 with a zone."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            return None
        return at.timestamp() if at.tzinfo else None
    at_s = _number({"at": value}, ("at",))
    return at_s if at_s is None or at_s < 1e11 else at_s / 1000
