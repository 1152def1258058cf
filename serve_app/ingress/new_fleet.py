"""From the configuration to the state of one model's fleet at one ingress."""

from serve_app.config import ModelSettings, Settings
from serve_app.core.affinity import PrefixAffinity
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.routing import LeastOutstandingTokens


def new_fleet(settings: Settings, model: ModelSettings) -> FleetState:
    """Return a fleet without replicas."""
    limits = FleetSettings(
        model=model.name,
        max_waiting_requests=settings.ingress.max_waiting_requests,
        no_replica_s=settings.timeouts.no_replica_s,
        max_standstill_s=2 * settings.timeouts.no_replica_s,  # one whole wait for a replica, and a prefill
        heartbeat_timeout_s=settings.protocol.heartbeat_timeout_s,
        quarantine_s=settings.ingress.quarantine_s,
        engines_yield=model.yields_to_chats(),
        ttft_s=model.replicas.ttft_slo_s,
    )
    routing = model.routing
    return FleetState(limits, PrefixAffinity(routing.max_load) if routing.by == "prefix" else LeastOutstandingTokens())
