"""`ReplicaServer` is the replica's listener: it accepts links from ingresses and passes their attempts to one engine core.

It decides nothing but what to refuse. It passes bytes on: an ``Add`` goes to the engine as it came, a step's outputs come back as a
finished frame. Per link it keeps the unfinished attempts, for credit and to abort them when the link ends. A connection gets one of the
slots only when it has proved that it has the token, so that a peer without the token cannot keep an ingress out by merely connecting.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from serve_app.config import ProtocolSettings
from serve_app.core.load import NO_LOAD, EngineLoad
from serve_app.errors import ListenFailed
from serve_app.host import descriptors
from serve_app.links.protocol.connection import LinkState, ReplicaConnection
from serve_app.links.protocol.errors import AuthenticationFailed, HandshakeTimeout, ProtocolError, SlotsExhausted
from serve_app.links.protocol.messages import Abort, Add, AddSuspect, FreeKv, HandOver, Message, TrialPassed
from serve_app.links.send_buffer import SendBuffer
from serve_app.links.tls import LinkTls
from serve_app.links.tls_connection import TlsConnection
from serve_app.replica import pipe
from serve_app.replica.trials import Trials

logger = logging.getLogger(__name__)

MAX_UNPROVED = 256
"""The most connections before their proof; one more drops the oldest. Each of the 256 may hold a frame of 64 KiB, 16 MiB together (with TLS
also OpenSSL's memory for an unfinished handshake). A handshake takes one round trip, so an ingress is dropped only if more than 255 others
connect within it, and then it dials again."""

_DRAIN_POLL_S = 0.1
_WAIT_FOR_READS_S = 5.0
"""The longest wait of a drained replica for reads of KV that it handed over, after the last of them and after its drain's end."""


class Engine(Protocol):
    """The part of an engine core that a listener uses; its messages come back through ``ReplicaServer.on_engine_message``."""

    def send(self, message: pipe.ToEngine) -> None: ...


@dataclass(frozen=True)
class ReplicaIdentity:
    """The identity of this replica in every handshake."""

    replica_id: str
    model: str


class ReplicaServer:
    """Accepts links and passes messages between them and the engine core."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        settings: ProtocolSettings,
        token: bytes,
        engine: Engine,
        ready: pipe.EngineReady,
        tls: LinkTls | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.token = token
        self.engine = engine
        self.ready = ready
        self.load = NO_LOAD
        self.busy_s = 0.0
        """Seconds that the engine spent in its steps since its start."""
        self._drain_ends_at: float | None = None
        self.kept, self._kv_read_at = set[str](), 0.0
        """Attempts whose KV other replicas may be reading, and the time at which a drained replica stops waiting for them."""
        self.first_output = asyncio.Event()
        """Set when the first tokens have gone to an ingress."""
        self.trials = Trials[_Link](_Link.begin_trial, lambda: self.engine.send(pipe.AskTrial()))
        self._tls = tls
        self._links: dict[int, _Link] = {}
        self._unproved: dict[_Link, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Open the listener and return its port.

        Raises:
            ListenFailed: The port of the settings is taken, or the address is not ours.
        """
        loop, host, port = asyncio.get_running_loop(), self.settings.host, self.settings.port
        try:
            if host == "::":  # asyncio would listen on IPv6 alone, but the node's address may be of either family
                both = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
                self._server = await loop.create_server(self._accept, sock=both)
            else:
                self._server = await loop.create_server(self._accept, host, port)
        except (OSError, ValueError) as exc:  # ValueError: for both families, where IPv6 is off
            reason = getattr(exc, "strerror", None) or str(exc)
            raise ListenFailed(host=host, port=port, reason=reason, key="protocol.port") from exc
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> asyncio.Protocol:
        link = _Link(self)
        return link if self._tls is None else TlsConnection(link, self._tls.context(), server_side=True)

    def open_links(self) -> Iterator["_Link"]:
        return (link for link in self._links.values() if link.is_open())

    def num_attempts(self) -> int:
        """Return the unfinished attempts over all links."""
        return sum(link.num_attempts() for link in self._links.values())

    async def heartbeats(self) -> None:
        """Send a heartbeat on every link, each interval; ends only by cancellation."""
        while True:
            self.send_heartbeats()
            await asyncio.sleep(self.settings.heartbeat_interval_s)

    def send_heartbeats(self) -> None:
        if not self.num_attempts():  # an abort of the last attempt makes no step, so that no new load follows
            self.load = EngineLoad(self.load.step)
        for link in list(self.open_links()):
            link.send_heartbeat()

    @property
    def draining(self) -> bool:
        return self._drain_ends_at is not None

    def drain_left_s(self) -> float | None:
        """Return the seconds until the drain is over, >= 0; None while there is none."""
        if self._drain_ends_at is None:
            return None
        return max(0.0, self._drain_ends_at - time.monotonic())

    def start_drain(self, limit_s: float) -> None:
        """Tell every ingress at once to send nothing new, and when the drain ends: before that, ingresses move running requests away."""
        self._drain_ends_at = time.monotonic() + limit_s
        for link in self._unproved:
            link.start_drain()
        self.send_heartbeats()

    async def drain(self, limit_s: float) -> None:
        """Start the drain; return when nothing runs any more, or after ``limit_s``. It lasts up to 5 s longer if KV was handed over."""
        self.start_drain(limit_s)
        while self.num_attempts() and self.drain_left_s():
            await asyncio.sleep(_DRAIN_POLL_S)
        assert self._drain_ends_at is not None
        while self.kept and time.monotonic() < min(self._kv_read_at, self._drain_ends_at + _WAIT_FOR_READS_S):
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self, code: str, reason: str) -> None:
        """Say goodbye on every link and stop listening."""
        if self._server is not None:
            self._server.close()
        for link in [*self._links.values(), *self._unproved]:
            link.say_goodbye(code, reason)

    def on_engine_message(self, message: pipe.FromEngine) -> None:
        """Pass on a message of the engine core; a message for a link that is gone is dropped."""
        match message:
            case pipe.StepOutputs():
                self._on_step(message)
            case pipe.Answered():
                self.trials.answered()

    def _on_step(self, step: pipe.StepOutputs) -> None:
        self.load, self.busy_s = step.load, step.busy_s
        if step.kept:
            earlier = self.kept if (now := time.monotonic()) < self._kv_read_at else set[str]()
            self.kept, self._kv_read_at = earlier | set(step.kept), now + _WAIT_FOR_READS_S
        if link := self._links.get(step.slot):
            link.pass_on(step)
            if step.num_outputs:
                self.first_output.set()
        self.trials.let_go(step.finished)

    def abort(self, attempt_ids: list[str]) -> None:
        """Stop these attempts in the engine, or before it gets them."""
        self.engine.send(pipe.AbortInEngine(attempt_ids))
        self.trials.withdraw(attempt_ids)

    def admit(self, link: "_Link", descriptor: int) -> None:
        """Let a connection begin its handshake. If there are too many, or too few descriptors, the oldest unproved one is dropped."""
        if len(self._unproved) >= MAX_UNPROVED or (self._unproved and descriptors.are_short(descriptor)):
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.drop()
        self._unproved[link] = None

    def take_slot(self, link: "_Link") -> int:
        """Return the lowest free slot for a link that has just proved itself, after `check_slots`.

        An earlier link of the same ingress ends: the ingress has given it up, which a network that loses packets may not have told.
        """
        for earlier in list(self._links.values()):
            if earlier.ingress_id == link.ingress_id:
                earlier.drop()
                earlier.leave()  # now, and not when its transport has ended: this may be the only slot
        slot = next(slot for slot in range(self.settings.max_ingresses) if slot not in self._links)
        del self._unproved[link]
        self._links[slot] = link
        return slot

    def check_slots(self, ingress_id: str) -> None:
        """Raise SlotsExhausted if other ingresses have as many links as allowed. A new link of an ingress replaces its earlier link."""
        if sum(link.ingress_id != ingress_id for link in self._links.values()) >= self.settings.max_ingresses:
            raise SlotsExhausted(limit=self.settings.max_ingresses)

    def leave(self, link: "_Link", slot: int, unfinished: set[str]) -> None:
        """Forget a link, once, and abort its unfinished attempts, so that their KV blocks are free again."""
        self._unproved.pop(link, None)
        if self._links.get(slot) is not link:
            return
        del self._links[slot]
        if unfinished:
            self.abort(sorted(unfinished))


