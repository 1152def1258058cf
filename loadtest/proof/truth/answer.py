"""This module reads the law server's requests and writes its answers: the bytes of each, with the time of each write. Pure.

Token k of an answer is a function of the prompt and k only; `/generate` streams lines, the other two server-sent events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_128
from typing import Any, Literal

import msgspec

from loadtest.proof.truth.laws import Timing
from loadtest.proof.truth.settings import Failure, Law

Step = tuple[float, bytes, int]
"""A write: its due time in real seconds from the first request, its bytes, and the number of tokens that it completes."""

PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/generate": "generate"}
_TAILS = ("a", "e", "i", "o", "u", "ai", "el", "in", "on", "ar", "us", "or", "en", "il", "am", "ot")
_WORDS = {  # 256 tokens each, so that a byte selects one
    "ascii": [f" {head}{tail}" for head in "bdfghjklmnprstvz" for tail in _TAILS],
    "multi-byte": [chr(c) for c in (*range(0xC0, 0x100), *range(0x4E00, 0x4E70), *range(0x1F600, 0x1F650))],  # 2, 3, 4 bytes
}
_encode = msgspec.json.encode


class Refused(Exception):
    """The request is answered with an error status at once: ``args`` are status and message."""


def head(status: int, content_type: str, *more: str) -> bytes:
    """Return status line and headers."""
    return "\r\n".join([f"HTTP/1.1 {status} Status", "Server: truth", f"Content-Type: {content_type}", *more, "\r\n"]).encode()


def whole(status: int, body: object, *more: str, content_type: str = "application/json") -> bytes:
    """Return a complete answer; a body that is not text is written as JSON."""
    data = body.encode() if isinstance(body, str) else _encode(body)
    return head(status, content_type, f"Content-Length: {len(data)}", *more) + data


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": "Truth", "param": None, "code": status}}


@dataclass(frozen=True)
class Asked:
    """A generation request."""

    form: Literal["completions", "chat", "generate"]
    stream: bool
    prompt: str
    """Prompt of `/generate`, whose answers repeat it; empty for token ids."""
    prompt_tokens: int
    model: str
    tokens: list[str]
    """The tokens of the answer."""
    usage: Literal["none", "last", "every"]


def parse(path: str, body: bytes, law: Law) -> Asked:
    """Read the body of a request to one of `PATHS`. Unknown fields are ignored.

    Raises:
        Refused: The answer is 400 or 404.
    """
    form: Any = PATHS[path]
    try:
        fields = msgspec.json.decode(body)
        prompt = fields["messages" if form == "chat" else "prompt"]
        max_tokens = int(fields.get("max_completion_tokens") or fields.get("max_tokens") or 16)
        options = fields.get("stream_options") or {}
        num_prompt = _num_tokens([message["content"] for message in prompt] if form == "chat" else [prompt])
        model = fields.get("model") or law.model
        usage: Any = "every" if options.get("continuous_usage_stats") else "last" if options.get("include_usage") else "none"
        digest = shake_128(_encode(prompt)).digest(
            min(max(max_tokens, 0), 1_000_000)
        )  # byte k does not depend on the digest's length
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
        raise Refused(400, f"cannot be read: {exc!r}") from exc
    if unknown := [name for name in law.refuses if name in fields or name in options]:
        raise Refused(400, f"Unknown parameter: '{unknown[0]}'.")
    if model not in (law.model, *law.adapters):
        raise Refused(404, f"The model `{model}` does not exist.")
    if not 1 <= max_tokens <= 1_000_000 or not num_prompt:
        raise Refused(400, f"max_tokens {max_tokens} with a prompt of {num_prompt} tokens")
    words = _WORDS[law.text]
    text = prompt if form == "generate" and isinstance(prompt, str) else ""
    return Asked(form, bool(fields.get("stream")), text, num_prompt, model, [words[byte] for byte in digest], usage)


def _num_tokens(prompts: list[str | list[int]]) -> int:
    """Return the number of words in texts, and of ids."""
    if any(not isinstance(item, int) for prompt in prompts if isinstance(prompt, list) for item in prompt):
        raise TypeError("a prompt is one text or one list of token ids")
    return sum(len(prompt.split()) if isinstance(prompt, str) else len(prompt) for prompt in prompts)


class ScriptedAnswer:
    """The writes of one answer, failures included. The answer ends with its last write."""

    def __init__(self, asked: Asked, law: Law, timing: Timing, failure: Failure | None, *, number: int, created: int) -> None:
        self._asked = asked
        self._law = law
        self._timing = timing
        self._failure = failure or Failure(kind="duplicate", every=1)  # a duplicate's answer is like any other
        self._is_sse = asked.form != "generate"
        cut = self._failure.kind in ("truncate", "error-event")
        self._num_tokens = min(self._failure.after_tokens, len(asked.tokens)) if cut else len(asked.tokens)
        kind = "text_completion" if asked.form == "completions" else f"chat.completion{'.chunk' if asked.stream else ''}"
        self._envelope = {"id": f"truth-{number}", "object": kind, "created": created, "model": asked.model}

    def steps(self) -> Iterator[Step]:
        """Yield the writes in order; a write that is due before its predecessor is made together with it."""
        accepted, failure = self._timing.accepted_s, self._failure
        if failure.kind == "drop":
            yield accepted, b"", 0
        elif failure.kind == "html":
            yield accepted, whole(200, "<html><body>Please log in</body></html>", content_type="text/html"), 0
        elif failure.kind == "status":
            more = [] if failure.retry_after_s is None else [f"Retry-After: {failure.retry_after_s}"]
            more += ["Location: /elsewhere"] if failure.status < 400 else []
            yield accepted, whole(failure.status, error_body(failure.status, "refused by law"), *more), 0
        elif self._asked.stream:
            yield from self._streamed()
        else:
            yield from self._at_once()

    def _at_once(self) -> Iterator[Step]:
        due, tokens = self._timing.sent_s[-1], self._asked.tokens
        if self._failure.kind == "error-event":
            yield due, whole(500, error_body(500, "failed by law")), 0
            return
        data = whole(200, self._body("".join(tokens), len(tokens), usage=True))
        if self._failure.kind == "truncate":
            data = data[: len(data) * self._num_tokens // (len(tokens) + 1)]
        yield due, data, self._num_tokens

    def _streamed(self) -> Iterator[Step]:
        law, tokens, timing = self._law, self._asked.tokens, self._timing
        content_type = "text/event-stream; charset=utf-8" if self._is_sse else "application/x-ndjson"
        data = head(200, content_type, "Connection: close" if law.framing == "close" else "Transfer-Encoding: chunked")
        slow = self._failure.kind == "slow-headers"
        over_s = self._failure.delay_s if slow else 0.0
        yield from _pieces(timing.accepted_s + over_s, data, 0, count=len(data) if slow else 1, over_s=over_s)
        usage = self._asked.usage == "every"
        if self._asked.form == "chat":  # at once: a client that takes the role for a token would see a TTFT of 0
            yield timing.accepted_s, self._event(self._body("", 0, usage=usage)), 0
        held, num_held, due = b"", 0, timing.sent_s[0]
        chunks = range(0, self._num_tokens, law.tokens_per_chunk)
        for k, first in enumerate(chunks):
            last = min(first + law.tokens_per_chunk, self._num_tokens)
            held += self._event(self._body("".join(tokens[first:last]), last, usage=usage))
            num_held += last - first
            due = timing.sent_s[k]
            if (k + 1) % law.coalesce == 0 or k == len(chunks) - 1:
                count = len(held) if law.split == "bytes" else min(law.split, len(held))
                yield from _pieces(due, held, num_held, count=count, over_s=law.split_over_s)
                held, num_held = b"", 0
        yield due, b"" if self._failure.kind == "truncate" else self._ending(), 0

    def _ending(self) -> bytes:
        data = b""
        if self._failure.kind == "error-event":
            data = self._event(error_body(500, "failed by law"))
        elif self._is_sse and self._asked.usage != "none":
            data = self._event({**self._envelope, "choices": [], "usage": self._usage(self._num_tokens)})
        data += self._framed(b"data: [DONE]\n\n") if self._is_sse else b""
        return data + {"chunked": b"0\r\n\r\n", "chunked-trailer": b"0\r\nX-Truth: 1\r\n\r\n", "close": b""}[self._law.framing]

    def _body(self, text: str, num_tokens: int, *, usage: bool) -> dict[str, Any]:
        """Return the event with ``text``, up to the answer's token ``num_tokens``; for 0 the event with the role."""
        asked = self._asked
        if not self._is_sse:
            return {"text": [asked.prompt + "".join(asked.tokens[:num_tokens])]}
        message: dict[str, Any] = {"content": text} if num_tokens and asked.stream else {"role": "assistant", "content": text}
        content = {"delta" if asked.stream else "message": message} if asked.form == "chat" else {"text": text}
        reason = "length" if num_tokens == len(asked.tokens) else None
        choices = [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]
        return {**self._envelope, "choices": choices} | ({"usage": self._usage(num_tokens)} if usage else {})

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = self._asked.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + num_tokens, "completion_tokens": num_tokens}

    def _event(self, body: dict[str, Any]) -> bytes:
        return self._framed(b"data: %b\n\n" % _encode(body) if self._is_sse else _encode(body) + b"\n")

    def _framed(self, data: bytes) -> bytes:
        return data if self._law.framing == "close" else b"%x\r\n%b\r\n" % (len(data), data)


def _pieces(due: float, data: bytes, num_tokens: int, *, count: int, over_s: float) -> Iterator[Step]:
    """Cut ``data`` into pieces: the last is due at ``due``, the others at equal distances in the ``over_s`` before it."""
    for index in range(1, count):
        piece = data[len(data) * (index - 1) // count : len(data) * index // count]
        yield due - over_s * (count - index) / (count - 1), piece, 0
    yield due, data[len(data) * (count - 1) // count :], num_tokens
