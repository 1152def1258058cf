"""Events are the input of ``FleetState.handle``: they say what happened, in the past tense. Only data.

Times are the ingress's monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from serve_app.core.load import EngineLoad
from serve_app.core.order_board import LaneWaits
from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.request import EngineOutput, RequestState, Resume
from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.tenants import Priority
from serve_app.errors import ServingError


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """The front end added an engine request. Token counts are >= 0; ``request_id`` is new, ``fingerprint`` as in `RequestState`.

    ``prefix`` is empty if the request is not routed by its prompt. ``background``: the request is a batch's, and is refused if it would
    wait or make others wait. ``adapter``: the number of the LoRA adapter that the request is for, None for the model itself. ``start_by``:
    the second by which its first token has to come, None if there is no such limit; later engine requests of an HTTP request have none.
    ``first_token_s`` is the tenant's limit from which ``start_by`` was computed, 0 without one. ``max_wait_s`` is a limit from now on,
    which only counts at arrival; with fewer than ``max_replicas``, the p90 of starts is added. ``is_first``: it is the first engine request
    of its HTTP request.

    ``tenant``, ``weight`` and ``priority``: whose request it is, for `FairOrder`; "" stands for all requests without a tenant.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    resume: Resume
    fingerprint: str
    prefix: Prefix = NO_PREFIX
    background: bool = False
    adapter: int | None = None
    start_by: float | None = None
    first_token_s: float = 0.0
    max_wait_s: float | None = None
    is_first: bool = True
    tenant: str = ""
    weight: float = 1.0
    priority: Priority = "interactive"

    def state(self, now: float) -> RequestState:
        """Return the request as it is at its arrival."""
        request = RequestState(self.request_id, self.prompt_tokens, self.max_tokens, self.resume, self.fingerprint)
        request.prefix, request.adapter, request.background = self.prefix, self.adapter, self.background
        request.tenant = self.tenant
        request.arrived_at, request.waiting_since = now, now
        request.start_by, request.first_token_s, request.is_first = self.start_by, self.first_token_s, self.is_first
        request.expected_by = None if self.max_wait_s is None else now + self.max_wait_s
        return request


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """The front end ended these requests. Unknown ids are ignored.

    ``outcome`` is "aborted" if the client has gone or the tenant's time for the answer is over, "complete" if a stop string has ended the
    answer, and "failed" if another choice of the same n>1 has failed.
    """

    request_ids: Sequence[str]
    outcome: Literal["aborted", "complete", "failed"] = "aborted"


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A replica passed the handshake. ``credit`` is how many unfinished attempts it takes from this ingress, if it is not draining.

    ``weights`` is equal for replicas that may continue each other's answers. ``kv_tokens``: tokens that its KV cache holds, 0 for unknown.
    ``max_model_len``: tokens of prompt and answer for which its engine has room, 0 for unknown. ``kv_transfer``, ``kv_token_bytes``,
    ``host_kv_tokens``: as in `ReplicaState`.
    """

    replica_id: str
    credit: int
    draining: bool = False
    weights: str = ""
    kv_tokens: int = 0
    adapters: frozenset[int] = frozenset()
    """Numbers of the LoRA adapters that its engine has loaded."""
    max_model_len: int = 0
    kv_transfer: str = ""
    kv_token_bytes: int = 0
    host_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    """A replica reported its load.

    ``drain_left_s``, >= 0, means something only while it is ``draining``: seconds until its goodbye, whatever it then still holds.
    ``sleeping``: it drains because its engine sleeps, or is about to; `WakeReplica` makes it take requests again.
    """

    replica_id: str
    load: EngineLoad
    draining: bool
    drain_left_s: float = 0.0
    sleeping: bool = False


@dataclass(frozen=True, slots=True)
class CacheReported:
    """A replica with several tiers of KV reported which points of prompts it has cached, since its report before: as in `Digest`."""

    replica_id: str
    number: int
    anew: bool
    added: Sequence[int]
    removed: Sequence[int]


class LinkEnd(Enum):
    """Why a link to a replica ended. The values go into clients' errors: they are our words, never the peer's."""

    ENGINE_DIED = "its engine died"
    """The replica's Goodbye said that its engine died or hung."""
    ENGINE_STOPPED = "its engine was stopped"
    """A signal from outside stopped the engine, which no request can cause."""
    BROKE_OFF = "the connection to it broke off"
    """The connection ended without a Goodbye: the replica was killed, or the network failed. A new link to the replica shows which."""
    MISUNDERSTOOD = "what was said on the link to it broke the protocol"
    """One side refused a message of the other: a bug or damage, or output of this very request that cannot be read."""
    UNRESPONSIVE = "it stopped answering"
    """The replica was silent, or read nothing, for longer than allowed; perhaps this ingress itself stood still."""
    SAID_GOODBYE = "it closed its link"
    """The replica decided so, such as at the end of its drain, or because it had heard nothing from this ingress."""
    ENDED_HERE = "this ingress closed the link to it"


ENGINE_ENDED = (LinkEnd.ENGINE_DIED, LinkEnd.ENGINE_STOPPED)
"""Ends of a link after which the replica's engine core does not exist any more."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a replica ended; a second one finds nothing.

    ``unsent``: ids of attempts that were never written to the link. They cannot have caused the link's end.
    """

    replica_id: str
    end: LinkEnd
    unsent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TrialBegan:
    """The replica is about to give the attempt of a suspect to its engine. Unknown ids are ignored."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class BlocksReported:
    """Other ingresses reported the fingerprints that they refuse, each with the seconds left of its block. Repeats are allowed."""

    blocks: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class AttemptUnsendable:
    """The request of a started attempt does not fit the protocol (too large); it was not sent."""

    request_id: str
    error: ServingError


@dataclass(frozen=True, slots=True)
class OutputsArrived:
    """One engine step's outputs, ids being attempt ids. The fleet rewrites them to request ids in place."""

    replica_id: str
    outputs: Sequence[EngineOutput]


@dataclass(frozen=True, slots=True)
class StepCostsMeasured:
    """The model's replicas have reported what steps and tokens cost their engines. Repeats are allowed."""

    costs: MeasuredCosts


@dataclass(frozen=True, slots=True)
class WaitsReported:
    """The other ingresses reported their greatest virtual time, what waits there for each tenant, and what they have charged it."""

    waits: LaneWaits


@dataclass(frozen=True, slots=True)
class PoolsPlanned:
    """The autoscaler wants this share of the replicas to compute prompts, 0..1. Repeats are allowed."""

    prefill_share: float


@dataclass(frozen=True, slots=True)
class StartMeasured:
    """A replica's lease reported how long it took from being scheduled to ready, > 0. Repeats are allowed."""

    replica_id: str
    start_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: the only cause of anything that depends on waiting."""


Event = (
    RequestArrived
    | RequestsAborted
    | LinkOpened
    | HeartbeatArrived
    | CacheReported
    | LinkLost
    | TrialBegan
    | BlocksReported
    | AttemptUnsendable
    | OutputsArrived
    | StartMeasured
    | StepCostsMeasured
    | WaitsReported
    | PoolsPlanned
    | Ticked
)
