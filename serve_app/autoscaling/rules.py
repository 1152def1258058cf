"""This module reads a configuration for the autoscaler: the names of Serve's deployments, and the rules by which each is scaled. Pure."""

import hashlib

from serve_app.autoscaling.capacity import Slo
from serve_app.autoscaling.decision import ScalingRules
from serve_app.autoscaling.fleet import FleetRules
from serve_app.config import ModelSettings, Settings
from serve_app.core.pool_sizes import PoolSizes

INGRESS = "ingress"


def replica_deployment(model: ModelSettings) -> str:
    """Return the Serve deployment's name.

    A model's name may hold characters that Serve's names may not. If one is replaced, a hash keeps `a/b` and `a:b` apart. The hash depends
    on this name alone: otherwise another model in the file would rename, and so restart, this one.
    """
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in model.name)
    if plain != model.name:
        plain += "-" + hashlib.sha256(model.name.encode()).hexdigest()[:6]
    return f"replica-{plain}"


def scaled_models(settings: Settings) -> list[ModelSettings]:
    """Return the models whose number of replicas may change."""
    return [m for m in settings.models.values() if m.replicas.is_scaled]


def is_scaled(settings: Settings) -> bool:
    """Return whether anything may be scaled."""
    return bool(scaled_models(settings)) or settings.ingress.replicas.is_scaled


def rules_of(settings: Settings) -> FleetRules:
    """Return the rules of all that may be scaled. GPUs of models that are not scaled are subtracted from ``max_gpus`` first."""
    scaled = scaled_models(settings)
    max_gpus: float | None = settings.autoscaling.max_gpus
    if max_gpus is not None:
        max_gpus -= sum(m.replicas.min * m.gpu_share() for m in settings.models.values() if m not in scaled)
    return FleetRules(
        models={m.name: _rules_of_model(m) for m in scaled},
        target_streams=settings.ingress.replicas.target_streams,
        max_gpus=max_gpus,
        max_asleep_gib=settings.autoscaling.max_asleep_gib,
    )


def _rules_of_model(model: ModelSettings) -> ScalingRules:
    replicas = model.replicas
    return ScalingRules(
        slo=Slo(ttft_s=replicas.ttft_slo_s, itl_s=replicas.itl_slo_s),
        utilization=replicas.utilization,
        headroom=replicas.headroom,
        priority=replicas.priority,
        gpus_per_replica=model.gpu_share(),
        pools=None if model.pools is None else PoolSizes(*model.pools.sizes(replicas.max)),
        sleeps=model.sleep is not None,
    )
