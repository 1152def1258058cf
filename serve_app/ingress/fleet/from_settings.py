"""This module reads from the configuration what a model's `FleetState` needs: its limits and its routing policy. Pure."""

from serve_app.config import ModelSettings, Settings
from serve_app.core.affinity import CONTINUED_AT_START, PrefixAffinity
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.routing import RoutingPolicy


def limits_of(settings: Settings, model: ModelSettings) -> FleetSettings:
    return FleetSettings(
        model=model.name,
        max_waiting_requests=settings.ingress.max_waiting_requests,
        no_replica_s=settings.timeouts.no_replica_s,
        max_standstill_s=2 * settings.timeouts.no_replica_s,  # enough for one whole wait for a replica and a prefill
        heartbeat_timeout_s=settings.protocol.heartbeat_timeout_s,
        quarantine_s=settings.ingress.quarantine_s,
        engines_yield=model.yields_to_chats(),
        engines_preempt=preempts(model),
        ttft_s=model.replicas.ttft_slo_s,
        max_replicas=model.replicas.max,
        apart=model.routing.apart,
        pools=None if model.pools is None else PoolSizes(*model.pools.sizes(model.replicas.max)),
    )


def preempts(model: ModelSettings) -> bool:
    """Return whether the model's engines pause requests for others. Models with Mamba layers count too: they are not known here."""
    return model.yields_to_chats() and model.engine_args.get("enable_prefix_caching", True) is not False


def routing_of(settings: Settings, model: ModelSettings) -> RoutingPolicy:
    if model.routing.by == "load":
        return LeastOutstandingTokens()
    # A single ingress has placed all conversations itself. Placing by the hash would only distribute its first requests less evenly.
    is_only = settings.ingress.replicas.max == 1
    return PrefixAffinity(model.routing.max_load, 0.0 if is_only else CONTINUED_AT_START)
