"""`TcpExchange` connects simulated engines of different processes, over the ports of NIXL's side channels.

Each read has one connection. The target sends its `Ask` as a line of JSON and the source its answer, null if it does not keep the request.
Then the connection stays open until the read is over, so that each side notices the other's death; the target's last byte says that the
read is over. All of this is done by threads: an engine's step never waits.
"""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from serve_app.simulated.exchange import ANSWER_S, Answer, Ask, Reading, Source

_MAX_LINE = 8192
_LONGEST_READ_S = 120.0
"""Seconds after which a source forgets a connection: the lease is over long before."""

_asks = msgspec.json.Decoder(Ask)
_answers = msgspec.json.Decoder(Answer | None)


class TcpExchange:
    """The exchange of one engine.

    Args:
        host: An address of this machine, on which the engine listens.
        port: The engine's own port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def serve(self, engine_id: str, source: Source) -> Callable[[], None]:
        """Listen.

        Raises:
            OSError: The address is not this machine's, or the port is taken.
        """
        return _Listener(self._host, self._port, source).close

    def ask(self, ask: Ask, reading: Reading) -> Callable[[], None]:
        call = _Call(ask, reading)
        _run(call.run, "kv read")
        return call.finish


class _Listener:
    def __init__(self, host: str, port: int, source: Source) -> None:
        self._source = source
        # The supervisor has bound the port, too (`replica/side_channel.py`): `create_server` sets SO_REUSEADDR.
        self._sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._open = set[socket.socket]()
        self._is_closed = False
        self._lock = threading.Lock()
        _run(self._accept, "kv side channel")

    def close(self) -> None:
        """Refuse and end all connections."""
        with self._lock:
            self._is_closed = True
            _end(self._sock)  # wakes `accept`; closing alone does not
            self._sock.close()
            for sock in self._open:
                _end(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.01)  # no descriptor is left, for now
                continue
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._open.add(sock)
            _run(functools.partial(self._answer, sock), "kv answer")

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, msgspec.MsgspecError):
                sock.settimeout(ANSWER_S)
                ask = _asks.decode(_line(sock))
                answer = self._source.answer(ask)
                sock.sendall(msgspec.json.encode(answer) + b"\n")
                if answer is not None and ask.num_blocks:
                    sock.settimeout(_LONGEST_READ_S)
                    if sock.recv(1):
                        self._source.release(ask.request_id)
        finally:
            with self._lock:
                self._open.discard(sock)


class _Call:
    """A read's connection at the target."""

    def __init__(self, ask: Ask, reading: Reading) -> None:
        self._ask, self._reading = ask, reading
        self._sock: socket.socket | None = None

    def run(self) -> None:
        """Ask, and wait for the end of the connection."""
        until = time.monotonic() + ANSWER_S
        try:
            sock = socket.create_connection((self._ask.host, self._ask.port), ANSWER_S)
        except OSError:
            self._reading.answered(None)
            return
        with sock:
            try:
                sock.sendall(msgspec.json.encode(self._ask) + b"\n")
                sock.settimeout(max(0.001, until - time.monotonic()))
                answer = _answers.decode(_line(sock))
            except (OSError, msgspec.MsgspecError):
                answer = None
            self._sock = sock
            self._reading.answered(answer)
            if answer is None or not self._ask.num_blocks:
                return
            with contextlib.suppress(OSError):
                sock.settimeout(None)
                sock.recv(1)
            self._reading.lost()  # unless the read is over

    def finish(self) -> None:
        """Say that the read is over. The byte fits into the socket's buffer, so that this does not wait."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(b"\n")


def _line(sock: socket.socket) -> bytes:
    """Return what comes up to the end of a line, or of the connection; each part may take as long as the socket's timeout."""
    with sock.makefile("rb") as stream:
        return stream.readline(_MAX_LINE)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _run(function: Callable[[], None], name: str) -> None:
    threading.Thread(target=function, name=name, daemon=True).start()
