"""These errors say that there is no room, or no time, for a request now. Each of them carries Retry-After."""

from dataclasses import dataclass, field
from typing import ClassVar

from serve_app.errors.base import ServingError


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
