"""This module reads the server's request log for the audit. Each line of a request must hold the client's X-Request-Id.

    JSON lines   serve-app's ledger; the law server's log; access logs of nginx, Envoy, Traefik or an application written as JSON
    text         the same as text; vLLM with --enable-log-requests, of which the lines with "Received request" count

Of JSON lines, these keys are compared where they are there: status, outcome (whether the answer was complete), output tokens, the text's
SHA-256; and a time tells lines of another run of the same schedule. Text lines say only that the request came.
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
"""Outcomes by serve-app's ledger and the law server's log -> whether the whole answer was sent."""
_TOKENS = ("tokens_sent", "output_tokens", "completion_tokens")


@dataclass(frozen=True)
class ServerLog:
    """A server's logs and how they are read: `read_server_log`. A folder stands for its files ``*.jsonl``, as a ledger's."""

    paths: Sequence[Path]
    id_key: str = ""
    containing: str = ""

    def files(self) -> list[Path]:
        """Return the files, those of folders by name.

        Raises:
            UsageError: A folder holds none.
        """
        found: list[Path] = []
        for path in self.paths:
            files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
            if not files:
                raise UsageError(str(path), "is a folder without a file *.jsonl")
            found += files
        return found


class LogLine(msgspec.Struct, frozen=True):
    """One request as the server saw it. None and empty: the line does not say."""

    id: int
    """The schedule's; perhaps one that is not in it."""
    at_unix_s: float | None = None
    status: int | None = None
    output_tokens: int | None = None
    text_sha256: str = ""
    outcome: str = ""

    @property
    def complete(self) -> bool | None:
        """Return whether the server sent the whole answer; None where the line does not say, or in words that are not known."""
        return _OUTCOMES.get(self.outcome)


def read_server_log(path: Path, *, id_prefix: str, id_key: str = "", containing: str = "") -> Iterator[LogLine]:
    """Yield the lines that hold an id of this schedule; a last line that was cut off by a crash is left out.

    Args:
        id_prefix: What the client put before the schedule's id.
        id_key: The id must be in this key of a JSON line (in ``a.b``: key b of the object a); empty: anywhere in the line.
        containing: Lines without these words are left out, where a server writes several about one request.
    Raises:
        UsageError: The file cannot be read, or a line begins as JSON and is none; the message has its number.
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
    """Return what is under the key, or under the keys that dots part; empty if nothing is."""
    found: Any = values
    for part in [key] if key in values else key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return "" if found is None else found


def _number(values: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    """Return the first that is a number, or the text of one: nginx quotes all."""
    for key in keys:
        try:
            return float(values[key])
        except (LookupError, TypeError, ValueError):
            continue
    return None


def _unix_s(value: Any) -> float | None:
    """Return a time in seconds: of a number of seconds or milliseconds, or ISO 8601 with a zone."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            return None
        return at.timestamp() if at.tzinfo else None
    at_s = _number({"at": value}, ("at",))
    return at_s if at_s is None or at_s < 1e11 else at_s / 1000
