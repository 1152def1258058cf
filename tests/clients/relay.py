"""A `Relay` stands between one client and a server: it passes all bytes on, and counts requests, events and comments of streams."""

import socket
import threading
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

PIECE_BYTES = 65536


class Relay(ThreadingTCPServer):
    """A TCP server on a free port of 127.0.0.1. It is without TLS, and reads nothing of HTTP but these marks.

    Each chunk of a stream has its marks whole: the ingress writes an event, and a comment, in one piece.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = upstream
        self._lock = threading.Lock()
        self._sent, self._received = bytearray(), bytearray()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forget(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._sent, self._received = bytearray(), bytearray()

    def num_asked(self) -> int:
        """Return how many answers of a model were asked for. Anthropic's ``count_tokens`` asks for none."""
        with self._lock:
            return self._sent.count(b"POST /") - self._sent.count(b"/count_tokens HTTP/")

    def num_events(self) -> int:
        with self._lock:
            return self._received.count(b"data: ")

    def num_comments(self) -> int:
        with self._lock:
            return self._received.count(b": waiting\n\n")

    def note(self, data: bytes, *, sent: bool) -> None:
        with self._lock:
            (self._sent if sent else self._received).extend(data)


class _Connection(BaseRequestHandler):
    server: Relay
    request: socket.socket

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(self.server.upstream) as upstream:
            up = threading.Thread(target=self._pump, args=(self.request, upstream), kwargs={"sent": True}, daemon=True)
            up.start()
            self._pump(upstream, self.request, sent=False)
            up.join()

    def _pump(self, source: socket.socket, target: socket.socket, *, sent: bool) -> None:
        """Pass on until the source ends, then end both: HTTP clients close a connection as a whole."""
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                self.server.note(data, sent=sent)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
