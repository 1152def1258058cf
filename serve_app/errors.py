"""The whole error tree: what went wrong, whose fault it is, and what an HTTP client is told.

    ServingError                 500  serving_error
      ConfigError                500  config_error            the operator's file; never sent over HTTP
      BadRequest                 400  bad_request             the client's request
      NotSupported               400  not_supported
      ModelNotFound              404  model_not_found
      RequestTooLarge            413  request_too_large
      BodyTooSlow                408  body_too_slow
      NoReplica                  503  no_replica              no capacity now; carries Retry-After
      QueueFull                  503  queue_full
      ReplicaLost                502  replica_lost            a replica failed while it held the request
      ResumeDiverged             502  resume_diverged
      SendFailed                 500  send_failed             our own fault while a request was put on the wire
      CallFailed                 502  call_failed
      EngineStartFailed          500  engine_start_failed     never over HTTP: the replica does not come up
      ListenFailed               500  listen_failed           never over HTTP: the ingress does not come up
      CheckpointError            500  checkpoint_error        never over HTTP: a model's files
      ClusterFailed              500  cluster_failed          the command line's dealings with Ray
      ProtocolError              502  protocol_error          one link between ingress and replica; docs/protocol.md
        FrameTooLarge            502  frame_too_large
        MalformedMessage         502  malformed_message
        UnexpectedMessage        502  unexpected_message
        VersionMismatch          502  version_mismatch
        WrongModel               502  wrong_model
        FingerprintMismatch      502  fingerprint_mismatch
        AuthenticationFailed     502  authentication_failed
        DuplicateAttempt         502  duplicate_attempt
        CreditExceeded           502  credit_exceeded
        HandshakeTimeout         502  handshake_timeout
        SlotsExhausted           502  slots_exhausted
        PeerClosed               502  peer_closed             the peer's own word: its Goodbye

`code` goes over the wire in a Goodbye and, where vLLM has no such error, into the `type` of an HTTP error body
(`ingress/error_answers.py`): never rename one. Errors keep their fields when pickled, because Ray carries them between processes.
"""

import copyreg
from dataclasses import dataclass, field
from typing import Any, ClassVar


class ServingError(Exception):
    """Base of everything this package raises on purpose."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "serving_error"
    retry_after_s: float | None = None
    """Seconds after which the same request may succeed; goes into Retry-After. None: no such promise."""

    def __str__(self) -> str:
        return self.code

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles `args`, which lacks what was passed by keyword: the copy could not be built.
        return copyreg.__newobj__, (type(self),), dict(vars(self))  # type: ignore[attr-defined]


@dataclass(eq=False)
class ConfigError(ServingError):
    """The configuration file cannot be used. ``path`` is the dotted key path, "" where the file as a whole is meant."""

    code: ClassVar[str] = "config_error"
    path: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.problem}; {self.hint}" if self.hint else f"{where}{self.problem}"


@dataclass(eq=False)
class BadRequest(ServingError):
    """A parameter of the request has a value nobody can serve."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "bad_request"
    param: str
    problem: str

    def __str__(self) -> str:
        return f"{self.param}: {self.problem}"


@dataclass(eq=False)
class NotSupported(ServingError):
    """The request uses a feature this server leaves out on purpose; ``hint`` is the way out."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "not_supported"
    feature: str
    hint: str

    def __str__(self) -> str:
        return f"{self.feature} is not supported; {self.hint}"


@dataclass(eq=False)
class ModelNotFound(ServingError):
    """No front end serves the model the request names."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "model_not_found"
    model: str
    served: tuple[str, ...]

    def __str__(self) -> str:
        return f"the model {self.model[:256]!r} does not exist; served here: {', '.join(self.served)}"


@dataclass(eq=False)
class RequestTooLarge(ServingError):
    """The body is longer than the ingress reads, or what became of it than a frame may be; ``size_bytes`` is known so far."""

    http_status: ClassVar[int] = 413
    code: ClassVar[str] = "request_too_large"
    size_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"the request has at least {self.size_bytes} bytes, limit {self.limit_bytes}"


@dataclass(eq=False)
class BodyTooSlow(ServingError):
    """The body did not arrive within the time the ingress waits for one."""

    http_status: ClassVar[int] = 408
    code: ClassVar[str] = "body_too_slow"
    limit_s: float

    def __str__(self) -> str:
        return f"the request body was not complete within {self.limit_s:g} s"


