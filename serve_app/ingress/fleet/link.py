"""A link connects one ingress to one replica: it dials, shakes hands, and turns bytes into messages. ``FleetState`` judges its silence."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import cast

from serve_app.core.events import CacheReported, Event, HeartbeatArrived, LinkEnd, LinkOpened, TrialBegan
from serve_app.core.instructions import StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.errors import EngineStopped
from serve_app.ingress.books.metrics import count_goodbye
from serve_app.links.protocol.connection import IngressConnection, LinkState
from serve_app.links.protocol.errors import CODES, HandshakeTimeout, PeerClosed, ProtocolError
from serve_app.links.protocol.messages import ENGINE_LOST, CacheDigest, Heartbeat, Message, TrialBegins
from serve_app.links.send_buffer import SendBuffer
from serve_app.links.tls_connection import TlsConnection

MAX_TOGETHER = 8
"""The most frames of one write. One turn of the event loop may take in 50 requests in 20 ms; after 8 the engine can begin."""
_LARGE_FRAME_BYTES = 1 << 20
"""The limit of the send buffer is checked at writes only, so a frame of this size or more is written at once."""


class ReplicaLink(asyncio.Protocol):
    """The ingress's end of a link.

    ``on_messages`` gets the messages of each read. ``on_lost`` is called once, with the cause for the log. ``on_room`` is called when
    attempts may be sent again after ``can_send`` was False because the send buffer was full.
    """

    def __init__(
        self,
        connection: IngressConnection,
        *,
        on_open: Callable[["ReplicaLink"], None],
        on_messages: Callable[["ReplicaLink", Sequence[Message]], None],
        on_lost: Callable[["ReplicaLink", LinkEnd, str], None],
        on_room: Callable[["ReplicaLink"], None],
        send_buffer_bytes: int,
        stuck_after_s: float,
    ) -> None:
        self.connection = connection
        self._on_open = on_open
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._on_room = on_room
        self.unsent: dict[str, StartAttempt] = {}
        """Attempts, by id and in order, that the fleet has given to this replica and that are not written yet. They are not encoded, so
        they cost no memory beyond the requests themselves."""
        self._buffer = SendBuffer(send_buffer_bytes, stuck_after_s, on_room=self._has_room, on_stuck=self._stuck)
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._unwritten: list[bytes] = []
        self._end = LinkEnd.BROKE_OFF
        self._cause = "the connection was closed"
        self.goodbye: tuple[str, str] | None = None
        """Code and reason of the replica's Goodbye; None without one."""
        self._transport: asyncio.Transport

    @property
    def replica_id(self) -> str:
        peer = self.connection.peer
        assert peer is not None
        return peer.replica_id

    def opened(self, adapters: frozenset[int]) -> LinkOpened:
        """Return the event of this link's handshake. ``adapters``: numbers of the LoRA adapters in the replica's lease."""
        peer = self.connection.peer
        assert peer is not None
        offered = peer.capabilities
        kv_tokens = offered.num_kv_blocks * offered.block_size
        return LinkOpened(
            self.replica_id,
            peer.credit,
            peer.draining,
            offered.weights,
            kv_tokens,
            adapters,
            offered.max_model_len,
            offered.kv_transfer,
            offered.kv_token_bytes,
            offered.host_kv_tokens,
        )

    def event_of(self, message: Message) -> Event | None:
        """Return the event of a message other than Outputs."""
        match message:
            case Heartbeat():
                load = EngineLoad(message.step, message.running, message.waiting, message.kv_usage)
                return HeartbeatArrived(self.replica_id, load, message.draining, message.drain_left_s, message.sleeping)
            case TrialBegins():
                return TrialBegan(message.attempt_id)
            case CacheDigest():
                return CacheReported(self.replica_id, message.number, message.anew, message.added, message.removed)
        return None

    def is_open(self) -> bool:
        return self.connection.state is LinkState.OPEN

    def can_send(self) -> bool:
        """Return whether an attempt may be written now; if not, the caller puts it into `unsent`."""
        return self.is_open() and not self._transport.is_closing() and not self._buffer.is_full()

    async def wait_open(self, timeout_s: float) -> None:
        """Wait for the handshake.

        Raises:
            ProtocolError: One side refused the other, or the handshake took too long. The transport is closed.
            OSError: The connection was lost, or TLS failed (ssl.SSLError).
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            self.close("handshake_timeout", "no handshake in time")
            raise HandshakeTimeout(limit_s=timeout_s) from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._transport.write(self.connection.initiate())

    def data_received(self, data: bytes) -> None:
        was_open = self.is_open()
        try:
            messages = self.connection.receive_data(data)
        except ProtocolError as exc:
            if was_open:
                # Messages that arrived in one piece with a Goodbye may be the last outputs of finished requests.
                self._on_messages(self, self.connection.undelivered)
                if self._transport.is_closing():
                    return  # a frame among them could not be read, which is the reason that counts
            self._fail(exc)
            return
        if pending := self.connection.data_to_send():
            self._transport.write(self._take_unwritten() + pending)
        if not was_open and self.is_open():
            self._opened.set_result(None)
            self._on_open(self)
        if messages:
            self._on_messages(self, messages)

    def eof_received(self) -> None:
        try:
            self.connection.eof_received()
        except ProtocolError as exc:
            self._fail(exc)

    def resume_writing(self) -> None:
        self._buffer.drained()

    def connection_lost(self, exc: Exception | None) -> None:
        self._buffer.lost()
        if exc is not None and self._end is LinkEnd.BROKE_OFF:
            self._cause = str(exc)
        if not self._opened.done():
            self._opened.set_exception(exc if isinstance(exc, OSError) else ConnectionError(self._cause))
            self._opened.exception()  # read here: a dial that was cancelled reads it no more
        elif self._opened.exception() is None:
            self._on_lost(self, self._end, self._cause)

    def write(self, data: bytes) -> None:
        """Write at the next turn of the loop, or as soon as `MAX_TOGETHER` frames wait. A closing link drops the frame.

        In a burst many requests start in one turn: fewer writes here, and fewer reads for the replica.
        """
        if self._transport.is_closing():
            return
        if not self._unwritten:
            self._loop.call_soon(self._write_all)
        self._unwritten.append(data)
        if len(self._unwritten) >= MAX_TOGETHER or len(data) >= _LARGE_FRAME_BYTES:
            self._write_all()

    def _write_all(self) -> None:
        if not (unwritten := self._take_unwritten()) or self._transport.is_closing():
            return
        self._transport.write(unwritten)
        self._buffer.written(self._transport)

    def _has_room(self) -> None:
        if self.can_send():
            self._on_room(self)

    def _stuck(self, cause: str) -> None:
        """Drop the link because its replica reads nothing; the requests resume at other replicas."""
        if not self._transport.is_closing():
            self.abort(cause, LinkEnd.UNRESPONSIVE)

    def _take_unwritten(self) -> bytes:
        unwritten, self._unwritten = self._unwritten, []
        return b"".join(unwritten)

    def close(self, code: str, reason: str, end: LinkEnd = LinkEnd.ENDED_HERE) -> None:
        """Send a goodbye and close. ``on_lost`` is called afterwards if the link was open."""
        self._end, self._cause = end, reason
        if self.connection.state is not LinkState.CLOSED:
            self._transport.write(self._take_unwritten() + self.connection.close(code, reason))
        self._transport.close()

    def abort(self, cause: str, end: LinkEnd = LinkEnd.ENDED_HERE) -> None:
        """Drop the connection to a peer that no longer reads."""
        self._end, self._cause = end, cause
        self._transport.abort()

    def _fail(self, exc: ProtocolError) -> None:
        if isinstance(exc, PeerClosed):
            count_goodbye(self.connection.model, exc.peer_code)
            self.goodbye = exc.peer_code, exc.reason
        self._end, self._cause = _end_by(exc), str(exc)
        if not self._opened.done():
            self._opened.set_exception(exc)
            self._opened.exception()
        self._transport.write(self._take_unwritten() + self.connection.data_to_send())
        self._transport.close()


def _end_by(error: ProtocolError) -> LinkEnd:
    if not isinstance(error, PeerClosed) or error.peer_code in CODES:
        return LinkEnd.MISUNDERSTOOD
    if error.peer_code == EngineStopped.code:
        return LinkEnd.ENGINE_STOPPED
    return LinkEnd.ENGINE_DIED if error.peer_code in ENGINE_LOST else LinkEnd.SAID_GOODBYE


async def dial(
    address: tuple[str, int], new_link: Callable[[], ReplicaLink], *, timeout_s: float, tls: ssl.SSLContext | None
) -> ReplicaLink:
    """Connect within ``timeout_s``, and then finish TLS and the handshake within ``timeout_s``.

    Raises:
        OSError: No process listens at the address, or TLS failed.
        ProtocolError: One side refused the handshake, or it was too slow.
    """
    link = new_link()
    end = link if tls is None else TlsConnection(link, tls, server_side=False)
    async with asyncio.timeout(timeout_s):
        await asyncio.get_running_loop().create_connection(lambda: end, *address)
    try:
        await link.wait_open(timeout_s)
    except asyncio.CancelledError:
        link.abort("the dial was cancelled")
        raise
    return link
