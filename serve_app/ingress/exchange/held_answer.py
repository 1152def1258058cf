"""A held answer stands between vLLM's app and the client, so that a refusal before the first byte gets a real status.

vLLM begins a stream before it asks the engine, and ends a stream only by errors of its own. So the head is held back until the first byte
that depends on the engine. After that byte, an error of the fleet becomes the stream's last event. If a stream stays silent for long, its
head is sent, and then comments, because clients and proxies give up a silent connection. After the head, a refusal is an event too. So a
stream whose tenant has a deadline for the first token stays silent until the deadline has refused it, or has not. An answer that is not
streamed has nothing to send before its end, and stays silent.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, NoReturn, Protocol
from weakref import ref

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_app.errors import ServingError
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.http.error_answers import (
    MAX_ERROR_BYTES,
    MESSAGES,
    FleetError,
    answer_of,
    messages_event,
    responses_event,
    shortened,
    stream_event,
    stream_line,
)

_BEFORE_THE_ENGINE = (b"event: response.created\n", b"event: response.in_progress\n")
_ERROR_OF_VLLM = b'data: {"error": '
ERRORS = (_ERROR_OF_VLLM, b"event: error\n", b'{"error": ')
"""The beginnings of an error inside of a stream."""
_STATUS = re.compile(rb'"code": ?(\d{3})\b')
"""Finds the status in an error event. A message that quotes such a field has a backslash before each quotation mark, so it does not
match."""


class _Form(NamedTuple):
    """The form of a stream: the end of each event, a filler without content to send between events, and how an error becomes an event."""

    end: bytes
    filler: bytes
    event: Callable[[ServingError], bytes]


_FORMS = {
    b"text/event-stream": _Form(b"\n\n", b": waiting\n\n", stream_event),
    b"application/x-ndjson": _Form(b"\n", b"\n", partial(stream_line, end=b"\n")),
    b"application/x-nul-json": _Form(b"\0", b"\0", partial(stream_line, end=b"\0")),
}


_LONGEST_HOLD_S = 30.0
"""A deadline for the first token holds a stream's head back for at most this many seconds, and `_REFUSING_S` more. Many load balancers cut
a connection that is silent for 60 s."""
_REFUSING_S = 2.0
"""How long the refusal of an overdue request may take to arrive here, in seconds: a tick of the fleet, and an event loop that is late."""


class Timer(Protocol):
    """A timer that can be cancelled, like asyncio's ``TimerHandle``."""

    def cancel(self) -> None: ...


class Gathered(Protocol):
    """Writes to a connection that are held until `flush` sends them in one piece."""

    def flush(self) -> None: ...


Gather = Callable[[RequestResponseCycle | None], Gathered | None]
"""Begins to gather the writes to a connection. Returns None if they are gathered already, or if the server is not uvicorn."""


def write_at_once(cycle: RequestResponseCycle | None) -> Gathered | None:
    """Gather nothing: each write is sent to the connection by itself."""
    return None