@dataclass(eq=False)
class NoReplica(ServingError):
    """No replica of the model had room while the request waited; ``held`` of ``credit`` is over all linked ones."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "no_replica"
    model: str
    waited_s: float
    # field(): without it dataclass takes the None of the base for a default.
    retry_after_s: float = field()
    num_linked: int = 0
    num_draining: int = 0
    held: int = 0
    credit: int = 0

    def __str__(self) -> str:
        wait = f"after {self.waited_s:.1f} s; retry in {self.retry_after_s:.1f} s"
        if not self.num_linked:
            return f"no replica of {self.model!r} {wait}"
        where = f"{self.num_linked} linked, {self.num_draining} of them draining, {self.held} of {self.credit} places taken"
        return f"no room on the replicas of {self.model!r} ({where}) {wait}, or raise replicas.max or protocol.credit"


@dataclass(eq=False)
class QueueFull(ServingError):
    """As many requests wait for the model as may wait."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "queue_full"
    waiting: int
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting, limit {self.limit}; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class ReplicaLost(ServingError):
    """The replica that held the request failed, and the request cannot go on elsewhere."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "replica_lost"
    request: str
    cause: str

    def __str__(self) -> str:
        return f"the replica was lost while it held request {self.request}: {self.cause}"


@dataclass(eq=False)
class ResumeDiverged(ServingError):
    """A request started afresh gave another token than the client has; ``position`` counts output tokens from 0."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "resume_diverged"
    position: int

    def __str__(self) -> str:
        return f"after the loss of its replica the answer could not go on: it differs at output token {self.position}"


@dataclass(eq=False)
class SendFailed(ServingError):
    """A request could not be put on the wire, and not because of what the client sent."""

    code: ClassVar[str] = "send_failed"
    request: str
    cause: str

    def __str__(self) -> str:
        return f"request {self.request} could not be sent to a replica: {self.cause}"


@dataclass(eq=False)
class CallFailed(ServingError):
    """A replica refused or failed a utility call, such as resetting a cache."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "call_failed"
    method: str
    replica_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.method} failed on replica {self.replica_id}: {self.reason}"


@dataclass(eq=False)
class CheckpointError(ServingError):
    """A checkpoint cannot be made, fetched or used: the operator's matter, never sent over HTTP."""

    code: ClassVar[str] = "checkpoint_error"
    problem: str
    """Names the value that is wrong, and the way out."""

    def __str__(self) -> str:
        return self.problem


@dataclass(eq=False)
class EngineStartFailed(ServingError):
    """An engine core ended before it could serve, or took too long."""

    code: ClassVar[str] = "engine_start_failed"
    model: str
    reason: str

    def __str__(self) -> str:
        return f"the engine core of {self.model!r} did not start: {self.reason}"


@dataclass(eq=False)
class ListenFailed(ServingError):
    """The ingress cannot have its address."""

    code: ClassVar[str] = "listen_failed"
    host: str
    port: int
    reason: str

    def __str__(self) -> str:
        return f"cannot listen on {self.host}:{self.port}: {self.reason}; set ingress.port to a free one"


@dataclass(eq=False)
class ClusterFailed(ServingError):
    """A command could not do its work on the Ray cluster; ``hint`` is the way out."""

    code: ClassVar[str] = "cluster_failed"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}" if self.hint else self.problem


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
    """A valid message that its sender may not send, or not in this state."""

    code: ClassVar[str] = "unexpected_message"
    text: ClassVar[str] = "unexpected {message} in state {state}"
    message: str
    state: str


@dataclass(eq=False)
class VersionMismatch(ProtocolError):
    """Both sides must run the same version of ``what``: "protocol" or "vllm"."""

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
    """Same model name, but another config or tokenizer: token ids would not mean the same."""

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


@dataclass(eq=False)
class PeerClosed(ProtocolError):
    """The peer said Goodbye: ``peer_code`` is the code of the error it found in us, or of its own reason to stop."""

    code: ClassVar[str] = "peer_closed"
    text: ClassVar[str] = "the peer closed the link ({peer_code}): {reason!r}"
    peer_code: str
    reason: str
