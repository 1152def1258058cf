"""This parser extracts text, tokens and ending of one answer from the pieces that the client read and their times.

Sans-IO. It runs after the answer has ended, so that no parsing delays a timestamp. A body has one of three forms:
``sse`` (completions and chat streams: a blank line ends an event, ``[DONE]`` the stream), ``lines`` (streams of /generate:
a JSON object per line with the text so far) and ``whole`` (one JSON object). Lines of ``sse`` end with CR, LF or CRLF, in any
mixture, as the standard allows: the CR ends the line, and an LF right after it is ignored.

An event counts as tokens if it has generated payload (content, reasoning, tool calls), not if it has only a role or the usage. Its
number of tokens is the increase of the choice's ``usage.completion_tokens`` if the server sends that with every event, else one.
Tokens before any payload, whose text the server holds back (half a character), count at the first payload.
"""

import codecs
from typing import Annotated, Any, Literal

import msgspec

Form = Literal["sse", "lines", "whole"]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    """A tool call, or a piece of a call in a stream."""

    index: int | None = None
    id: str | int | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A delta or a whole message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None

    def payload(self) -> str:
        if self.text:
            return self.text
        message = self.delta or self.message
        if message is None:
            return ""
        text = (message.reasoning or message.reasoning_content or "") + (message.content or "")
        for call in message.tool_calls or ():
            if call.function is not None:
                text += (call.function.name or "") + (call.function.arguments or "")
        return text


MAX_TOKENS = 100_000_000
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct, gc=False):
    """An event of any endpoint; unknown fields are skipped."""

    id: str | int | None = None
    object: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    text: list[str] | None = None
    """Only of /generate: per sequence, the prompt and the text generated so far."""


_decode = msgspec.json.Decoder(_Event).decode


class Call(msgspec.Struct, frozen=True):
    """A whole tool call."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them: JSON, unless they were cut off."""


class Parsed(msgspec.Struct):
    """The content of a body. Times are those given to `BodyParser.feed`."""

    complete: bool = False
    """Whether the end mark of the form came: ``[DONE]``, or the end of the body."""
    error: str = ""
    """The message of an error event, or a description of an event that no endpoint sends."""
    done_s: float | None = None
    """When ``[DONE]`` came."""
    first_s: float | None = None
    last_s: float | None = None
    chunks: list[tuple[float, int]] = []
    """The time and number of tokens of each read with tokens."""
    num_coalesced: int = 0
    """Number of reads with more than one event with tokens."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    text: str = ""
    """Reasoning, content and tool calls of the first choice in the order of their arrival."""
    content: str = ""
    """The first choice's text of a chat without reasoning and calls, as a client shows it."""
    calls: list[Call] = []
    """The first choice's tool calls of a chat, in the order in which they began."""
    finish_reason: str = ""
    server_id: str = ""


