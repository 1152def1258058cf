"""This parser reads one HTTP/1.1 answer with `httptools`. Sans-IO: the client gives it the time of each read."""

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httptools

from loadtest.records import State
from loadtest.wire.sse import Form, error_message, shorten

_OTHER_MEDIA: dict[Form, tuple[str, ...]] = {
    "sse": ("text/html", "application/json"),
    "lines": ("text/html", "text/event-stream"),
    "whole": ("text/html", "text/event-stream"),
}
"""Media types that the requested form never has. An answer of any other type is judged by its body."""

WAYS_OUT = {
    "continuous_usage_stats": "the key `usage: final` of the scenario's request class leaves this field out",
    "ignore_eos": "the key `ignore_eos: false` of the scenario's request class leaves this field and min_tokens out",
    "min_tokens": "the key `ignore_eos: false` of the scenario's request class leaves this field and ignore_eos out",
}
"""The way out when a strict server refuses one of the kit's fields by name."""
_LONGEST_S = 10.0**9


class HttpAnswer:
    """The parsed part of an answer. ``bodies`` holds the pieces of each read, then the read's time."""

    def __init__(self) -> None:
        self.bodies: list[bytes | float] = []
        self.on_body = self.bodies.append  # no Python frame per piece
        self.headers: dict[str, str] = {}
        self.status = 0
        self.headers_at: float | None = None
        self.num_reads = 0
        self.ended = False
        self.reusable = False
        self.cut = ""
        """Why the answer ended early; empty if it did not."""
        self.cut_state: State = "truncated"
        """The row's state if the answer ended early."""
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_message_begin(self) -> None:
        if self.ended:
            self.reusable = False
            raise ValueError("data after the answer")

    def on_message_complete(self) -> None:
        if self.ended:
            return
        if self.status < 200:  # 100 Continue, 103 Early Hints: the answer follows
            self.status = 0
            self.headers.clear()
            return
        self.ended = True
        self.reusable = self.parser.should_keep_alive()

    def end_of_input(self) -> None:
        """Note that the server closed the connection, which ends a body without a length."""
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self.status and "content-length" not in self.headers and not chunked:
            self.ended = True

    def where(self) -> str:
        return "inside the answer" if self.num_reads else "before any answer"

    def body(self) -> bytes:
        return b"".join(piece for piece in self.bodies if isinstance(piece, bytes))

    def reads(self) -> Iterator[tuple[float, bytes]]:
        pieces: list[bytes] = []
        for item in self.bodies:
            if isinstance(item, float):
                if pieces:
                    yield item, b"".join(pieces)
                pieces = []
            else:
                pieces.append(item)


def refusal(answer: HttpAnswer, form: Form) -> str:
    """Return why the answer is not of the requested kind; empty if it can be."""
    headers, status = answer.headers, answer.status
    if status >= 400:
        message = error_message(answer.body())
        ways_out = [text for name, text in WAYS_OUT.items() if name in message] if status in (400, 422) else []
        return f"{status}: {'; '.join([message, *ways_out])}"
    if status >= 300:
        return f"{status}: redirects to {headers.get('location', 'nowhere')}; name the final address as the target"
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        return f"{status}: Content-Encoding {encoding}, though identity was asked for; times of chunks would mean nothing"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _OTHER_MEDIA[form]:
        return f"{status}: asked for a {'whole body' if form == 'whole' else 'stream'}, got {kind}: {shorten(answer.body())}"
    return ""


def retry_after(headers: dict[str, str]) -> float | None:
    """Return the seconds of Retry-After, >= 0; a date counts from the server's Date header, if there is one."""
    value = headers.get("retry-after", "").strip()
    try:
        return float(min(max(0, int(value)), _LONGEST_S))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(value).timestamp()
        now = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
    except (ValueError, OverflowError, OSError, TypeError):  # no date, or a date out of range
        return None
    return min(max(0.0, until - now), _LONGEST_S)
