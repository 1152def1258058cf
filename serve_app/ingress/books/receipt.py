"""The receipt of a request, for a client that asks for it: where its time went, at which replicas, and why there.

An answer of JSON has it as a header, a stream of events as a comment behind its last event. docs/receipts.md describes the fields.
"""

import json
import time
from typing import Any

from starlette.types import Message, Scope, Send

from serve_app.ingress.exchange.account import Account

HEADER = b"x-serve-app-receipt"
"""Of the request, with the value 1, and of the answer."""


def asks_for_receipt(scope: Scope) -> bool:
    return (HEADER, b"1") in scope["headers"]


def receipt(account: Account, ended_at: float) -> dict[str, Any]:
    """Return what is known of the request at the monotonic second ``ended_at``, its end."""
    trail = None if account.first is None else account.first.trail
    return {
        "id": account.answer_id,
        "model": account.model,
        "total_s": round(ended_at - account.arrived_at, 6),
        "phases_s": {name: round(end - begin, 6) for name, begin, end in account.phases(ended_at)},
        "attempts": [{"replica": each.replica, "reason": each.reason, "end": each.end} for each in account.attempts()],
        "expected_prefix_hit_tokens": None if trail is None else trail.expected_hit_tokens,
        "prefix_hit_tokens": None if trail is None else trail.cached_tokens,
        "resume_gaps_s": [round(end - begin, 6) for begin, end in account.gaps()],
    }


class ReceiptSend:
    """An ASGI ``send`` that adds the receipt of the account's request. A stream that has no comments gets none."""

    def __init__(self, send: Send, account: Account) -> None:
        self._send = send
        self._account = account
        self._is_stream = False
        self.__self__ = getattr(send, "__self__", None)
        """As of a bound method: by it `HeldAnswer` finds the connection, to which it writes the middle of a stream."""

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
        return json.dumps(receipt(self._account, time.monotonic()), separators=(",", ":")).encode("ascii")
