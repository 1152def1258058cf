"""Instructions are the output of ``FleetState.handle``: they say what to do, in the imperative. Only data; the adapter decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.core.request import EngineOutput
from serve_app.errors import ServingError


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Send the request to a replica under ``attempt_id``.

    ``continue_from`` are emitted ids to append to the prompt (empty for a first attempt, a replay and a restart). ``emitted`` is the number
    of tokens that the front end already has; they must not be asked for again. ``suspect``: the replica gives the attempt to its engine
    when no other suspect is there. ``kv`` says where another replica keeps the KV, in that replica's own terms.
    """

    request_id: str
    attempt_id: str
    replica_id: str
    continue_from: tuple[int, ...]
    emitted: int
    suspect: bool = False
    kv: object | None = None


@dataclass(frozen=True, slots=True)
class AbortAttempts:
    """Tell the replica to stop these attempts and free their KV blocks."""

    replica_id: str
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandOverAttempt:
    """Ask the replica to end the attempt and to keep its KV for another replica."""

    replica_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class FreeKeptKv:
    """Tell the replica that no other replica reads, or will read, the KV that it keeps of the attempt, which it handed over."""

    replica_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class PassTrial:
    """Tell the replica that the attempt of a suspect has had its new token: it may continue beside the next suspect."""

    replica_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class WakeReplica:
    """Tell the replica, whose engine sleeps, that requests wait for it."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class DeliverOutputs:
    """Give these outputs to the front end. ``swallowed`` has (index into outputs, number of leading tokens removed)."""

    outputs: Sequence[EngineOutput]
    swallowed: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class FailRequest:
    """End the request with this error; nothing more will come for it."""

    request_id: str
    error: ServingError


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link to a replica that went silent; the fleet has already forgotten it."""

    replica_id: str
    reason: str


Instruction = (
    StartAttempt
    | AbortAttempts
    | HandOverAttempt
    | FreeKeptKv
    | PassTrial
    | WakeReplica
    | DeliverOutputs
    | FailRequest
    | CloseLink
)