class BodyParser:
    """A parser that is fed a body's pieces in order; the caller may pause between pieces."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._rest: list[bytes] = []  # pieces of a line without its end; joined once, however many there are
        self._after_cr = False
        self._data: list[bytes] = []
        self._is_error = False
        self._texts: list[str] = []
        self._contents: list[str] = []
        self._calls: dict[int, list[_ToolCall]] = {}  # by index, the pieces of each call
        self._tokens: list[tuple[float, int]] = []  # of each event with tokens or payload: its time and its tokens
        self._first: int | None = None  # index in _tokens of the first event with payload
        self._num_tokens = 0
        self._of_choice: dict[int, int] = {}  # by choice, the tokens counted so far in events with a single choice
        self._continuous = False
        self._begun = False
        self._parsed = Parsed()

    def feed(self, at_s: float, data: bytes) -> None:
        """Parse a piece of the body. All pieces of one read have the read's time ``at_s``; an event has the time of its last byte."""
        if self._form == "whole":
            self._data.append(data)
            return
        if not self._begun:
            self._begun, data = True, data.removeprefix(codecs.BOM_UTF8)
        if self._form == "sse" and data and (self._after_cr or b"\r" in data):
            data = self._with_line_feeds(data)
        if b"\n" not in data:
            self._rest.append(data)
            return
        lines = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [lines.pop()]
        for line in lines:
            if self._form == "lines":
                self._line(at_s, line)
            elif not line:
                self._end_of_event(at_s)
            elif line.startswith(b"data:"):
                self._data.append(line[5:])
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"

    def finish(self, at_s: float, *, ended: bool) -> Parsed:
        """Return the content of the whole body.

        Args:
            at_s: Time of the last read.
            ended: Whether the body ended as HTTP demands; False if it was cut off.
        """
        parsed = self._parsed
        if self._form == "sse":
            parsed.complete = parsed.done_s is not None
        elif ended:
            parsed.complete = True
            self._line(at_s, b"".join([*self._data, *self._rest]))
        parsed.text = "".join(self._texts)
        parsed.content = "".join(self._contents)
        parsed.calls = [_joined(pieces) for pieces in self._calls.values()]
        self._count_reads()
        if parsed.complete and not parsed.error and not self._num_tokens and not parsed.output_tokens:
            parsed.error = "a complete answer without a token"
        return parsed

    def _with_line_feeds(self, data: bytes) -> bytes:
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _line(self, at_s: float, line: bytes) -> None:
        if line.strip():
            self._event(at_s, line)

    def _end_of_event(self, at_s: float) -> None:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        if data.strip() == b"[DONE]":
            if self._parsed.done_s is None:
                self._parsed.done_s = at_s
        elif data and self._parsed.done_s is None:
            self._event(at_s, data)
        self._data.clear()
        self._is_error = False

    def _event(self, at_s: float, data: bytes) -> None:
        parsed = self._parsed
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            parsed.error = parsed.error or f"{exc}: {shorten(data)}"
            return
        if event.error is not None or event.object == "error" or self._is_error:
            parsed.error = parsed.error or error_message(data)
            return
        if event.id is not None and not parsed.server_id:
            parsed.server_id = str(event.id)
        if event.usage is not None:
            parsed.prompt_tokens = event.usage.prompt_tokens
            parsed.output_tokens = event.usage.completion_tokens
        if event.choices:
            self._choices(at_s, event)
        elif event.text:
            self._text_so_far(at_s, event.text[0])
        elif self._form == "whole":
            parsed.error = f"neither choices nor text: {shorten(data)}"

    def _choices(self, at_s: float, event: _Event) -> None:
        has_payload = False
        for choice in event.choices or ():
            payload = choice.payload()
            has_payload = has_payload or payload != ""
            if choice.index == 0:
                if payload:
                    self._texts.append(payload)
                self._keep_message(choice.delta or choice.message)
                if choice.finish_reason:
                    self._parsed.finish_reason = choice.finish_reason
        # With n > 1 vLLM sends an event per choice, and its continuous usage counts the tokens of that choice alone.
        only = event.choices[0].index if event.choices and len(event.choices) == 1 else None
        before = self._num_tokens if only is None else self._of_choice.get(only, 0)
        total = None if event.usage is None else event.usage.completion_tokens
        # If the first total comes with an empty last event, it does not show when its tokens came.
        if total is not None and self._continuous and total < before:
            self._parsed.error = self._parsed.error or f"usage.completion_tokens fell from {before} to {total}"
        if total is not None and (has_payload or self._continuous or not self._parsed.finish_reason):
            self._continuous = True
            num_tokens = max(0, total - before)
        else:
            num_tokens = 1 if has_payload else 0
        if self._num_tokens + num_tokens > MAX_TOKENS:
            self._parsed.error = self._parsed.error or f"usage.completion_tokens of all choices are more than {MAX_TOKENS}"
            num_tokens = 0
        self._count(at_s, num_tokens, has_payload)
        if only is not None:
            self._of_choice[only] = before + num_tokens
        if total is not None and self._continuous and len(self._of_choice) > 1:
            self._parsed.output_tokens = self._num_tokens

    def _keep_message(self, message: _Message | None) -> None:
        """Keep the parts of the message that a client sends back with its next message."""
        if message is None:
            return
        if message.content:
            self._contents.append(message.content)
        for place, piece in enumerate(message.tool_calls or ()):
            self._calls.setdefault(place if piece.index is None else piece.index, []).append(piece)

    def _text_so_far(self, at_s: float, text: str) -> None:
        grew = self._texts != [text]
        self._texts = [text]
        self._count(at_s, 1 if grew else 0, grew)

    def _count(self, at_s: float, num_tokens: int, has_payload: bool) -> None:
        if num_tokens or has_payload:
            if has_payload and self._first is None:
                self._first = len(self._tokens)
            self._num_tokens += num_tokens
            self._tokens.append((at_s, num_tokens))

    def _count_reads(self) -> None:
        """Join the events of each read. If no event has a payload (only special tokens), all events with tokens count."""
        first = self._first or 0
        if not self._tokens:
            return
        held = sum(n for _, n in self._tokens[:first])
        parsed, chunks, num_events = self._parsed, self._parsed.chunks, 0
        for at_s, num_tokens in self._tokens[first:]:
            if chunks and chunks[-1][0] == at_s:
                num_events += 1
                parsed.num_coalesced += num_events == 2
                chunks[-1] = (at_s, chunks[-1][1] + num_tokens)
            else:
                num_events = 1
                chunks.append((at_s, held + num_tokens))
                held = 0
        parsed.first_s, parsed.last_s = chunks[0][0], chunks[-1][0]


def _joined(pieces: list[_ToolCall]) -> Call:
    """Return the call made of the pieces. Some servers repeat id and name, or make a new id, in each piece: the first ones count."""
    functions = [piece.function for piece in pieces if piece.function is not None]
    return Call(
        id=next((str(piece.id) for piece in pieces if piece.id), ""),
        name=next((function.name for function in functions if function.name), ""),
        arguments="".join(function.arguments or "" for function in functions),
    )


def error_message(body: bytes) -> str:
    """Return the message of an error body in OpenAI's, vLLM's or FastAPI's form; else the beginning of the body."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shorten(body)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return value if isinstance(value, str) else shorten(body)


def shorten(body: bytes) -> str:
    """Return the beginning of a body as one line."""
    return " ".join(body[:400].decode(errors="replace").split())[:200]