class _Link(asyncio.Protocol):
    """One accepted connection: bytes to messages to the engine, and back."""

    def __init__(self, server: ReplicaServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._connection: ReplicaConnection
        self._slot = -1  # until its proof
        self._deadline: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        limits = server.settings
        self._buffer = SendBuffer(
            limits.send_buffer_bytes, limits.heartbeat_timeout_s, on_room=lambda: None, on_stuck=self._stuck
        )

    @property
    def ingress_id(self) -> str:
        assert self._connection.peer is not None, "it has proved itself"
        return self._connection.peer.ingress_id

    def is_open(self) -> bool:
        return self._connection.state is LinkState.OPEN

    def num_attempts(self) -> int:
        return len(self._connection.attempts)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        server, settings = self._server, self._server.settings
        self._connection = ReplicaConnection(
            replica_id=server.identity.replica_id,
            model=server.identity.model,
            fingerprint=server.ready.fingerprint,
            vllm_version=server.ready.vllm_version,
            token=server.token,
            nonce=os.urandom(32),
            credit=settings.credit,
            draining=server.draining,
            capabilities=server.ready.capabilities,
            admit=server.check_slots,
            max_frame_bytes=settings.max_frame_bytes,
        )
        server.admit(self, transport.get_extra_info("socket").fileno())
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(settings.handshake_timeout_s, self._handshake_is_late)

    def data_received(self, data: bytes) -> None:
        was_open = self.is_open()
        messages = self._guarded(lambda: self._connection.receive_data(data))
        if was_open and not self.is_open():
            # The connection already counts aborted attempts as gone, so that the link's end would not abort them in the engine.
            for message in self._connection.undelivered:
                if isinstance(message, Abort):
                    self._take(message)
        if not self.is_open():
            return
        if not was_open:
            self._begin()
        for message in messages:
            self._take(message)
        if messages or not was_open:  # a part of a message is no sign of life
            self._heard()

    def _begin(self) -> None:
        """Take a slot, now that the peer has proved itself."""
        self._slot = self._server.take_slot(self)
        assert self._deadline is not None
        self._deadline.cancel()
        self.send_heartbeat()

    def eof_received(self) -> None:
        self._guarded(self._ended)

    def _ended(self) -> list[Message]:
        self._connection.eof_received()
        return []

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._idle):
            if timer is not None:
                timer.cancel()
        self._buffer.lost()
        self.leave()

    def leave(self) -> None:
        """Give the slot back, and abort the unfinished attempts."""
        self._server.leave(self, self._slot, set(self._connection.attempts))

    def pass_on(self, step: pipe.StepOutputs) -> None:
        """Write a step's frame; an ingress that does not read is cut off before it holds unbounded memory here."""
        for attempt_id in step.finished:
            self._connection.attempt_finished(attempt_id)
        if not self.is_open():
            return
        self._transport.write(step.frame)
        self._buffer.written(self._transport)

    def resume_writing(self) -> None:
        self._buffer.drained()

    def start_drain(self) -> None:
        """Note the drain on a link whose handshake is not over: a Challenge that is still to come reports it."""
        self._connection.draining = True

    def send_heartbeat(self) -> None:
        load = self._server.load
        within = msgspec.structs.replace(load, kv_usage=min(1.0, max(0.0, load.kv_usage)))
        self._transport.write(self._connection.send_heartbeat(within, drain_left_s=self._server.drain_left_s()))

    def say_goodbye(self, code: str, reason: str) -> None:
        if self._connection.state is not LinkState.CLOSED:
            self._transport.write(self._connection.close(code, reason))
        self._transport.close()

    def drop(self) -> None:
        """Close the connection without a Goodbye, which its peer might not read, and without a wait."""
        self._transport.abort()

    def _take(self, message: Message) -> None:
        match message:
            case Add():
                self._start(message)
            case AddSuspect():
                self._server.trials.add(self, message)
            case TrialPassed():
                self._server.trials.let_go([message.attempt_id])
            case Abort():
                self._server.abort(message.attempt_ids)
            case HandOver():
                self._server.engine.send(
                    pipe.HandOverInEngine([i for i in message.attempt_ids if i in self._connection.attempts])
                )
            case FreeKv():
                self._server.kept.difference_update(message.attempt_ids)
                self._server.engine.send(pipe.FreeKvInEngine(message.attempt_ids))

    def begin_trial(self, suspect: AddSuspect) -> None:
        """Tell the ingress, then start the suspect: a crash counts against it only if the ingress knows that the engine had it."""
        if self.is_open():
            self._transport.write(self._connection.send_trial_begins(suspect.attempt_id))
        self._start(suspect)

    def _start(self, add: Add | AddSuspect) -> None:
        self._server.engine.send(pipe.AddToEngine(self._slot, add.attempt_id, add.buffers, add.num_emitted, add.kv))

    def _guarded(self, receive: Callable[[], list[Message]]) -> list[Message]:
        """Run the state machine; an error of the peer closes this link and no other."""
        try:
            messages = receive()
        except ProtocolError as exc:
            level = logging.WARNING if isinstance(exc, AuthenticationFailed | SlotsExhausted) else logging.INFO
            logger.log(level, "link %d closed: %s: %s", self._slot, exc.code, exc)
            self._transport.write(self._connection.data_to_send())
            self._transport.close()
            return []
        if pending := self._connection.data_to_send():
            self._transport.write(pending)
        return messages

    def _heard(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        limit_s = self._server.settings.ingress_timeout_s
        self._idle = asyncio.get_running_loop().call_later(limit_s, self._peer_is_silent)

    def _peer_is_silent(self) -> None:
        self.say_goodbye("silent_peer", f"nothing heard for {self._server.settings.ingress_timeout_s:g} s")
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # the peer does not read either: a close would wait for it, and its attempts would keep running

    def _handshake_is_late(self) -> None:
        late = HandshakeTimeout(limit_s=self._server.settings.handshake_timeout_s)
        self.say_goodbye(late.code, str(late))

    def _stuck(self, cause: str) -> None:
        logger.warning("link %d closed: %s", self._slot, cause)
        self._transport.abort()
