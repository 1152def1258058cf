"""A cord is the connection between the supervisors of two nodes of one engine: when it ends, both ends kill their processes.

The death of a process closes its socket at once. The loss of a node closes nothing: `GONE_S` after the first unanswered beat, the kernel
of the other node ends the connection. A supervisor that is stopped still has a kernel that answers, so each end also counts the seconds
without a beat, while it is awake itself.
"""

import asyncio
import hmac
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

import msgspec

from serve_app.core.health import PeerSilence, ProcessUse
from serve_app.links.protocol.errors import ProtocolError
from serve_app.links.protocol.frames import FrameDecoder, encode_frame
from serve_app.links.tls_connection import TlsConnection

GONE_S = 1.5
"""Seconds after which a node that acknowledges nothing counts as lost."""
BEAT_S = 0.25
_MAX_GAP_S = 4 * BEAT_S
_MAX_FRAME_BYTES = 1 << 20  # a beat has some 40 bytes for each process


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """What a member says once to join: ``proof`` shows that it belongs to this engine."""

    proof: bytes
    rank: int


class Beat(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A sign of life. A member's has the processes of its part of the engine, by process id."""

    processes: dict[int, ProcessUse] = {}


class Ended(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A member's last message: why its part of the engine has ended, and whether the kernel ended it for lack of memory."""

    reason: str
    out_of_memory: bool = False


class Serves(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The first node's message to each member once the engine takes requests."""


class Challenge(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The first node's first message on each connection: the member's proof is made of it, so that none fits another connection."""

    nonce: bytes


Message = Hello | Beat | Ended | Serves | Challenge
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def proof(secret: bytes, nonce: bytes, rank: int) -> bytes:
    """Return the MAC, 32 bytes, by which the member of this rank shows that it knows the engine's secret."""
    return hmac.digest(secret, nonce + rank.to_bytes(4, "big"), "sha256")


class Cord(asyncio.Protocol):
    """One end. ``beat`` makes the beats of this end; ``on_lost`` is called once with the reason, unless this end calls `close` before.

    ``opening`` is sent before the first beat.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        beat: Callable[[], Beat],
        on_message: Callable[["Cord", Message], None],
        on_lost: Callable[["Cord", str], None],
        opening: Message | None = None,
    ) -> None:
        self._silence = PeerSilence(silence_s, _MAX_GAP_S)
        self._beat = beat
        self._on_message = on_message
        self._on_lost = on_lost
        self._opening = opening
        self._frames = FrameDecoder(_MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._beating: asyncio.Task[None] | None = None
        self._over = False

    def end_of(self, tls: ssl.SSLContext | None, *, server_side: bool) -> asyncio.Protocol:
        """Return the protocol of the connection: this end, within TLS if there is a context."""
        return self if tls is None else TlsConnection(self, tls, server_side=server_side)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        if self._over:  # let go between its acceptance and this call
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GONE_S * 1000))
        if self._opening is not None:
            self.send(self._opening)
        self._beating = asyncio.create_task(self._beats(), name="cord")
        self._beating.add_done_callback(self._beats_ended)

    async def _beats(self) -> None:
        while not self._silence.is_over(time.monotonic()):
            self.send(self._beat())
            await asyncio.sleep(BEAT_S)
        self._lose(f"its supervisor was silent for {self._silence.silent_s:.1f} s")

    def _beats_ended(self, beating: asyncio.Task[None]) -> None:
        if not beating.cancelled() and (failure := beating.exception()) is not None:
            self._lose(f"this supervisor could not tell how it is: {failure!r}")

    def data_received(self, data: bytes) -> None:
        self._silence.heard()
        try:
            for body in self._frames.receive_data(data):
                if not self._over:
                    self._on_message(self, _decoder.decode(body))
        except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            self._lose(f"it sent what is no message: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("its connection ended" if exc is None else f"its connection was lost: {exc}")

    def send(self, message: Message) -> None:
        """Queue a message; without effect once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(_encoder.encode(message)))

    def close(self) -> None:
        """End the connection after what was sent."""
        self._over = True
        if self._beating is not None:
            self._beating.cancel()
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """End the connection at once, without what is still to be sent."""
        self.close()
        if self._transport is not None:
            self._transport.abort()

    def _lose(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._on_lost(self, reason)
