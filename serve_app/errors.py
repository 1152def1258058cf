"""The whole error tree: what went wrong, whose fault it is, and what an HTTP client is told.

Longer than a module should be: one file, so that one table shows each code and status, and none is given twice.

    ServingError                 500  serving_error
      ConfigError                500  config_error            the operator's file; never sent over HTTP
      BadRequest                 400  bad_request             the client's request
      NotSupported               400  not_supported
      InvalidApiKey              401  invalid_api_key
      ModelNotFound              404  model_not_found
      NotStored                  404  not_stored              a file or a batch that is not there, or another key's
      RequestQuarantined         422  request_quarantined     one like it seems to end engines
      RequestTooLarge            413  request_too_large
      BodyTooSlow                408  body_too_slow
      NoReplica                  503  no_replica              no capacity now; carries Retry-After
      TooManyBatches             429  too_many_batches
      TooManyUploads             429  too_many_uploads
      StorageFailed              500  storage_failed          of files and batches
        StorageAway              503  storage_away            the shared database or object store does not answer now
        StorageFull              507  storage_full
      QueueFull                  503  queue_full
      NoFreePlace                503  no_free_place           a batch's request, which may only have places that nobody wants
      TooManyConnections         503  too_many_connections    an ingress has nearly no file descriptors left
      GrammarsBusy               503  grammars_busy           a grammar was not compiled in time, because the ingress is busy
      IngressOverloaded          503  ingress_overloaded      the event loop of an ingress is far behind
      LeaseBoardSilent           503  lease_board_silent      who is in the fleet cannot be told now; requests do not need it
      ServerStopping             503  server_stopping         an ingress ends; another one, or the next, takes the request
      ReplicaLost                502  replica_lost            a replica failed while it held the request
      ResumeDiverged             502  resume_diverged
      SendFailed                 500  send_failed             our own fault while a request was put on the wire
      CallFailed                 502  call_failed
      EngineStartFailed          500  engine_start_failed     never over HTTP: the replica does not come up
      FrontEndStartFailed        500  front_end_start_failed  never over HTTP: the ingress does not come up
      EngineLost                 500  engine_lost             never over HTTP: why a replica ended its links; its requests resume elsewhere
        EngineDied               500  engine_dead
          EngineOutOfMemory      500  engine_out_of_memory    the kernel killed it
        EngineHung               500  engine_hung             its supervisor killed it
          EngineStopped          500  engine_stopped
          EngineSilent           500  engine_silent
          StepTooLong            500  step_too_long
      ListenFailed               500  listen_failed           never over HTTP: an ingress or a replica does not come up
      CheckpointError            500  checkpoint_error        never over HTTP: a model's files
      DecisionLogError           500  decision_log_error      never over HTTP: a log of the autoscaler
      BatchError                 500  batch_error             never over HTTP: a batch cannot begin or go on
        KeyRefused               500  key_refused             no key can be read, or the service that it asks refuses it
        JournalBroken            500  journal_broken          the file that holds its answers is no journal, or damaged
        LeaseLost                500  lease_lost              another ingress has taken the batch over
        ServiceAway              500  service_away            the service that it asks has answered nothing for too long
      ClusterFailed              500  cluster_failed          the command line's dealings with Ray
        ClusterSilent            500  cluster_silent          Ray gives no answer; it may yet
        ModelFailed              500  model_failed            Serve has given up starting a model's replicas
      ProtocolError              502  protocol_error          one link between ingress and replica: protocol/errors.py
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
class InvalidApiKey(ServingError):
    """The request carries no API key, or one that is not in the file."""

    http_status: ClassVar[int] = 401
    code: ClassVar[str] = "invalid_api_key"
    problem: str

    def __str__(self) -> str:
        return f"{self.problem}; send the header `Authorization: Bearer KEY` with a key of this server"


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
class NotStored(ServingError):
    """There is no such file or batch, or it belongs to another API key."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "not_stored"
    kind: str
    """File or Batch."""
    id: str

    def __str__(self) -> str:
        return f"no such {self.kind} object: {self.id[:80]!r}"