class HeldAnswer:
    """An ASGI ``send`` that holds an answer back until its first byte that depends on the engine, or until a long silence.

    Unlike the server's own ``send``, it accepts a second head in place of a head that was not sent yet, and drops a head that comes after
    the head was sent. It notes in the exchange what it sends.
    """

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send = send
        self.exchange = exchange
        self.gather: Gather = write_at_once
        self._is_responses = exchange.path == "/v1/responses"
        self._is_messages = exchange.path == MESSAGES
        self.repeats = False
        """Whether the events of the answer differ only in their text, so that `write` may write those in the middle."""
        self._held: list[Message] = []
        self._form: _Form | None = None
        self._num_events = 0
        self._begun = False
        self._silent = True
        self._between_events = True
        self._silence_s = 0.0
        self._filled = False
        self._breaking: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # the app and the filling both send, and the held messages must be sent before any other
        self.is_sending = False
        self.head: Message = {}
        """The last head that the app gave, or the head that was sent in its place."""
        self._is_ending = False
        self._last: Gathered | None = None
        self.on_event: Callable[[bytes], None] | None = None
        """The function that is called with each body that was sent; None if there is none."""

    @property
    def cycle(self) -> RequestResponseCycle | None:
        """uvicorn's object for this request and its answer; None if the server is not uvicorn."""
        owner = getattr(self._send, "__self__", None)
        return owner if isinstance(owner, RequestResponseCycle) else None

    def takes_events(self, cycle: RequestResponseCycle, *, slow_too: bool = False) -> bool:
        """Return whether `write` may write now: the last event is complete, and the client reads fast enough, or may be slow."""
        busy = self.is_sending or self.exchange.answered or self._lock.locked() or self.exchange.error is not None
        is_read = slow_too or not cycle.flow.write_paused
        return self._begun and self._between_events and not busy and is_read and not cycle.disconnected

    def write(self, cycle: RequestResponseCycle, event: bytes) -> None:
        """Write a whole event past the app, in the form in which uvicorn writes a chunk."""
        if self._filled and self._form is not None:
            self._filled, event = False, self._form.filler + event
        self._silent = False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def expect_end(self) -> None:
        """Gather the next writes, which are the last: vLLM has the last tokens, and makes its last events without a pause."""
        self._is_ending = True

    async def __call__(self, message: Message) -> None:
        if self._begun and not self._lock.locked():  # a lock for each token would cost 1 us
            await self._take(message)
        else:
            async with self._lock:
                await self._take(message)

    async def _take(self, message: Message) -> None:
        if self.exchange.answered:
            return
        if message["type"] == "http.response.start":
            self._hold_head(message)
            return
        body = message.get("body", b"")
        if not self._begun and self._is_responses and body.startswith(_BEFORE_THE_ENGINE):
            self._held.append(message)
            return
        error = self.exchange.error
        if error is not None and not self._begun:
            await self._refuse()
            return
        is_event = body.startswith(ERRORS)
        if len(body) > MAX_ERROR_BYTES and (is_event or self.head.get("status", 200) >= HTTPStatus.BAD_REQUEST):
            message = self._shorten(message)
        if is_event:
            self.exchange.error_status = max(self.exchange.error_status, status_of(body))
        if error is not None and body.startswith(_ERROR_OF_VLLM):
            message = {**message, "body": stream_event(error)}  # the type in vLLM's event is the same for every 503
        elif error is not None and is_event and self._is_messages:
            message = {**message, "body": messages_event(error)}
        if self._begun:
            await self._pass_on(message)
        else:
            await self._begin(message)

    async def _begin(self, message: Message) -> None:
        """Send the held messages together with the first body."""
        gathering = self.gather(self.cycle)
        try:
            await self._release()
            await self._pass_on(message)
        finally:
            if gathering is not None:
                gathering.flush()

    async def end(self) -> bool:
        """Send the client the error of the exchange, if there is one, and return whether the answer is complete now."""
        error = self.exchange.error
        if error is None:
            return self.exchange.answered
        async with self._lock:
            if not self._begun:
                await self._refuse()
            elif not self.exchange.answered:
                await self._pass_on({"type": "http.response.body", "body": self._event_of(error), "more_body": False})
        return True

    def _event_of(self, error: ServingError) -> bytes:
        if self._is_responses:
            return responses_event(error, self._num_events)
        if self._is_messages:
            return messages_event(error)
        return (stream_event if self._form is None else self._form.event)(error)

    @contextlib.asynccontextmanager
    async def filling(self, pause: Callable[[float, Callable[[], None]], Timer], silence_s: float) -> AsyncIterator[None]:
        """Send a filler at the end of each pause in which the stream was silent, while the app runs.

        Args:
            pause: Begins a pause of so many seconds. It calls the given function at the end of the pause, unless the returned timer is
                cancelled before.
            silence_s: Seconds of a pause.
        """
        self._pause, self._silence_s = pause, silence_s
        self._timer = pause(silence_s, self._pause_is_over)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._breaking is not None:
                self._breaking.cancel()
                await asyncio.wait([self._breaking])

    @property
    def _must_speak(self) -> bool:
        # After an error no filler is needed, because the end follows; and an error before the head still becomes a real status.
        return self._silent and not self.exchange.answered and self.exchange.error is None

    @property
    def _held_for_s(self) -> float:
        """For how many seconds a deadline still holds the head back, so that its refusal has a status; 0 or less for none."""
        caller, first = self.exchange.caller, self.exchange.requests.first
        has_token = first is not None and first.trail.first_token_at is not None
        if self._begun or has_token or caller is None or (first_token_s := caller.tenant.first_token_s) is None:
            return 0.0
        return self.exchange.arrived_at + min(first_token_s, _LONGEST_HOLD_S) + _REFUSING_S - time.monotonic()

    def _pause_is_over(self) -> None:
        if self._must_speak and (held_for_s := self._held_for_s) > 0:
            self._begin_pause(min(held_for_s, self._silence_s))
        elif self._must_speak:  # a task is made only then, because it would cost every answer 30 us
            self._breaking = asyncio.create_task(self._break_silence(), name="fill silences")
        else:
            self._begin_pause(self._silence_s)

    def _begin_pause(self, pause_s: float) -> None:
        self._silent = True
        self._timer = self._pause(pause_s, self._pause_is_over)

    async def _break_silence(self) -> None:
        async with self._lock:
            if self._must_speak and self._form is not None and self._between_events:
                await self._release()
                await self._send({"type": "http.response.body", "body": self._form.filler, "more_body": True})
                self._filled = True
        self._begin_pause(self._silence_s)

    def _hold_head(self, message: Message) -> None:
        if not self._begun:
            self.head = message
            self._held = [message]
            media_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._form = _FORMS.get(media_type.partition(b";")[0])

    def _shorten(self, message: Message) -> Message:
        """Return the error with its texts cut, and put the new length into a head that has not been sent yet."""
        body = shortened(message["body"])
        has_length = any(name == b"content-length" for name, _ in self.head.get("headers", ()))  # a stream has none
        if self._held and self.head is self._held[0] and has_length:
            headers = [(name, value) for name, value in self.head["headers"] if name != b"content-length"]
            self.head = self._held[0] = {**self.head, "headers": [*headers, (b"content-length", b"%d" % len(body))]}
        return {**message, "body": body}

    async def _refuse(self) -> None:
        error = self.exchange.error
        assert error is not None
        self._begun = self.exchange.answered = True
        response = answer_of(error, self.exchange.path).response()
        self.exchange.status = response.status_code
        self.head = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": [*response.raw_headers, *self.exchange.headers],
        }
        await self._send(self.head)
        await self._send({"type": "http.response.body", "body": response.body})

    async def _release(self) -> None:
        self._begun = True
        held, self._held = self._held, []
        for message in held:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        body = message.get("body")
        if message["type"] == "http.response.start":
            self.exchange.status = message["status"]
            if self.exchange.headers:
                message = {**message, "headers": [*message.get("headers", ()), *self.exchange.headers]}
        else:
            if body:
                self._num_events += 1
                self._silent = False
                if self._form is not None:
                    self._between_events = body.endswith(self._form.end)
                    message = self._after_a_filler(self._form, message) if self._filled else message
            self.exchange.answered = not message.get("more_body", False)
        if self._is_ending and (last := self.gather(self.cycle)) is not None:
            self._is_ending, self._last = False, last
            asyncio.get_running_loop().call_soon(last.flush)  # if vLLM pauses after all, the client does not wait for it
        self.is_sending = True
        try:
            await self._send(message)
        finally:
            self.is_sending = False
            if self._last is not None and self.exchange.answered:
                self._last.flush()
        if self.on_event is not None and body:
            self.on_event(body)

    def _after_a_filler(self, form: _Form, message: Message) -> Message:
        """Put the filler once more in front of the event that follows it, in one piece.

        The client of `vllm bench serve` (0.32) strips each piece that it reads, so it takes a comment that arrives alone for the beginning
        of the next event. When vLLM has mended that, a test in test_held_clients.py fails; then this method and `_filled` can be removed.
        """
        self._filled = False
        return {**message, "body": form.filler + message["body"]}


