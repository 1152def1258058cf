"""A connection is uvicorn's HTTP protocol with limits where uvicorn has none: on heads, trailers and requests in a row."""

import asyncio

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve_app.books.series import counter
from serve_app.host import descriptors

MAX_HEAD_BYTES = 64 << 10
"""The longest request line with its headers. Cookies and tokens behind gateways reach 16 KiB; without a limit, a client made uvicorn buffer
48 MB."""

HEAD_TIMEOUT_S = 30.0
"""The longest time from the first byte of a head to its end. A head is one packet, or a few."""

MAX_PIPELINED = 128
"""Requests that may wait on a connection while an earlier request is answered."""

FRAMING_PER_BODY_BYTE = 16
"""Framing bytes that a chunked body may have for each of its own bytes, besides `MAX_HEAD_BYTES`. A chunk of one byte has five of them."""

UNREAD_BODY_TIMEOUT_S = 5.0
"""How long the rest of a body is awaited after its request was answered without it, for example because the body is too large."""

STALLED_CLIENTS = counter("stalled_clients")

STALLED = "serve_app_stalled_client"
"""Key in the ``state`` of a request's scope: the client read nothing for too long, and its connection was dropped. The ledger reports
it."""

GONE = "serve_app_gone"
"""Key in the ``state`` of a request's scope: the function to call when the client disconnects before the end of the answer. The key is
removed when the function is called."""

CROWDED_CONNECTIONS = counter("crowded_connections")

CROWDED = "serve_app_crowded"
"""Key in the ``state`` of a request's scope: its connection has one of the spare file descriptors."""

CROWDED_TIMEOUT_S = 1.0
"""The limit for the head of the only request on a crowded connection. Either the request is a probe, or it is refused."""

_INVALID = "Invalid HTTP request received."

_LINGER_S = 1.0  # how long the bytes that a refused client still sends are read and dropped

_SLICE_BYTES = 16 << 10  # by how much a head may exceed its limit before the excess is noticed


def _ignore() -> None:
    """Do nothing when the client disconnects: no code has asked to be called."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection that answers 431 to a head or trailer that is too long and 408 to a head that is too slow, and then closes.

    A connection on which a client never sends anything is closed after the keep-alive time, like a connection that has become idle.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    crowded_timeout_s = CROWDED_TIMEOUT_S
    unread_body_timeout_s = UNREAD_BODY_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._in_body = False
        self._spare_framing = 0
        self._refused = False
        self._answered: RequestResponseCycle | None = None
        descriptor = transport.get_extra_info("socket").fileno()
        self._crowded = descriptors.are_short(descriptor)
        limit_s = self.crowded_timeout_s if self._crowded else self.timeout_keep_alive
        self._timer = self.loop.call_later(limit_s, self.timeout_keep_alive_handler)
        if self._crowded:
            CROWDED_CONNECTIONS.inc()
            if descriptors.are_nearly_gone(descriptor):
                transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if isinstance(exc, TimeoutError):  # the kernel's, by the TCP_USER_TIMEOUT that the listener sets
            STALLED_CLIENTS.inc()
            if self._answered is not None:
                self._answered.scope["state"][STALLED] = True
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn notifies only the newest request, which with pipelining has not even begun
            self._disconnect(self._answered)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cycle.scope["state"][GONE] = _ignore
        if self._crowded:
            cycle.scope["state"][CROWDED] = True
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self._refused and not self.transport.is_closing():
            # A body has a limit of its own, in the application.
            end = min(start + _SLICE_BYTES, len(data)) if self._in_head else len(data)
            was_in_head = self._in_head
            self._spare_framing -= 0 if was_in_head else end - start
            self._feed(data[start:end])
            # Count a slice only if all of it is head: with pipelining, the end of one request's body and the next head may share a slice.
            self._head_bytes = self._head_bytes + end - start if was_in_head and self._in_head else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", f"the limit is {MAX_HEAD_BYTES} bytes")
            elif self._in_body and self._spare_framing < 0:
                self._refuse(b"431 Request Header Fields Too Large", "trailers, or too many chunks that hold nothing")
            start = end

    def _feed(self, data: bytes) -> None:
        """Do what uvicorn's ``data_received`` does, but serve a request with the header ``Upgrade`` as if it had no such header.

        Java's client asks each http:// server for HTTP/2 by that header, and a server may ignore the header (RFC 9110, 7.8). httptools
        assumes that such a request has no body, so uvicorn would parse the body as the next request.
        """
        while not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(b"501 Not Implemented", "this server is no proxy")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            except httptools.HttpParserError:
                self.logger.warning(_INVALID)
                self._refuse(b"400 Bad Request", _INVALID)
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """Return the head that was just parsed, without its header ``Upgrade``."""
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"".join((line, *(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"), b"\r\n"))

    def on_message_begin(self) -> None:
        # Not at any bytes, as uvicorn does: the rest of a body behind its answer, or line ends, would leave a connection without a limit.
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._timer.cancel()
        limit_s = self.crowded_timeout_s if self._crowded else self.head_timeout_s
        self._timer = self.loop.call_later(limit_s, self._head_is_late)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` parses the head of such a request again, without its `Upgrade`
        self._unset_keepalive_if_required()  # the answer to the request before may have ended since this head began
        self._in_head = False
        self._in_body = True
        self._spare_framing = MAX_HEAD_BYTES + _SLICE_BYTES
        self._timer.cancel()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers have no use here, and uvicorn would keep them with the headers
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._spare_framing += (1 + FRAMING_PER_BODY_BYTE) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # a head with `Upgrade`, which `_feed` parses again
        self._in_body = False
        self._timer.cancel()
        super().on_message_complete()
        if not self.pipeline:
            # After a large body, reading stays paused until the application asks for more, so a disconnect would not be noticed.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # uvicorn would continue to read, and queue requests faster than it answers them
        elif self._in_body and self.cycle.response_complete and not self.transport.is_closing():  # not the next request's body
            self._timer = self.loop.call_later(self.unread_body_timeout_s, self.transport.close)

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Let the application of this request see a disconnect."""
        cycle.disconnected = not cycle.response_complete
        cycle.message_event.set()
        if cycle.disconnected and (gone := cycle.scope["state"].pop(GONE, None)) is not None:
            gone()

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The answer to the request before this one is still being sent, and the end of that answer has a limit of its own.
            self._timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"no complete request head within {self.head_timeout_s:g} s")

    def _refuse(self, status: bytes, message: str) -> None:
        body = message.encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        if self.pipeline or (self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete):
            self.transport.close()  # these bytes would end up inside another answer
            return
        if self.cycle is not None:
            self._disconnect(self.cycle)
        self._refused = True
        self._timer.cancel()
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + body)
        self.transport.write_eof()
        # Closing with unread bytes would reset the connection, and the client might never read the reason.
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
