"""A connection is one end of a link as a state machine: bytes in, messages and bytes out. docs/protocol.md has the picture.

Pure: no IO, clock or randomness (the caller gives the nonce). The adapter writes what `send_*` and `data_to_send` return, in the order of
the calls. It calls `data_to_send` after each `receive_data`, also after one that raised: a Goodbye may wait there. A mistake of the
adapter (a limit, a second add of an attempt, sending while closed) raises a ProtocolError and leaves the link as it was. A mistake of the
peer raises one and closes the link.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from serve_app.core.load import EngineLoad
from serve_app.links.protocol.errors import (
    CreditExceeded,
    DuplicateAttempt,
    FrameTooLarge,
    MalformedMessage,
    PeerClosed,
    ProtocolError,
    UnexpectedMessage,
)
from serve_app.links.protocol.frames import FrameDecoder, encode_frame
from serve_app.links.protocol.handshake import (
    INGRESS_ROLE,
    MAX_HANDSHAKE_FRAME_BYTES,
    REPLICA_ROLE,
    check_peer,
    check_proof,
    check_protocol,
    proof,
    transcript,
)
from serve_app.links.protocol.messages import (
    MAX_ATTEMPTS_PER_ABORT,
    MAX_REASON_CHARS,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Add,
    AddSuspect,
    BytesLike,
    CacheDigest,
    Capabilities,
    Challenge,
    FreeKv,
    Goodbye,
    HandOver,
    Heartbeat,
    Hello,
    Message,
    Outputs,
    Ping,
    Proof,
    TrialBegins,
    TrialPassed,
    Wake,
    add_message,
    decode_message,
    encode_message,
    readable,
)


class LinkState(enum.StrEnum):
    """The state of a link, which only ever moves down this list."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(kw_only=True, eq=False)
class _Connection:
    """The part that both ends share: frames, states, Goodbye, unfinished attempts. Attributes are read-only for the adapter."""

    _received_when_open: ClassVar[tuple[type[Message], ...]]

    model: str
    fingerprint: str
    vllm_version: str
    token: bytes = field(repr=False)
    nonce: bytes = field(repr=False)
    """32 fresh random bytes."""
    max_frame_bytes: int
    """Must be equal on both sides: otherwise the larger frames of one side end the link."""
    state: LinkState = field(default=LinkState.HANDSHAKE, init=False)
    attempts: set[str] = field(default_factory=set, init=False)
    """Unfinished attempts of this link."""
    undelivered: list[Message] = field(default_factory=list, init=False, repr=False)
    """Messages before the fault, of the call of `receive_data` that raised; the adapter may still use them."""

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} random bytes, not {len(self.nonce)}")
        self._decoder = FrameDecoder(min(self.max_frame_bytes, MAX_HANDSHAKE_FRAME_BYTES))
        self._unsent = bytearray()

    def receive_data(self, data: BytesLike) -> list[Message]:
        """Return the messages completed by ``data`` that are for the adapter; nothing once the link is closed.

        Raises:
            PeerClosed: The peer said Goodbye.
            ProtocolError: With any other kind, the peer is at fault; a Goodbye waits in `data_to_send`.
        """
        messages: list[Message] = []
        try:
            while self.state is not LinkState.CLOSED and (bodies := self._decoder.receive_data(data)):
                for body in bodies:
                    self._receive_frame(body, messages)
                data = b""  # ``bodies`` may have raised the limit: ask for frames that wait in the decoder
        except ProtocolError as error:
            self.undelivered = messages
            self._refuse(error)
            raise
        return messages

    def eof_received(self) -> None:
        """Close, because the peer will send no more.

        Raises:
            MalformedMessage: The peer stopped inside a frame or before the link was open.
        """
        if self.state is LinkState.CLOSED or (self.state is LinkState.OPEN and not self._decoder.buffered_bytes):
            self.state = LinkState.CLOSED
            return
        error = MalformedMessage(f"end of stream in state {self.state}, {self._decoder.buffered_bytes} bytes into a frame")
        self._refuse(error)
        raise error

    def data_to_send(self) -> bytes:
        """Return, once, the bytes that the handshake or a refusal has to send."""
        data = bytes(self._unsent)
        self._unsent.clear()
        return data

    def close(self, code: str, reason: str) -> bytes:
        """Return a Goodbye and close; b"" if closed already.

        Raises:
            MalformedMessage: ``code`` is neither an error's nor a word in snake_case of at most 64 characters.
        """
        if self.state is not LinkState.CLOSED:
            self._say_goodbye(code, reason)
        return self.data_to_send()

    def attempt_finished(self, attempt_id: str) -> None:
        """Give the credit of an attempt back. For an attempt that was aborted before, nothing happens.

        The replica calls this before it hands the attempt's last output to the transport, the ingress when it reads
        that output; so the ingress never counts fewer attempts than the replica.
        """
        self.attempts.discard(attempt_id)

    def _credit_limit(self) -> int:
        raise NotImplementedError

    def _receive_handshake(self, message: Message, body: bytes) -> None:
        raise NotImplementedError

    def _receive_frame(self, body: bytes, messages: list[Message]) -> None:
        """Act on one frame; append its message to ``messages`` if it is for the adapter."""
        if self.state is LinkState.OPEN:
            message = decode_message(body)
            if isinstance(message, self._received_when_open):
                self._on_message(message)
                messages.append(message)
                return
        else:
            check_protocol(body)
            message = decode_message(body)
        if isinstance(message, Goodbye):
            raise PeerClosed(message.code, message.reason)
        if self.state is not LinkState.HANDSHAKE:
            raise self._unexpected(message)
        self._receive_handshake(message, body)

    def _on_message(self, message: Message) -> None:
        """Check the parts of a message that its type does not check."""

    def _unexpected(self, message: Message) -> UnexpectedMessage:
        return UnexpectedMessage(type(message).__name__, self.state.value)

    def _check_peer(self, peer: Hello | Challenge) -> None:
        check_peer(peer, vllm_version=self.vllm_version, model=self.model, fingerprint=self.fingerprint)

    def _check_attempt(self, attempt_id: str) -> None:
        """Refuse a wrong add. Both ends refuse the same adds: the ingress before it sends one, the replica when one comes."""
        if attempt_id in self.attempts:
            raise DuplicateAttempt(attempt_id)
        if len(self.attempts) >= self._credit_limit():
            raise CreditExceeded(self._credit_limit())

    def _open(self) -> None:
        self.state = LinkState.OPEN
        self._decoder.max_frame_bytes = self.max_frame_bytes

    def _frame(self, message: Message) -> bytes:
        """Return the frame of ``message``, after bytes that have to go out before it."""
        if self.state is not LinkState.OPEN:
            raise self._unexpected(message)
        body = encode_message(message)
        if not isinstance(message, Add | AddSuspect):  # it is large, and checked when made
            decode_message(body)
        if len(body) > self.max_frame_bytes:  # refused here, it costs one request; refused by the peer, the link
            raise FrameTooLarge(size_bytes=len(body), limit_bytes=self.max_frame_bytes)
        frame = encode_frame(body)
        return self.data_to_send() + frame if self._unsent else frame

    def _queue(self, message: Message) -> None:
        self._unsent += encode_frame(encode_message(message))

    def _say_goodbye(self, code: str, reason: str) -> None:
        # The reason is cut and cleaned, so that the Goodbye itself is never malformed.
        goodbye = decode_message(encode_message(Goodbye(code, readable(reason, MAX_REASON_CHARS))))
        self._queue(goodbye)
        self.state = LinkState.CLOSED

    def _refuse(self, error: ProtocolError) -> None:
        if not isinstance(error, PeerClosed):
            self._say_goodbye(error.code, str(error))
        self.state = LinkState.CLOSED


