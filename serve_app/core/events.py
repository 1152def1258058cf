"""Events are the input of ``FleetState.handle``: they say what happened, in the past tense. Only data.

Times are the ingress's monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from serve_app.core.load import EngineLoad
from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.request import EngineOutput, Resume
from serve_app.errors import ServingError


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """The front end added an engine request. Token counts are >= 0; ``request_id`` is new, ``fingerprint`` as in `RequestState`.

    ``prefix``: empty where nothing of it is to be routed by. ``background``: it is a batch's, and is refused where it would wait, or let
    others wait. ``adapter``: the number of the LoRA adapter that it is for, None for the model itself.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    resume: Resume
    fingerprint: str
    prefix: Prefix = NO_PREFIX
    background: bool = False
    adapter: int | None = None


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """The front end wants no more of these requests. Unknown ids are ignored.

    ``outcome`` is "aborted" where the client has gone, "complete" where a stop string has ended the answer, and "failed" where another
    choice of the same n>1 has failed.
    """

    request_ids: Sequence[str]
    outcome: Literal["aborted", "complete", "failed"] = "aborted"


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A replica passed the handshake. ``credit`` is how many unfinished attempts it takes from this ingress, if it is not draining.

    ``weights`` is equal for replicas that may go on with each other's answers. ``kv_tokens``: room of its KV cache, 0 for unknown.
    """

    replica_id: str
    credit: int
    draining: bool = False
    weights: str = ""
    kv_tokens: int = 0
    adapters: frozenset[int] = frozenset()
    """Numbers of the LoRA adapters that its engine has loaded."""


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    """A replica reported its load.

    ``drain_left_s``, >= 0, means something only while it is ``draining``: seconds until its goodbye, whatever it then still holds.
    """

    replica_id: str
    load: EngineLoad
    draining: bool
    drain_left_s: float = 0.0


class LinkEnd(Enum):
    """Why a link to a replica ended. The values are what a client may be told: our words, never the peer's."""

    ENGINE_DIED = "its engine died"
    """The replica said so as its last word, or that its engine hung."""
    ENGINE_STOPPED = "its engine was stopped"
    """By a signal from outside, which no request can send."""
    BROKE_OFF = "the connection to it broke off"
    """Without a word: the replica was killed, or the network failed. Which of the two shows when the replica is linked again."""
    MISUNDERSTOOD = "what was said on the link to it broke the protocol"
    """One side refused a message of the other: a bug or damage, or output of this very request that cannot be read."""
    UNRESPONSIVE = "it stopped answering"
    """It was silent, or read nothing, for longer than allowed; perhaps this ingress itself stood still."""
    SAID_GOODBYE = "it closed its link"
    """By a decision of its own, such as the end of its drain, or because it had heard nothing from this ingress."""
    ENDED_HERE = "this ingress closed the link to it"


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a replica ended; a second one finds nothing.

    ``unsent``: ids of attempts that were never written to the link. They cannot have caused its end.
    """

    replica_id: str
    end: LinkEnd
    unsent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TrialBegan:
    """The replica is about to give the attempt of a suspect to its engine. Unknown ids are ignored."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class BlocksTold:
    """What other ingresses refuse: fingerprints, each with the seconds that are left of its block. May be told again and again."""

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
class StartMeasured:
    """A replica's lease tells how long it took from being scheduled to ready, > 0. May be told again and again."""

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
    | LinkLost
    | TrialBegan
    | BlocksTold
    | AttemptUnsendable
    | OutputsArrived
    | StartMeasured
    | Ticked
)
