"""The law server's adapter has its sockets and timers; `laws` and `answer` decide what is due when. Linux only."""

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import httptools
import uvloop

from loadtest.proof.truth.answer import PATHS, Refused, ScriptedAnswer, Step, error_body, parse, whole
from loadtest.proof.truth.laws import Laws
from loadtest.proof.truth.ledger import Entry, Outcome, TruthLedger
from loadtest.proof.truth.settings import Failure, Law

_OUTCOMES: dict[str, Outcome] = {
    "drop": "dropped",
    "truncate": "truncated",
    "error-event": "error_event",
    "status": "status",
    "html": "html",
}
_FULL = Failure(kind="status", status=429, every=1)
"""The failure of a request that finds all slots busy."""
T = TypeVar("T")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A timer that calls back at monotonic times, never early. It is a timerfd, with a median error of 0.05 ms; uvloop's own timers count
    milliseconds and have 0.6 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._spec = _Itimerspec()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._firing = False
        self._loop = loop
        loop.add_reader(self._fd, self._fire)

    def at(self, due: float, callback: Callable[[], None]) -> None:
        entry = (due, next(self._order), callback)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry and not self._firing:
            self._arm()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _arm(self) -> None:
        self._spec.value.seconds, self._spec.value.nanoseconds = divmod(int(self._due[0][0] * 1e9) + 1, 10**9)
        self._libc.timerfd_settime(self._fd, 1, ctypes.byref(self._spec), None)  # 1: an absolute time; a past one fires at once

    def _fire(self) -> None:
        self._firing = True
        now = time.monotonic()  # read once: writes that become due now wait until sockets have been read
        try:
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
        finally:
            self._firing = False
            if self._due:
                self._arm()  # this also resets the timer
            else:
                os.read(self._fd, 8)


class ScriptedExchange:
    """One answer that is being written; ``entry`` is None if the request is not logged."""

    def __init__(
        self, server: "LawServer", connection: "LawConnection", steps: Iterator[Step], entry: Entry | None = None
    ) -> None:
        self._server = server
        self._connection = connection
        self._steps = steps
        self._step = next(steps, None)
        self._due = 0.0  # due time of the write before: none is due earlier
        self._entry = entry
        self._ended = False

    def advance(self) -> None:
        """Make all due writes, and set the alarm for the next write."""
        while self._step is not None and not self._ended:
            due, data, num_tokens = self._step
            self._due = max(self._due, due + self._server.origin_s)
            now = time.monotonic()
            if self._due > now:
                self._server.alarm.at(self._due, self.advance)
                return
            self._connection.write(data)
            if self._entry is not None:
                self._entry.note_write(self._due, now, num_tokens)
            self._step = next(self._steps, None)
        if not self._ended:
            entry, framing = self._entry, self._server.law.framing
            self.end(_OUTCOMES.get(entry.injected, entry.outcome) if entry else "ok")
            self._connection.answered(close=entry is not None and (framing == "close" or entry.injected in ("drop", "truncate")))

    def end(self, outcome: Outcome) -> None:
        """Log the request and send nothing more."""
        self._ended = True
        if self._entry is not None:
            self._server.ledger.end(self._entry, outcome)


class LawConnection(asyncio.Protocol):
    """HTTP/1.1 on one socket; a request that comes during an answer waits for its turn."""

    def __init__(self, server: "LawServer") -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: list[tuple[str, str, str, bytes, bool]] = []
        self._exchange: ScriptedExchange | None = None
        self._keep_alive = True
        self._num_answered = 0
        self.number = next(server.connection_numbers)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not instances of asyncio's classes
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._end("client_gone")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()
        if self._exchange is None and self._waiting:
            self._begin()

    def on_message_begin(self) -> None:
        self._url, self._request_id, self._body = b"", "", bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method, path = self._parser.get_method().decode(), self._url.split(b"?")[0].decode("latin-1")
        self._waiting.append((method, path, self._request_id, bytes(self._body), self._parser.should_keep_alive()))

    def _begin(self) -> None:
        method, path, request_id, body, self._keep_alive = self._waiting.pop(0)
        self._exchange = self._server.exchange(self, method, path, request_id, body)
        self._exchange.advance()

    def answered(self, *, close: bool) -> None:
        """Start the next request, or close."""
        self._exchange = None
        self._num_answered += 1
        if close or not self._keep_alive or self._num_answered == self._server.law.answers_per_connection:
            self._transport.close()
        elif self._waiting:
            self._begin()

    def write(self, data: bytes) -> None:
        """Write directly to the socket if possible: the transport writes at the end of the loop's round, several writes in one segment."""
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # full or closed: the transport finds out which
                data = data[os.write(self._fd, data) :]
        if data:
            self._transport.write(data)

    def shut_down(self) -> None:
        """Close at once, also during an answer."""
        self._end("shutdown")
        self._transport.abort()

    def _end(self, outcome: Outcome) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(outcome)


