"""The body of a request is read once, within limits, and given to vLLM's app again."""

from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from serve_app.errors import RequestTooLarge

_BYTES_PER_TOKEN = 16
_TOKENIZED_BYTES = 256 << 10


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """Return the body, of at most ``limit`` bytes.

    Raises:
        RequestTooLarge: The body is longer, or announces that it will be.
        ClientDisconnect: The client has gone before the end.
    """
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit:
        raise RequestTooLarge(size_bytes=int(announced), limit_bytes=limit)
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise RequestTooLarge(size_bytes=size, limit_bytes=limit)
        if not message.get("more_body", False):
            return b"".join(chunks)


def tokenizer_bytes(max_model_len: int) -> int:
    """Return the largest body for the routes of the tokenizer, in bytes: several times the text for which the context has room.

    A model has one tokenizer, which takes one text after the other. A text of 4 MiB kept all chats of the model waiting for 25 s.
    """
    return max(_TOKENIZED_BYTES, _BYTES_PER_TOKEN * max_model_len)


def replay(body: bytes, receive: Receive, gone: Callable[[], None]) -> Receive:
    """Return a receive that gives the body again, then the client's messages. ``gone`` is called when the client disconnects."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone()
            return message
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