@dataclass(eq=False)
class RequestQuarantined(ServingError):
    """Two replicas were lost while they worked on the request, or on one like it. No Retry-After: a client should not repeat it."""

    http_status: ClassVar[int] = 422
    code: ClassVar[str] = "request_quarantined"
    blocked_s: float

    def __str__(self) -> str:
        return (
            "two replicas were lost while they worked on a request like this one, which may be the cause; "
            f"requests like it are refused for another {self.blocked_s:.1f} s"
        )


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
class NoFreePlace(ServingError):
    """A batch's request may only have a place that nobody else wants, and there is none."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "no_free_place"
    waiting: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"no replica has a free place for a batch ({self.waiting} requests are waiting); retry in {self.retry_after_s:.1f} s"
        )


@dataclass(eq=False)
class TooManyBatches(ServingError):
    """As many batches of this API key are open as may be."""

    http_status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_batches"
    num_open: int
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.num_open} batches are open, limit {self.limit}; cancel one, or retry in {self.retry_after_s:g} s"


@dataclass(eq=False)
class TooManyUploads(ServingError):
    """As many uploads of this API key are under way as may be; each of them has room on the disk put aside."""

    http_status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_uploads"
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.limit} uploads are under way, which is the limit; end one, or retry in {self.retry_after_s:g} s"


class StorageFailed(ServingError):
    """The folder or the database of files and batches cannot be used. The cause is in the log: it names paths."""

    code: ClassVar[str] = "storage_failed"

    def __str__(self) -> str:
        return "the storage of files and batches failed; the server's log has the cause"


@dataclass(eq=False)
class StorageAway(StorageFailed):
    """The database or the object store that ingresses share does not answer now. The cause is in the log: it names hosts."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "storage_away"
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"the storage of files and batches does not answer; nothing is lost; retry in {self.retry_after_s:g} s"


@dataclass(eq=False)
class StorageFull(StorageFailed):
    """There is no room for a file; nothing of it is kept."""

    http_status: ClassVar[int] = 507
    code: ClassVar[str] = "storage_full"
    problem: str

    def __str__(self) -> str:
        return f"there is no room: {self.problem}; delete files that are not needed any more"


@dataclass(eq=False)
class TooManyConnections(ServingError):
    """The ingress has only the file descriptors left that it keeps for itself and for probes; ``limit`` counts all that it may have."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "too_many_connections"
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"too many connections: nearly all of {self.limit} file descriptors are in use; retry in {self.retry_after_s:.1f} s"
        )


@dataclass(eq=False)
class GrammarsBusy(ServingError):
    """The grammar of a request was not tried in ``limit_s``; others came before it, or the machine is slow."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "grammars_busy"
    limit_s: float
    retry_after_s: float

    def __str__(self) -> str:
        return (
            f"the grammar of the answer was not compiled within {self.limit_s:g} s, because this ingress is busy; "
            f"retry in {self.retry_after_s:.1f} s"
        )


@dataclass(eq=False)
class IngressOverloaded(ServingError):
    """The ingress has more to do than its event loop gets done; ``limit_s`` is how late that may be."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "ingress_overloaded"
    limit_s: float
    retry_after_s: float

    def __str__(self) -> str:
        return f"this ingress is over {self.limit_s:g} s behind with its work; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class LeaseBoardSilent(ServingError):
    """The lease board gives no answer, so that nobody can be told who is in the fleet. Requests for models do not need it."""

    code: ClassVar[str] = "lease_board_silent"
    http_status: ClassVar[int] = 503
    retry_after_s: float

    def __str__(self) -> str:
        return f"the lease board, which knows who is in the fleet, does not answer; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class ServerStopping(ServingError):
    """The ingress ends, and the time that running requests had to finish is over."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "server_stopping"
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"this server is stopping and could not finish the answer in time; send the request again in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class ReplicaLost(ServingError):
    """The replica that held the request failed, and the request cannot go on elsewhere.

    ``reason`` is in our own words: what the replica said last may quote another client's request.
    """

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "replica_lost"
    request: str
    reason: str

    def __str__(self) -> str:
        return f"the replica was lost while it held request {self.request}: {self.reason}"


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
class FrontEndStartFailed(ServingError):
    """vLLM's front end of a model could not be built; ``reason`` is vLLM's own, in one line."""

    code: ClassVar[str] = "front_end_start_failed"
    model: str
    reason: str

    def __str__(self) -> str:
        return f"the front end of {self.model!r} did not start: {self.reason}"


