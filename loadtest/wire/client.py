"""The load generator's HTTP client uses gevent sockets, one timestamp per read, and parses only after the answer has ended.

Per read, the client calls recv, the clock and `httptools`, and nothing else, so that the time of a chunk is the time at which the
kernel had it, as far as one process can measure. The pool of connections has no limit: an open loop never waits for a connection.

Before use, the client checks if the server has closed a pooled connection. If the close crosses our request on the wire (a *reused*
connection ends without a byte of an answer within `RACE_S` of sending), the request is sent once more on a new connection, under
the same id, and `Row.reason` says so even when the row is ok. Nothing else is ever resent.
"""

import contextlib
import errno
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gevent
import gevent.pool
import gevent.socket
import gevent.ssl
import httptools

from loadtest.errors import UsageError
from loadtest.records import Row, ScheduledRequest, State
from loadtest.wire.http_answer import HttpAnswer, refusal, retry_after
from loadtest.wire.sse import BodyParser, Form, Parsed
from loadtest.wire.target import Target

READ_BYTES = 256 * 1024
CONNECT_WITHIN_S = 10.0
"""Limit for opening all connections of the warm-up. Connections that are opened later have the deadline of their request."""
RACE_S = 0.1
"""A close that comes later than this was no race: the server had read the request."""
READS_PER_SLICE = 128
"""Reads of one connection, about 0.5 ms of work, after which other connections are read first."""
HASTY_S = 0.0002
"""Reads with a shorter gap did not wait for data."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
NOTE_RESENT = "sent again: the server had closed the idle connection"
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Asked:
    """One request to send."""

    request: ScheduledRequest
    path: str
    body: bytes
    timeout_s: float
    """Limit from the due time to the end of the answer."""
    stream: bool
    cancel_after_s: float | None = None
    """Seconds from sending after which the client closes the connection."""
    keep_text: bool = True

    @property
    def form(self) -> Form:
        if not self.stream:
            return "whole"
        return "lines" if self.path.endswith("/generate") else "sse"


class Heard(NamedTuple):
    """One answer."""

    parsed: Parsed
    over_s: float
    """When the HTTP answer ended, or the client gave up, in seconds from the epoch. A body may end later than its ``[DONE]``."""


class Client:
    """A client of one target. Any number of greenlets may call `ask` at once.

    Raises:
        UsageError: The target's name cannot be resolved.
    """

    def __init__(self, target: Target, *, worker: int, epoch: float, id_prefix: str) -> None:
        """Resolve the target's name, once, so that no request's latency includes a lookup.

        Args:
            epoch: The ``time.perf_counter()`` value from which the rows' times count; may be set later, but before `ask`.
            id_prefix: The header X-Request-Id is this prefix and the request's id.
        """
        self._target = target
        self._worker = worker
        self.epoch = epoch
        self._id_prefix = id_prefix
        self._idle: list[Any] = []
        self._closed = False
        # One buffer for all reads: a new object of this size for each read costs 2 to 20 us, depending on malloc.
        self._view = memoryview(bytearray(READ_BYTES))
        self._tls: Any = None
        if target.tls:
            self._tls = gevent.ssl.SSLContext(gevent.ssl.PROTOCOL_TLS_CLIENT)
            self._tls.load_default_certs()
        try:
            found = gevent.socket.getaddrinfo(target.host, target.port, type=gevent.socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:
            raise UsageError("target", f"{target.host!r} cannot be resolved: {getattr(exc, 'strerror', exc)}") from exc
        self._addresses = [(family, address) for family, _, _, _, address in found]
        fields = {"Host": target.authority, **target.headers, "Content-Type": "application/json"}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    def warm(self, num: int) -> int:
        """Open up to ``num`` connections for the pool within `CONNECT_WITHIN_S`; return the number of opened ones.

        Raises:
            UsageError: No connection could be opened in time.
        """
        pool, first = gevent.pool.Pool(64), len(self._idle)
        self._refused = f"it accepted none in {CONNECT_WITHIN_S:g} s"
        with gevent.Timeout(CONNECT_WITHIN_S, False):
            for _ in range(num):
                pool.spawn(self._open_idle)
            pool.join()
        pool.kill()
        if num > 0 and len(self._idle) == first:
            raise UsageError(
                "target", f"{self._target.root} has answered before, but no connection to it can be opened now: {self._refused}"
            )
        return len(self._idle) - first

    def _open_idle(self) -> None:
        try:
            self._idle.append(self._connect())
        except OSError as exc:
            self._refused = f"{type(exc).__name__}: {exc}"

    def close(self) -> None:
        """Close the pool. Running requests continue; to end one, kill its greenlet: `ask` then returns a timeout."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def ask(self, asked: Asked, *, due_s: float, hear: Callable[[Heard], None] | None = None) -> Row:
        """Send the request and return its row; never raises. ``hear`` is called with the answer, if there was any."""
        row = Row(id=asked.request.id, worker=self._worker, due_s=due_s, state="never_sent")
        now = self._now()
        left_s = due_s + asked.timeout_s - now
        if left_s <= 0:
            row.reason = f"the generator was {now - due_s:.3f} s late, longer than the request's timeout of {asked.timeout_s:g} s"
            return row
        row.sent_s = now
        answer = HttpAnswer()
        cancelled = asked.cancel_after_s is not None and asked.cancel_after_s < left_s
        timer = gevent.Timeout.start_new(asked.cancel_after_s if cancelled else left_s)
        try:
            self._exchange(asked, row, answer)
        except gevent.Timeout as exc:
            if exc is not timer:
                raise
            answer.cut_state = "cancelled" if cancelled else "timeout"
            answer.cut = f"the client disconnected after {asked.cancel_after_s:g} s" if cancelled else _late(asked)
        except gevent.GreenletExit:
            answer.cut_state, answer.cut = "timeout", "unfinished when the drain ended"
        except Exception as exc:  # the root of this request's task
            answer.cut_state = "never_sent" if row.connected_s is None else "stream_error"
            answer.cut = f"{type(exc).__name__}: {exc}"
        finally:
            # These lines break reference cycles: the garbage collector is off during a run. A timer that was raised refers to this frame.
            timer.close()
            timer.__traceback__ = None
            answer.parser = None
        row.end_s = self._now()
        try:
            self._judge(row, asked, answer, hear)
        except Exception as exc:  # a hostile answer may raise anything; the row must be kept
            row.state, row.reason = "stream_error", f"cannot be read: {type(exc).__name__}: {exc}"[:300]
        if row.state == "never_sent":
            row.sent_s = row.end_s = None
        return row

    def _now(self) -> float:
        return self._since_epoch(time.perf_counter())

    def _exchange(self, asked: Asked, row: Row, answer: HttpAnswer) -> None:
        head = f"POST {self._target.prefix}{asked.path} HTTP/1.1\r\n{self._head}X-Request-Id: {self._id_prefix}{row.id}\r\n"
        message = f"{head}Content-Length: {len(asked.body)}\r\n\r\n".encode() + asked.body
        sock = self._take_idle()
        if sock is not None:
            row.connected_s = self._now()
            self._talk(sock, message, answer)
            if not answer.cut or answer.num_reads or self._now() - row.connected_s > RACE_S:
                return
            row.reason, answer.cut = NOTE_RESENT, ""
        try:
            sock = self._connect()
        except OSError as exc:
            answer.cut_state = "never_sent" if exc.errno in _OWN_LIMITS else "connect_error"
            answer.cut = f"{type(exc).__name__}: {exc}"
            return
        row.connected_s = self._now()
        self._talk(sock, message, answer)

    def _talk(self, sock: Any, message: bytes, answer: HttpAnswer) -> None:
        """Send the request and receive the answer; afterwards the connection is in the pool, or closed."""
        broken = ""
        keep = False
        try:
            try:
                sock.sendall(message)
            except OSError as exc:  # a server may answer and close before it has read the whole request
                broken = f"{type(exc).__name__} while sending"
            _receive(sock, answer, self._view)
            keep = answer.reusable and not broken and not self._closed
        except OSError as exc:
            broken = broken or f"{type(exc).__name__} {answer.where()}"
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not answer.ended:
                answer.cut_state, broken = "http_error", f"not HTTP: {type(exc).__name__}: {exc}"
        finally:
            if keep:
                self._idle.append(sock)
            else:
                sock.close()
        if not answer.ended:
            answer.cut = broken or f"the connection ended {answer.where()}"

    def _connect(self) -> Any:
        for family, address in self._addresses[:-1]:
            with contextlib.suppress(OSError):
                return self._open(family, address)
        return self._open(*self._addresses[-1])

    def _open(self, family: int, address: Any) -> Any:
        sock = gevent.socket.socket(family, gevent.socket.SOCK_STREAM)
        try:
            sock.connect(address)
            sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
            return self._tls.wrap_socket(sock, server_hostname=self._target.host) if self._tls else sock
        except BaseException:  # also that of the timer
            sock.close()
            raise

    def _take_idle(self) -> Any:
        """Return the most recently used pooled connection that is still open."""
        while self._idle:
            sock = self._idle.pop()
            sock.settimeout(0.0)
            try:
                sock.recv(1)  # end of the stream, or unexpected data: the connection is unusable
            except (BlockingIOError, gevent.ssl.SSLWantReadError):
                sock.settimeout(None)
                return sock
            except OSError:
                pass
            sock.close()
        return None

    def _judge(self, row: Row, asked: Asked, answer: HttpAnswer, hear: Callable[[Heard], None] | None) -> None:
        """Fill the row. The server's own error has priority over what the client did to the connection."""
        assert row.end_s is not None
        over_s = row.end_s  # so far, the time at which the client gave up, if it did
        row.status = answer.status
        if answer.headers_at is not None:
            row.headers_s = self._since_epoch(answer.headers_at)
        state, reason = answer.cut_state, answer.cut
        if answer.status:
            row.retry_after_s = retry_after(answer.headers)
            row.server_id = answer.headers.get("x-request-id", "")
            if refused := refusal(answer, asked.form):
                state, reason = "http_error", refused
            else:
                parsed = _parse(answer, asked.form)
                state, reason = self._read_body(row, asked, answer, parsed)
                if hear is not None:
                    last = answer.bodies[-1] if answer.ended else None
                    hear(Heard(parsed, self._since_epoch(last) if isinstance(last, float) else over_s))
        row.state = state
        row.reason = "; ".join(part for part in (row.reason, reason) if part)[:300]

    def _read_body(self, row: Row, asked: Asked, answer: HttpAnswer, parsed: Parsed) -> tuple[State, str]:
        assert row.sent_s is not None
        row.prompt_tokens, row.output_tokens = parsed.prompt_tokens, parsed.output_tokens
        row.finish_reason = parsed.finish_reason
        row.server_id = parsed.server_id or row.server_id
        row.num_coalesced = parsed.num_coalesced
        sent = self.epoch + row.sent_s
        row.chunks = [(round((at - sent) * 1000, 3), num_tokens) for at, num_tokens in parsed.chunks]
        if parsed.first_s is not None and parsed.last_s is not None:
            row.first_s, row.last_s = self._since_epoch(parsed.first_s), self._since_epoch(parsed.last_s)
        if parsed.text:
            row.text = parsed.text if asked.keep_text else ""
            row.text_sha256 = hashlib.sha256(parsed.text.encode()).hexdigest()
        if parsed.error:
            return "stream_error", parsed.error
        if not parsed.complete:
            return answer.cut_state, answer.cut or "the stream ended without [DONE]"
        end_at = parsed.done_s if parsed.done_s is not None else answer.bodies[-1]
        assert isinstance(end_at, float)
        row.end_s = self._since_epoch(end_at)
        if row.end_s - row.due_s > asked.timeout_s:
            return "timeout", _late(asked)
        return "ok", ""

    def _since_epoch(self, at: float) -> float:
        return round(at - self.epoch, 6)


