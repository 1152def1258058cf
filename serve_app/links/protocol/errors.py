"""These errors end a link between ingress and replica, and only the link; `serve_app/errors/__init__.py` has the tree."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors import ServingError


class ProtocolError(ServingError):
    """One link between ingress and replica is broken; other links and the process are not."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "protocol_error"
    text: ClassVar[str] = "protocol error"
    """A format of the fields."""

    def __str__(self) -> str:
        return self.text.format(**vars(self))


@dataclass(eq=False)
class FrameTooLarge(ProtocolError):
    """A frame's length is over the limit of the link."""

    code: ClassVar[str] = "frame_too_large"
    text: ClassVar[str] = "frame of {size_bytes} bytes, limit {limit_bytes}"
    size_bytes: int
    limit_bytes: int


@dataclass(eq=False)
class MalformedMessage(ProtocolError):
    """A frame holds no message of this protocol, or a message breaks a limit, or the stream ended inside one."""

    code: ClassVar[str] = "malformed_message"
    text: ClassVar[str] = "malformed message: {problem}"
    problem: str


@dataclass(eq=False)
class UnexpectedMessage(ProtocolError):
    """A valid message came that its sender may not send, or not in this state."""

    code: ClassVar[str] = "unexpected_message"
    text: ClassVar[str] = "unexpected {message} in state {state}"
    message: str
    state: str


@dataclass(eq=False)
class VersionMismatch(ProtocolError):
    """The two versions of ``what``, "protocol" or "vllm", do not speak with each other."""

    code: ClassVar[str] = "version_mismatch"
    text: ClassVar[str] = "{what} version: ours {ours!r}, theirs {theirs!r}"
    ours: str
    theirs: str
    what: str


@dataclass(eq=False)
class WrongModel(ProtocolError):
    """The peer serves another model."""

    code: ClassVar[str] = "wrong_model"
    text: ClassVar[str] = "model: ours {ours!r}, theirs {theirs!r}"
    ours: str
    theirs: str


@dataclass(eq=False)
class FingerprintMismatch(ProtocolError):
    """The model's name is equal, but its configuration or tokenizer differs: token ids would not mean the same."""

    code: ClassVar[str] = "fingerprint_mismatch"
    text: ClassVar[str] = "fingerprint of model {model!r}: ours {ours!r}, theirs {theirs!r}"
    model: str
    ours: str
    theirs: str


@dataclass(eq=False)
class AuthenticationFailed(ProtocolError):
    """The peer does not know the cluster token, or the handshake was changed or replayed on its way."""

    code: ClassVar[str] = "authentication_failed"
    text: ClassVar[str] = "{peer} did not prove that it has our cluster token"
    peer: str


@dataclass(eq=False)
class DuplicateAttempt(ProtocolError):
    """An attempt was added while one with the same id is unfinished; vLLM would assert on it."""

    code: ClassVar[str] = "duplicate_attempt"
    text: ClassVar[str] = "attempt {attempt_id!r} is already there"
    attempt_id: str


@dataclass(eq=False)
class CreditExceeded(ProtocolError):
    """The ingress has more unfinished attempts on this replica than it was granted."""

    code: ClassVar[str] = "credit_exceeded"
    text: ClassVar[str] = "more than {limit} unfinished attempts"
    limit: int


@dataclass(eq=False)
class HandshakeTimeout(ProtocolError):
    """The link was not open in time."""

    code: ClassVar[str] = "handshake_timeout"
    text: ClassVar[str] = "no handshake within {limit_s:.1f} s"
    limit_s: float


@dataclass(eq=False)
class SlotsExhausted(ProtocolError):
    """The replica has as many links as it accepts."""

    code: ClassVar[str] = "slots_exhausted"
    text: ClassVar[str] = "all {limit} ingress slots are taken"
    limit: int


CODES = frozenset(kind.code for kind in ProtocolError.__subclasses__())
"""A peer whose Goodbye has one of these codes found an error; any other code is the peer's own reason to stop."""


@dataclass(eq=False)
class PeerClosed(ProtocolError):
    """The peer said Goodbye: ``peer_code`` is the code of the error it found in us, or of its own reason to stop."""

    code: ClassVar[str] = "peer_closed"
    text: ClassVar[str] = "the peer closed the link ({peer_code}): {reason!r}"
    peer_code: str
    reason: str