def status_of(event: bytes) -> int:
    """Return the status in an error event; 500 if it has none."""
    found = _STATUS.search(event)
    return int(found[1]) if found else HTTPStatus.INTERNAL_SERVER_ERROR.value


_current: ContextVar["ref[HeldAnswer] | None"] = ContextVar("answer", default=None)
"""Weak: contexts of tasks outlive the request, until Python's garbage collection finds them, and the answer should not."""


def current_answer() -> HeldAnswer | None:
    """Return the answer of the HTTP request that the running code answers; None outside of one."""
    found = _current.get()
    return None if found is None else found()


def current_exchange() -> Exchange | None:
    """Return the HTTP request that the running code answers; None outside of one."""
    held = current_answer()
    return None if held is None else held.exchange


def refuse(error: ServingError) -> NoReturn:
    """End the HTTP request that the running code answers by this error.

    Raises:
        FleetError: Always. vLLM's front end passes it on.
    """
    if (exchange := current_exchange()) is not None:
        exchange.fail(error)  # vLLM reports errors of a stream only after its head
    raise FleetError(error)


@contextlib.contextmanager
def answering(held: HeldAnswer) -> Iterator[None]:
    """Make this the current answer of the code inside."""
    token = _current.set(ref(held))
    try:
        yield
    finally:
        _current.reset(token)
