"""These helpers make fleets whose answers move with their KV. A prompt token costs 0.3 ms, and a step some 32 ms."""

from serve_app.core.events import LinkOpened, StepCostsMeasured
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import HandOverAttempt, Instruction
from serve_app.core.routing import RoutingPolicy
from serve_app.core.step_costs import MeasuredCosts
from tests.core.helpers import Output, arrived, outputs, run

COSTS = MeasuredCosts(
    step_s=0.03,
    output_token_s=1e-4,
    prompt_token_s=3e-4,
    step_error_s=1e-3,
    output_token_error_s=1e-5,
    prompt_token_error_s=1e-5,
)
LONG, SHORT = 8000, 300


def fleet_apart(*replica_ids: str, costs: MeasuredCosts | None = COSTS, routing: RoutingPolicy | None = None) -> FleetState:
    settings = FleetSettings(model="tiny", heartbeat_timeout_s=1000.0, apart=True)
    fleet = FleetState(settings, routing)
    run(fleet, *map(linked, replica_ids))
    if costs is not None:
        run(fleet, StepCostsMeasured(costs))
    return fleet


def linked(replica_id: str, *, kv_transfer: str = "nixl") -> LinkOpened:
    return LinkOpened(replica_id, 64, weights="w", kv_tokens=100_000, kv_transfer=kv_transfer)


def answers(fleet: FleetState, *names: str, prompt: int = SHORT, max_tokens: int = 500, now: float = 0.0) -> list[str]:
    """Start answers of which one token came; return their replicas."""
    where = []
    for name in names:
        run(fleet, arrived(name, prompt_tokens=prompt, max_tokens=max_tokens), now=now)
        where.append(at(fleet, name))
        first_token(fleet, name, now=now)
    return where


def first_token(fleet: FleetState, name: str, *, now: float = 0.0) -> list[Instruction]:
    request = fleet.requests[name]
    return run(fleet, outputs(at(fleet, name), Output(request.attempt_id, [7])), now=now)


def at(fleet: FleetState, name: str) -> str:
    replica_id = fleet.requests[name].replica_id
    assert replica_id is not None
    return replica_id


def leaving(instructions: list[Instruction]) -> list[str]:
    """Return the requests that are asked to leave their replicas."""
    return [each.attempt_id.partition("@")[0] for each in instructions if isinstance(each, HandOverAttempt)]