class LawServer:
    """The state that all connections share."""

    def __init__(self, law: Law, alarm: Alarm, log: BinaryIO, *, seed: int) -> None:
        self.law = law
        self.alarm = alarm
        self.ledger = TruthLedger(law, log)
        self.origin_s = 0.0
        """Monotonic time of the first generation request; 0 before it."""
        self.connections: set[LawConnection] = set()
        self.connection_numbers = itertools.count(1)
        self._laws = Laws(law, seed=seed)
        self._numbers = itertools.count(1)

    def exchange(self, connection: LawConnection, method: str, path: str, request_id: str, body: bytes) -> ScriptedExchange:
        """Return the answer to a request that has just been read."""
        now = time.monotonic()
        if method == "POST" and path in PATHS:
            self.origin_s = self.origin_s or now
            entry = Entry(request_id, next(self._numbers), connection.number, path, now, time.time(), writes=[])
            return ScriptedExchange(self, connection, self._generation(entry, body), entry)
        accepted_s = self._laws.real_time(self._laws.server_time(now - self.origin_s)) if self.origin_s else 0.0
        return ScriptedExchange(self, connection, iter([(accepted_s, self._information(method, path, now), 0)]))

    def _information(self, method: str, path: str, now: float) -> bytes:
        match method, path:
            case "GET", "/v1/models":
                card = {"object": "model", "created": 0, "owned_by": "truth"}
                models = [{"id": name, **card} for name in (self.law.model, *self.law.adapters)]
                return whole(200, {"object": "list", "data": models})
            case "GET", "/version":
                return whole(200, {"version": "truth"})
            case "GET", "/healthz":
                return whole(200, "", content_type="text/plain")
            case "GET", "/metrics":
                return whole(200, self.ledger.metrics(now - self.origin_s), content_type="text/plain; version=0.0.4")
        return whole(404, error_body(404, f"no route {method} {path}"))

    def _generation(self, entry: Entry, body: bytes) -> Iterator[Step]:
        arrival_s, key = entry.arrival_s - self.origin_s, entry.request_id or str(entry.number)
        try:
            asked = parse(entry.path, body, self.law)
        except Refused as refused:
            entry.outcome, (entry.status, message) = "status", refused.args
            accepted_s = self._laws.timing(key, arrival_s=arrival_s, num_chunks=0).accepted_s
            return iter([(accepted_s, whole(entry.status, error_body(entry.status, message)), 0)])
        failure = _FULL if self._laws.refuses(arrival_s) else self._laws.failure(key, entry.number)
        num_chunks = -(-len(asked.tokens) // self.law.tokens_per_chunk)
        if failure is not None:
            entry.injected = failure.kind
            entry.status = {"status": failure.status, "drop": 0}.get(failure.kind, 200)
            num_chunks *= failure.kind not in ("drop", "status", "html")  # these never get a slot
        timing = self._laws.timing(key, arrival_s=arrival_s, num_chunks=num_chunks, prompt_tokens=asked.prompt_tokens)
        self.ledger.begin(entry, asked, timing)
        return ScriptedAnswer(asked, self.law, timing, failure, number=entry.number, created=int(entry.arrival_unix_s)).steps()


@contextlib.asynccontextmanager
async def serve(law: Law, *, log: Path, host: str = "127.0.0.1", port: int = 0, seed: int = 0) -> AsyncIterator[str]:
    """Serve in this loop, which must be uvloop's; yield the URL. The log is appended to, and is complete at the end.

    Raises:
        OSError: The address is taken, or the log cannot be written.
    """
    loop = asyncio.get_running_loop()
    with log.open("ab") as file, contextlib.closing(Alarm(loop)) as alarm:
        server = LawServer(law, alarm, file, seed=seed)
        listener = await loop.create_server(lambda: LawConnection(server), host, port, backlog=4096)
        try:
            yield f"http://{host}:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for connection in list(server.connections):
                connection.shut_down()
            server.ledger.close(server.origin_s)


@contextlib.contextmanager
def running(law: Law, *, log: Path, port: int = 0, seed: int = 0) -> Iterator[str]:
    """Run `serve` in a thread of this process. This does not work if gevent has patched threads."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="truth")
    thread.start()

    def wait(work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=30)

    async def leave() -> None:
        await server.__aexit__(None, None, None)

    server = serve(law, log=log, port=port, seed=seed)
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        url = wait(server.__aenter__())
        stack.callback(lambda: wait(leave()))
        yield url
