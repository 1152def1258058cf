"""These errors say that there is no room, or no time, for a request. Each of them but `DeadlinePassed` carries Retry-After."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class NoReplica(ServingError):
    """No replica of the model had room while the request waited; ``held`` and ``credit`` are sums over all linked replicas."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "no_replica"
    model: str
    waited_s: float
    # field(): without it, dataclass takes the None of the base class for a default.
    retry_after_s: float = field()
    num_linked: int = 0
    num_draining: int = 0
    """Of the linked ones, those that end."""
    num_sleeping: int = 0
    """Of the linked ones, those whose engines sleep, fall asleep or wake."""
    held: int = 0
    credit: int = 0

    def __str__(self) -> str:
        wait = f"after {self.waited_s:.1f} s; retry in {self.retry_after_s:.1f} s"
        if not self.num_linked:
            return f"no replica of {self.model!r} {wait}"
        asleep = f", {self.num_sleeping} asleep" if self.num_sleeping else ""
        where = (
            f"{self.num_linked} linked, {self.num_draining} of them draining{asleep}, {self.held} of {self.credit} places taken"
        )
        if self.num_sleeping == self.num_linked:
            return f"no engine of {self.model!r} is awake ({where}) {wait}"
        return f"no room on the replicas of {self.model!r} ({where}) {wait}, or raise replicas.max or protocol.credit"


@dataclass(eq=False)
class QueueFull(ServingError):
    """The largest allowed number of requests waits for the model already."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "queue_full"
    waiting: int
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        limit = f"limit {self.limit} (ingress.max_waiting_requests)"
        return f"{self.waiting} requests are waiting, {limit}; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class CannotStartInTime(ServingError):
    """The first token has not come within the limit of the request's tenant or model, or probably would not.

    ``limit``: ``first_token_s`` for the tenant's limit, ``refuse_after_s`` for the model's; ``limit_s`` is its value. ``waited_s``: how
    long the request has waited, 0 for a request that is refused when it comes. ``expected_s``: how long the request would wait from now on
    behind ``waiting`` others, 0 if that is not known.
    """

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "cannot_start_in_time"
    waiting: int
    waited_s: float
    expected_s: float
    limit: Literal["first_token_s", "refuse_after_s"]
    limit_s: float
    retry_after_s: float = field()
    start_s: float = 0.0
    """Seconds for the start of a replica that were added to the limit."""

    def __str__(self) -> str:
        waited = f"the request has waited {self.waited_s:.1f} s, {self.waiting} others wait"
        longer = f", and it would start in about {self.expected_s:.1f} s" if self.expected_s else ""
        limit = f"its tenant's {self.limit}" if self.limit == "first_token_s" else f"its model's replicas.{self.limit}"
        start = f", and {self.start_s:.0f} s for a replica's start" if self.start_s else ""
        return f"{waited}{longer}: too late for {limit}: {self.limit_s:g}{start}; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class DeadlinePassed(ServingError):
    """The answer was not complete at the end of its tenant's ``total_s``."""

    http_status: ClassVar[int] = 504
    code: ClassVar[str] = "deadline_passed"
    tenant: str
    total_s: float

    def __str__(self) -> str:
        return f"the answer took longer than the {self.total_s:g} s that the tenant {self.tenant!r} has for one (total_s)"


@dataclass(eq=False)
class NoFreePlace(ServingError):
    """A batch's request only gets a place that no other request wants, and there is none."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "no_free_place"
    waiting: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"no replica has a free place for a batch ({self.waiting} requests are waiting); retry in {self.retry_after_s:.1f} s"
        )


@dataclass(eq=False)
class QuotaExceeded(ServingError):
    """A request needs more than is left of its tenant's ``quota``. ``used`` and ``limit`` are of all ingresses together.

    ``needed`` is 0 for a request that was not read, because nothing is left. ``has_answer``: ``needed`` includes tokens of an answer.
    """

    http_status: ClassVar[int] = 429
    code: ClassVar[str] = "rate_limit_exceeded"
    tenant: str
    quota: str
    limit: int
    used: int
    needed: int
    retry_after_s: float = field()
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """What is left of the tenant's quotas, for the head of the answer."""
    has_answer: bool = False

    def __str__(self) -> str:
        has = f"the tenant {self.tenant!r} has {self.quota} {self.limit}"
        with_answer = self.has_answer and self.quota.startswith("tokens")
        of_what = ", its answer included: a much lower max_tokens may need less" if with_answer else ""
        needs = f"this request needs {self.needed}{of_what}" if self.needed else "none is left for another request"
        needs = f"{self.used} are in use and {needs}"
        return f"{has}: {needs}; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class TooManyBatches(ServingError):
    """The largest allowed number of batches of this tenant is open already."""

    http_status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_batches"
    num_open: int
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.num_open} batches are open, limit {self.limit}; cancel one, or retry in {self.retry_after_s:g} s"


@dataclass(eq=False)
class TooManyUploads(ServingError):
    """The largest allowed number of uploads of this tenant is under way already; room on the disk is set aside for each."""

    http_status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_uploads"
    limit: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.limit} uploads are under way, which is the limit; end one, or retry in {self.retry_after_s:g} s"


@dataclass(eq=False)
class TooManyConnections(ServingError):
    """The ingress has only the file descriptors left that it keeps for itself and for probes; ``limit`` is its limit of descriptors."""

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
    """The grammar of a request was not compiled within ``limit_s``: other grammars came before it, or the machine is slow."""

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
    """The event loop of the ingress is later than ``limit_s``."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "ingress_overloaded"
    limit_s: float
    retry_after_s: float

    def __str__(self) -> str:
        return f"this ingress is over {self.limit_s:g} s behind with its work; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class LeaseBoardSilent(ServingError):
    """The lease board does not answer, so the fleet's members are unknown. Requests for models do not need the lease board."""

    code: ClassVar[str] = "lease_board_silent"
    http_status: ClassVar[int] = 503
    retry_after_s: float

    def __str__(self) -> str:
        return f"the lease board, which knows the fleet's members, does not answer; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class ServerStopping(ServingError):
    """The ingress ends, and the time for running requests to finish is over."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "server_stopping"
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"this server is stopping and could not finish the answer in time; send the request again in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class IssuerAway(ServingError):
    """The issuer of tokens has not answered since the ingress started, so no token can be checked. API keys need no issuer."""

    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "issuer_away"
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"the issuer's keys are not known yet, so no token can be checked; retry in {self.retry_after_s:g} s"
