"""`ServerLink` is one connection of an ingress to a replica: bytes to messages to the engine, and back. `ReplicaServer` accepts them."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import msgspec

from serve_app.core.cached_points import Digest, DigestStream
from serve_app.links.protocol.connection import LinkState, ReplicaConnection
from serve_app.links.protocol.errors import AuthenticationFailed, HandshakeTimeout, ProtocolError, SlotsExhausted
from serve_app.links.protocol.messages import Abort, Add, AddSuspect, FreeKv, HandOver, Message, TrialPassed, Wake
from serve_app.links.send_buffer import SendBuffer
from serve_app.replica import pipe

if TYPE_CHECKING:
    from serve_app.replica.server import ReplicaServer

logger = logging.getLogger(__name__)


class ServerLink(asyncio.Protocol):
    """One accepted connection: bytes to messages to the engine, and back."""

    def __init__(self, server: "ReplicaServer") -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._connection: ReplicaConnection
        self._slot = -1  # until its proof
        self._deadline: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        limits = server.settings
        self._buffer = SendBuffer(
            limits.send_buffer_bytes, limits.heartbeat_timeout_s, on_room=self._has_room, on_stuck=self._stuck
        )
        self.digest_stream = DigestStream()

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
        self._server.cache_reporter.greet(self)

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

    def send_digests(self, digests: Iterable[Digest]) -> None:
        """Write what the replica has cached."""
        for digest in digests:
            self._transport.write(self._connection.send_digest(*digest))
        self._buffer.written(self._transport)

    def is_full(self) -> bool:
        return self._buffer.is_full()

    def _has_room(self) -> None:
        if self.is_open():
            self._server.cache_reporter.greet(self)

    def resume_writing(self) -> None:
        self._buffer.drained()

    def stop_drain(self) -> None:
        """Note the end of a drain, as `start_drain` its begin."""
        self._connection.draining = False

    def start_drain(self) -> None:
        """Note the drain on a link whose handshake is not over: a Challenge that is still to come reports it."""
        self._connection.draining = True

    def send_heartbeat(self) -> None:
        load = self._server.load
        within = msgspec.structs.replace(load, kv_usage=min(1.0, max(0.0, load.kv_usage)))
        server = self._server
        beat = self._connection.send_heartbeat(within, drain_left_s=server.drain_left_s(), sleeping=server.sleeping)
        self._transport.write(beat)

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
            case Wake():
                self._server.on_wake()

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