class EngineLost(ServingError):
    """A replica has no engine any more and ends its own process."""

    code: ClassVar[str] = "engine_lost"


@dataclass(eq=False)
class EngineDied(EngineLost):
    """The engine core process ended by itself; ``reason`` is its last word, where it had one."""

    code: ClassVar[str] = "engine_dead"
    reason: str

    def __str__(self) -> str:
        return f"the engine core died: {self.reason}"


@dataclass(eq=False)
class EngineOutOfMemory(EngineDied):
    """The kernel has killed it, because the machine or the replica's memory cgroup (the container) had no memory left."""

    code: ClassVar[str] = "engine_out_of_memory"


@dataclass(eq=False)
class EngineHung(EngineLost):
    """The engine was there and made no progress, so its supervisor killed it."""

    code: ClassVar[str] = "engine_hung"
    after_s: float

    def __str__(self) -> str:
        return f"the engine hung for {self.after_s} s"


@dataclass(eq=False)
class EngineStopped(EngineHung):
    """A process of the engine was stopped, as by SIGSTOP."""

    code: ClassVar[str] = "engine_stopped"

    def __str__(self) -> str:
        return f"a process of the engine was stopped for {self.after_s} s"


@dataclass(eq=False)
class EngineSilent(EngineHung):
    """No step, no answer to a probe, and no CPU time used: a deadlock."""

    code: ClassVar[str] = "engine_silent"

    def __str__(self) -> str:
        return f"the engine made no step, answered no probe and used no CPU for {self.after_s} s"


@dataclass(eq=False)
class StepTooLong(EngineHung):
    """The engine used CPU time and came to no end of a step."""

    code: ClassVar[str] = "step_too_long"

    def __str__(self) -> str:
        return f"a step of the engine lasted {self.after_s} s"


@dataclass(eq=False)
class ListenFailed(ServingError):
    """An ingress or a replica cannot have its address; ``key`` is the setting of the port."""

    code: ClassVar[str] = "listen_failed"
    host: str
    port: int
    reason: str
    key: str = "ingress.port"

    def __str__(self) -> str:
        return f"cannot listen on {self.host}:{self.port}: {self.reason}; set {self.key} to a free one"


@dataclass(eq=False)
class ClusterFailed(ServingError):
    """A command could not do its work on the Ray cluster; ``hint`` is the way out."""

    code: ClassVar[str] = "cluster_failed"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}" if self.hint else self.problem


@dataclass(eq=False)
class ClusterSilent(ClusterFailed):
    """Ray's control plane has not answered within a limit. It is dead, away, or only slow."""

    code: ClassVar[str] = "cluster_silent"


@dataclass(eq=False)
class ModelFailed(ClusterFailed):
    """Serve has given up starting the model's replicas."""

    code: ClassVar[str] = "model_failed"


@dataclass(eq=False)
class DecisionLogError(ServingError):
    """A log of the autoscaler cannot answer what is asked of it; ``hint`` is the way out."""

    code: ClassVar[str] = "decision_log_error"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"


@dataclass(eq=False)
class BatchError(ServingError):
    """A batch cannot go on, or not begin; what was answered is kept. ``hint`` is the way out."""

    code: ClassVar[str] = "batch_error"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"


@dataclass(eq=False)
class KeyRefused(BatchError):
    """The batch has no API key that the service accepts. The command line ends with exit status 2: another try fails, too."""

    code: ClassVar[str] = "key_refused"


@dataclass(eq=False)
class LeaseLost(BatchError):
    """The lease of this ingress on a batch is over, and another ingress has taken the batch over."""

    code: ClassVar[str] = "lease_lost"


@dataclass(eq=False)
class JournalBroken(BatchError):
    """The file of a batch's answers is no journal, or damaged."""

    code: ClassVar[str] = "journal_broken"


@dataclass(eq=False)
class ServiceAway(BatchError):
    """For ``Limits.patience_s`` the service has answered no request at all."""

    code: ClassVar[str] = "service_away"
