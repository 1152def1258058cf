"""This parser extracts text, tokens and ending of one answer from the pieces that the client read and their times.

Sans-IO, and meant to run after the answer has ended, so that no parsing delays a timestamp. A body has one of three forms:
``sse`` (completions and chat streams: events end at a blank line, the stream at ``[DONE]``), ``lines`` (streams of /generate:
a JSON object a line with the text so far) and ``whole`` (one JSON object). Lines of ``sse`` end with CR, LF or CRLF, in any
mixture, as the standard allows: the CR ends the line, and an LF right behind it says nothing more.

An event counts as tokens when it has generated payload: content, reasoning, tool calls; not when it only names a role or the
usage. How many: by how much the choice's ``usage.completion_tokens`` rose, when the server sends it with every event, else one. Tokens
whose text is held back (half a character) before any payload came count at the first payload.
"""

import codecs
from typing import Annotated, Any, Literal

import msgspec

Form = Literal["sse", "lines", "whole"]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    """A call, or in a stream a piece of one."""

    index: int | None = None
    id: str | int | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A delta, or the whole message."""

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
    """An event of any endpoint; fields we do not read are skipped."""

    id: str | int | None = None
    object: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    text: list[str] | None = None
    """Of /generate: per sequence, the prompt and what was generated so far."""


_decode = msgspec.json.Decoder(_Event).decode


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, whole."""

    id: str
    name: str
    arguments: str
    """As the model wrote them: JSON, if nothing cut them off."""


class Parsed(msgspec.Struct):
    """What a body said. Times are those given to `BodyParser.feed`."""

    complete: bool = False
    """The end mark of its form came: ``[DONE]``, or the end of the body."""
    error: str = ""
    """Of an explicit error event, or of an event that is not what the endpoints send."""
    done_s: float | None = None
    """When ``[DONE]`` came."""
    first_s: float | None = None
    last_s: float | None = None
    chunks: list[tuple[float, int]] = []
    """Per read that held tokens: when, and how many."""
    num_coalesced: int = 0
    """Reads that held more than one event with tokens."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    text: str = ""
    """Reasoning, content and tool calls in the order of their arrival; of the first choice, as are the two below."""
    content: str = ""
    """Of a chat: what a client shows its user, without reasoning and calls."""
    calls: list[Call] = []
    """Of a chat: in the order in which they began."""
    finish_reason: str = ""
    server_id: str = ""


class BodyParser:
    """Takes the body in pieces, in order; the caller may pause between them."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._rest: list[bytes] = []  # of a line whose end has not come; joined once, however many pieces a long line has
        self._after_cr = False
        self._data: list[bytes] = []
        self._is_error = False
        self._texts: list[str] = []
        self._contents: list[str] = []
        self._calls: dict[int, list[_ToolCall]] = {}  # the pieces of each
        self._tokens: list[tuple[float, int]] = []  # per event with tokens or payload
        self._first: int | None = None  # index in _tokens of the first one with payload
        self._num_tokens = 0
        self._of_choice: dict[int, int] = {}  # by index, the tokens counted so far of events that hold one choice
        self._continuous = False
        self._begun = False
        self._parsed = Parsed()

    def feed(self, at_s: float, data: bytes) -> None:
        """Pieces of one read have the same ``at_s``, which is that read's time; an event has that of its last byte."""
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
        """Return what was said.

        Args:
            at_s: Time of the last read.
            ended: The body ended as HTTP says; False: it was cut.
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
        # With n > 1 vLLM sends an event for each choice, and its continuous usage counts that choice's tokens alone.
        only = event.choices[0].index if event.choices and len(event.choices) == 1 else None
        before = self._num_tokens if only is None else self._of_choice.get(only, 0)
        total = None if event.usage is None else event.usage.completion_tokens
        # A total that comes first with an empty last event says nothing about when its tokens came.
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
        """Keep what a client sends back with its next message."""
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
        """Join the events of one read. Without any payload (special tokens only) all events with tokens count as it."""
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
    """Return the call of all its pieces. Some servers repeat id and name, or make a new id, in each: the first ones count."""
    functions = [piece.function for piece in pieces if piece.function is not None]
    return Call(
        id=next((str(piece.id) for piece in pieces if piece.id), ""),
        name=next((function.name for function in functions if function.name), ""),
        arguments="".join(function.arguments or "" for function in functions),
    )


def error_message(body: bytes) -> str:
    """Return the message of an error body as OpenAI, vLLM or FastAPI write it; else the beginning of the body."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shorten(body)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return value if isinstance(value, str) else shorten(body)


def shorten(body: bytes) -> str:
    """Return the beginning of a body in one line."""
    return " ".join(body[:400].decode(errors="replace").split())[:200]
