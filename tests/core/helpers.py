"""These helpers make fleets in a known state. Times are seconds of a clock that starts at 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.events import Event, HeartbeatArrived, LinkOpened, OutputsArrived, RequestArrived
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import Instruction, StartAttempt
from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.load import EngineLoad
from serve_app.core.request import EngineOutput, RequestState, Resume
from serve_app.core.routing import Choice, ReplicaState
from serve_app.errors import ServingError


class Compared(LeastOutstandingTokens):
    """Compares each pick with the least loaded of all replicas with room."""

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        picked = super().pick(request, replicas)

        def tokens(replica: ReplicaState) -> int:
            """Count those that the request would have to wait for."""
            give_way = [r.outstanding_tokens for r in replica.held.values() if r.gives_way and not request.gives_way]
            return replica.outstanding_tokens - sum(give_way)

        assert (None if picked is None else picked.replica) is min(
            (
                r
                for r in replicas.values()
                if not r.draining and len(r.held) < r.credit and (request.weights is None or request.weights == r.weights)
            ),
            key=lambda r: (tokens(r), len(r.held), r.load.running + r.load.waiting, r.replica_id),
            default=None,
        )
        return picked


@dataclass
class Output:
    """The fields of vLLM's ``EngineCoreOutput`` that the fleet reads."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any = None
    events: Any = None
    prefill_stats: Any = None
    stop_reason: Any = None
    kv_transfer_params: Any = None


def arrived(
    request_id: str, resume: Resume = Resume.CONTINUE, *, prompt_tokens: int = 2, max_tokens: int = 4, like: str = ""
) -> RequestArrived:
    """``like``: another request that gives an engine the same to compute."""
    return RequestArrived(request_id, prompt_tokens, max_tokens, resume, fingerprint=like or request_id)


def outputs(replica_id: str, *items: EngineOutput) -> OutputsArrived:
    return OutputsArrived(replica_id, items)


def start(
    request_id: str, attempt: int, replica_id: str, prefix: tuple[int, ...] = (), emitted: int = 0, *, suspect: bool = False
) -> StartAttempt:
    return StartAttempt(request_id, f"{request_id}@{attempt}", replica_id, prefix, emitted, suspect)


def fleet_of(*replica_ids: str, credit: int = 8, **settings: Any) -> FleetState:
    fleet = FleetState(FleetSettings(model="tiny", **settings))
    for replica_id in replica_ids:
        fleet.handle(LinkOpened(replica_id, credit), now=0.0)
    return fleet


def run(fleet: FleetState, *events: Event, now: float = 0.0) -> list[Instruction]:
    """Handle the events, check the invariants after each, and return what the last one led to."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = fleet.handle(event, now=now)
        fleet.validate()
    return instructions


def same(error: ServingError, expected: ServingError) -> bool:
    """Compare errors by all their fields; their own comparison is by identity."""
    return repr(error) == repr(expected) and type(error) is type(expected)


def heartbeat(replica_id: str, *, draining: bool = False, waiting: int = 0) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1, running=0, waiting=waiting), draining=draining)