@dataclass(kw_only=True, eq=False)
class IngressConnection(_Connection):
    """The ingress's end, which connects and speaks first."""

    _received_when_open = (Outputs, Heartbeat, TrialBegins, CacheDigest)

    ingress_id: str
    peer: Challenge | None = field(default=None, init=False)
    """The replica's Challenge; None until the link is open."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hello = b""

    def initiate(self) -> bytes:
        """Return the Hello, once, before anything is received."""
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            vllm_version=self.vllm_version,
            ingress_id=self.ingress_id,
            model=self.model,
            fingerprint=self.fingerprint,
            nonce=self.nonce,
        )
        if self._hello or self.state is not LinkState.HANDSHAKE:
            raise self._unexpected(hello)
        self._hello = encode_message(hello)
        return encode_frame(self._hello)

    def send_add(
        self, attempt_id: str, buffers: Sequence[BytesLike], num_emitted: int = 0, *, suspect: bool = False, kv: bytes = b""
    ) -> bytes:
        """Return the frame that starts an attempt. Ids are never used twice on a link.

        Raises:
            DuplicateAttempt, CreditExceeded, FrameTooLarge, MalformedMessage: Nothing must be sent; the link stays open.
            UnexpectedMessage: The link is not open.
        """
        if self.state is LinkState.OPEN:
            self._check_attempt(attempt_id)
        frame = self._frame(add_message(attempt_id, buffers, num_emitted, suspect=suspect, kv=kv))
        self.attempts.add(attempt_id)
        return frame

    def send_abort(self, attempt_ids: Sequence[str]) -> bytes:
        """Return the frames that stop these attempts, b"" without attempts; their credit is free at once, as at the replica."""
        step = MAX_ATTEMPTS_PER_ABORT
        parts = [list(attempt_ids[start : start + step]) for start in range(0, len(attempt_ids), step)]
        frames = b"".join([self._frame(Abort(part)) for part in parts])
        self.attempts.difference_update(attempt_ids)
        return frames

    def send_hand_over(self, attempt_id: str) -> bytes:
        """Return the frame that asks the replica to end this attempt and to keep its KV. The attempt keeps its credit until its end."""
        return self._frame(HandOver([attempt_id]))

    def send_free_kv(self, attempt_id: str) -> bytes:
        """Return the frame that lets the replica free the KV that it keeps of this ended attempt."""
        return self._frame(FreeKv([attempt_id]))

    def send_trial_passed(self, attempt_id: str) -> bytes:
        """Return the frame that lets the next suspect begin."""
        return self._frame(TrialPassed(attempt_id))

    def ping(self) -> bytes:
        """Return a Ping."""
        return self._frame(Ping())

    def send_wake(self) -> bytes:
        """Return the frame that asks the replica to wake its engine."""
        return self._frame(Wake())

    def _credit_limit(self) -> int:
        return self.peer.credit if self.peer else 0

    def _receive_handshake(self, message: Message, body: bytes) -> None:
        if not isinstance(message, Challenge) or not self._hello:
            raise self._unexpected(message)
        said = transcript(self._hello, message)
        # The proof comes first: an impostor's claims about its versions are not worth a report.
        check_proof(message.proof, proof(self.token, REPLICA_ROLE, said), f"replica {message.replica_id!r}")
        self._check_peer(message)
        self._queue(Proof(proof(self.token, INGRESS_ROLE, said)))
        self.peer = message
        self._open()


@dataclass(kw_only=True, eq=False)
class ReplicaConnection(_Connection):
    """The replica's end of one link, which listens. The engine core makes its Outputs, as finished frames."""

    _received_when_open = (Add, Abort, Ping, AddSuspect, TrialPassed, HandOver, FreeKv, Wake)

    replica_id: str
    credit: int
    """How many unfinished attempts the ingress may have on this link."""
    capabilities: Capabilities
    draining: bool = False
    """Whether the Challenge says so; the adapter may set it until the Hello has come."""
    admit: Callable[[str], None] = lambda _: None
    """Called with the ingress's id before the Challenge, when nothing is proved, and again before the link opens. Raises a `ProtocolError`
    to refuse the link: an ingress that has the Challenge takes the link for open."""
    peer: Hello | None = field(default=None, init=False)
    """The ingress's Hello; None until the link is open, because it is not proved before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hello: Hello | None = None
        self._expected_proof = b""

    def send_heartbeat(self, load: EngineLoad, *, drain_left_s: float | None = None, sleeping: bool = False) -> bytes:
        """Return a Heartbeat. ``drain_left_s`` is None while the replica takes requests."""
        load_now = load.step, load.running, load.waiting, load.kv_usage
        return self._frame(Heartbeat(*load_now, drain_left_s is not None, drain_left_s or 0.0, sleeping))

    def send_digest(self, number: int, anew: bool, added: Sequence[int], removed: Sequence[int]) -> bytes:
        """Return the frame that says what the replica has cached."""
        return self._frame(CacheDigest(number, anew, list(added), list(removed)))

    def send_trial_begins(self, attempt_id: str) -> bytes:
        """Return the frame to write before the engine gets this suspect."""
        return self._frame(TrialBegins(attempt_id))

    def _credit_limit(self) -> int:
        return self.credit

    def _on_message(self, message: Message) -> None:
        match message:
            case Add() | AddSuspect():
                self._check_attempt(message.attempt_id)
                self.attempts.add(message.attempt_id)
            case Abort():
                # Now, and not when the engine has stopped them: the ingress counts them as gone and may add as many.
                self.attempts.difference_update(message.attempt_ids)

    def _receive_handshake(self, message: Message, body: bytes) -> None:
        if isinstance(message, Hello) and self._hello is None:
            self._check_peer(message)
            self.admit(message.ingress_id)
            self._hello = message
            challenge = self._unsigned_challenge()
            said = transcript(body, challenge)
            self._expected_proof = proof(self.token, INGRESS_ROLE, said)
            self._queue(msgspec.structs.replace(challenge, proof=proof(self.token, REPLICA_ROLE, said)))
        elif isinstance(message, Proof) and self._hello is not None:
            check_proof(message.proof, self._expected_proof, f"ingress {self._hello.ingress_id!r}")
            self.admit(self._hello.ingress_id)
            self.peer = self._hello
            self._open()
        else:
            raise self._unexpected(message)

    def _unsigned_challenge(self) -> Challenge:
        return Challenge(
            protocol=PROTOCOL_VERSION,
            vllm_version=self.vllm_version,
            replica_id=self.replica_id,
            model=self.model,
            fingerprint=self.fingerprint,
            nonce=self.nonce,
            proof=b"",
            credit=self.credit,
            draining=self.draining,
            capabilities=self.capabilities,
        )
