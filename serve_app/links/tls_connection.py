"""`TlsConnection` encrypts one link, at either end. It differs from asyncio's and uvloop's own TLS in three ways that a link needs.

- The link has the plain connection from the start: a replica counts and bounds the connections whose TLS handshake is not over.
- The size of the write buffer is that of the plain connection, so it becomes smaller whenever the peer reads (see `SendBuffer`).
- A close does not wait for a peer that has gone; asyncio's and uvloop's waits 30 s.
"""

import asyncio
import contextlib
import logging
import ssl
from typing import Any, cast

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 14
"""The longest plain text of one TLS record; `ssl.SSLObject.read` returns no more at once."""


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """The protocol of the plain connection, and for ``link`` the transport of the encrypted one.

    Bytes that the link writes before the end of the TLS handshake wait for it. Before that, `close` aborts the connection, because the
    peer could not read anything. If TLS fails, the link's ``connection_lost`` gets the error.
    """

    def __init__(self, link: asyncio.Protocol, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__()
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._established = False
        self._early: list[bytes] = []
        """The link's writes before the end of the TLS handshake."""
        self._failure: OSError | None = None
        self._plain: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._link.connection_made(self)
        self.data_received(b"")  # the client speaks first

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        try:
            text, ended = self._decrypt()
        except ssl.SSLError as exc:
            self._fail(exc)
            return
        self._send()
        if text:
            self._link.data_received(text)
        if ended and not self.is_closing():
            self.eof_received()
            self.close()

    def _decrypt(self) -> tuple[bytes, bool]:
        """Return the decrypted bytes for the link, and whether the peer has ended its stream."""
        pieces: list[bytes] = []
        try:
            if not self._established:
                self._tls.do_handshake()
                self._established = True
                self.write(b"".join(self._early))
                self._early.clear()
            while piece := self._tls.read(_READ_BYTES):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            return b"".join(pieces), False
        return b"".join(pieces), True

    def _fail(self, failure: OSError) -> None:
        self._failure = failure
        if self._tls.server_side:  # the ingress itself logs why a dial has failed
            logger.info("connection from %s closed: TLS failed: %s", self._plain.get_extra_info("peername"), failure)
        self._send()  # an alert tells the peer why
        self._plain.close()

    def _send(self) -> None:
        if encrypted := self._outgoing.read():
            self._plain.write(encrypted)

    def eof_received(self) -> None:
        if self._established:
            self._link.eof_received()
        else:
            self._fail(ConnectionResetError("the peer closed the connection before the TLS handshake was over"))

    def resume_writing(self) -> None:
        self._link.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.connection_lost(self._failure or exc)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        if not self._established:
            self._early.append(bytes(data))
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._send()

    def close(self) -> None:
        """Tell the peer that nothing follows, and close without waiting for its answer."""
        if not self._established:
            self._plain.abort()
        elif not self.is_closing():
            with contextlib.suppress(ssl.SSLError):  # unwrap would also read the peer's answer
                self._tls.unwrap()
            self._send()
            self._plain.close()

    def abort(self) -> None:
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._plain.get_extra_info(name, default)