def _receive(sock: Any, answer: HttpAnswer, view: memoryview) -> None:
    """Read the answer through ``view``. All greenlets can share one view: no greenlet switches between its recv and its feed."""
    recv, feed, mark, clock = sock.recv_into, answer.parser.feed_data, answer.bodies.append, time.perf_counter
    before, num_hasty, left = clock(), 0, MAX_ANSWER_BYTES
    while not answer.ended:
        size = recv(view)
        now = clock()
        # A recv that finds data does not yield to other greenlets or to timers.
        num_hasty = num_hasty + 1 if now - before < HASTY_S else 0
        if num_hasty == READS_PER_SLICE:
            gevent.sleep(HASTY_S)
            num_hasty = 0
        before, left = now, left - size
        if left < 0:
            raise ValueError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if not size:
            answer.end_of_input()
            mark(now)
            return
        answer.num_reads += 1
        try:
            feed(view[:size])
        finally:
            mark(now)
        if answer.headers_at is None and answer.status:
            answer.headers_at = now


def _parse(answer: HttpAnswer, form: Form) -> Parsed:
    parser = BodyParser(form)
    for count, (at, data) in enumerate(answer.reads(), 1):
        parser.feed(at, data)
        if count % READS_PER_SLICE == 0:
            try:
                gevent.sleep(0.0001)  # with 0 the loop would not poll its sockets
            except gevent.GreenletExit:
                continue  # the answer is here, so this is no timeout
    last = answer.bodies[-1] if answer.bodies else 0.0
    assert isinstance(last, float)
    return parser.finish(last, ended=answer.ended)


def _late(asked: Asked) -> str:
    return f"no complete answer within {asked.timeout_s:g} s after due"
