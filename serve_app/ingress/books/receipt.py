"""A receipt shows the client that asks for it where the time of its request went, which replicas served it, and why those.

A JSON answer carries the receipt as a header, a stream of events as a comment after its last event. docs/receipts.md describes the fields.
"""

import json
import time
from typing import Any

from starlette.types import Message, Scope, Send

from serve_app.ingress.exchange.exchange import Exchange

HEADER = b"x-serve-app-receipt"
"""The header by which a request asks for a receipt, with the value 1, and in which an answer has it."""


def asks_for_receipt(scope: Scope) -> bool:
    return (HEADER, b"1") in scope["headers"]


def receipt(exchange: Exchange, ended_at: float) -> dict[str, Any]:
    """Return the receipt of a request that ends at the monotonic second ``ended_at``."""
    requests = exchange.requests
    trail = None if requests.first is None else requests.first.trail
    return {
        "id": exchange.shown_id,
        "model": exchange.model or None,
        "total_s": round(ended_at - exchange.arrived_at, 6),
        "phases_s": {name: round(end - begin, 6) for name, begin, end in exchange.phases(ended_at)},
        "attempts": [{"replica": each.replica, "reason": each.reason, "end": each.end} for each in requests.attempts()],
        "expected_prefix_hit_tokens": None if trail is None else trail.expected_hit_tokens,
        "prefix_hit_tokens": None if trail is None else trail.cached_tokens,
        "resume_gaps_s": [round(end - begin, 6) for begin, end in requests.gaps()],
    }


class ReceiptSend:
    """An ASGI ``send`` that adds the receipt of the exchange. A stream of a form that has no comments gets none."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send = send
        self._exchange = exchange
        self._is_stream = False
        self.__self__ = getattr(send, "__self__", None)
        """The same attribute as of a bound method. By it, `HeldAnswer` finds the connection, to which it writes the middle of a stream."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            media_type = dict(headers).get(b"content-type", b"").partition(b";")[0]
            self._is_stream = media_type == b"text/event-stream"
            if media_type == b"application/json":
                message = {**message, "headers": [*headers, (HEADER, self._text())]}
        elif self._is_stream and not message.get("more_body", False):
            message = {**message, "body": message.get("body", b"") + b": receipt " + self._text() + b"\n\n"}
        await self._send(message)

    def _text(self) -> bytes:
        return json.dumps(receipt(self._exchange, time.monotonic()), separators=(",", ":")).encode("ascii")
