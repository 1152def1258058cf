"""``build(args)`` composes the Serve application: the import path for RayService, ``serve run`` and ``serve-app up``. Decides nothing."""

from collections.abc import Mapping
from typing import Any

from ray import serve

from serve_app.autoscaling.rules import INGRESS, is_scaled, replica_deployment, scaled_models
from serve_app.config import ModelSettings, Settings, parse_settings
from serve_app.config.timeouts import serve_shutdown_s
from serve_app.engine_args import INGRESS_ENVIRONMENT, PROCESS_ENVIRONMENT
from serve_app.ingress.deployment import Ingress
from serve_app.replica.deployment import Replica


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for a configuration given as a mapping.

    Raises:
        ConfigError: The first problem of the configuration.
    """
    settings = parse_settings(args)
    values = settings.model_dump(mode="json", exclude={"ui"})  # a change of the pages must not redeploy the fleet
    of_replicas = {**values, "tracing": None}  # nor a change of tracing, which no replica reads, the models
    replicas = [_replica(settings, m).bind(of_replicas, m.name) for m in settings.models.values()]
    return _ingress(settings).bind(values, *replicas)


def _common(settings: Settings, num_cpus: float, environment: Mapping[str, str]) -> dict[str, Any]:
    logging_config = {"logging_config": {"encoding": "JSON"}} if settings.logs.format == "json" else {}
    return {
        **logging_config,
        # `__del__` is the drain; the loop before it only delays it.
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": serve_shutdown_s(settings),
        "health_check_period_s": 5,
        "max_ongoing_requests": 100,
        "ray_actor_options": {"num_cpus": num_cpus, "runtime_env": {"env_vars": dict(environment)}},
    }


def _scaling(minimum: int, maximum: int, *, reports: bool = False) -> dict[str, Any]:
    if minimum == maximum and minimum > 0 and not reports:
        return {"num_replicas": minimum}
    return _bounds(minimum, maximum)


def _bounds(minimum: int, maximum: int, initial: int | None = None) -> dict[str, Any]:
    return {
        "autoscaling_config": {
            "min_replicas": minimum,
            "max_replicas": maximum,
            # Serve makes this number the target at each deployment that differs from the one before; None keeps the running replicas. So
            # `replicas.initial` is not given to Serve: the autoscaling policy asks for it when it sees a model for the first time.
            "initial_replicas": initial,
            # Only the policy delays (autoscaling/model_autoscaler.py): Serve would add its own delays.
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "metrics_interval_s": 1,
            "look_back_period_s": 2,
        }
    }


def bounds_entry(model: ModelSettings, *, minimum: int, initial: int | None = None) -> dict[str, Any]:
    """Return the entry of a scaled model's deployment among ``deployments`` of Serve's config: its least and most replicas.

    Each scaled model has an entry from the beginning. A changed entry changes no running replica, and Serve keeps it in its checkpoint. A
    new entry replaces all replicas of the application, because the entries are part of the application's version.

    Args:
        initial: The target that Serve sets when it gets the entry, if the deployment is new or the entry differs from the one before.
            None leaves the target as it is, within the bounds.
    """
    return {"name": replica_deployment(model), **_bounds(minimum, model.replicas.max, initial)}


def first_entries(settings: Settings) -> list[dict[str, Any]]:
    """Return the entries of all scaled models with the bounds of the configuration."""
    return [bounds_entry(m, minimum=m.replicas.min) for m in scaled_models(settings)]


def _replica(settings: Settings, model: ModelSettings) -> Any:
    options = _common(settings, model.num_cpus, PROCESS_ENVIRONMENT)
    options["ray_actor_options"]["resources"] = dict(model.resources)
    if model.gpus_per_replica:
        # One actor holds all GPUs of a replica on a node, so that they are in one node; the engine's workers inherit them.
        # Models that sleep reserve a part of a GPU; Ray then gives some of them the same one.
        options["ray_actor_options"]["num_gpus"] = model.gpu_share() if model.nodes == 1 else model.gpus_per_node()
    if model.nodes > 1:
        # Ray reserves all nodes or none, and Serve runs the replica's actor in the first bundle.
        bundle = {"CPU": model.num_cpus, "GPU": model.gpus_per_node(), **model.resources}
        options["placement_group_bundles"] = [bundle] * model.nodes
        options["placement_group_strategy"] = "STRICT_SPREAD"
    if (per_node := model.per_node()) is not None:
        options["max_replicas_per_node"] = per_node
    # Per cent, rounded up to whole replicas: 1 means one replica of up to 100.
    options["max_surge_percent"] = model.surge()
    # For updates without surge: Serve rounds this share of the replicas down, but at least to one. Its default of 0.2 would replace two of
    # ten at once.
    options["rolling_update_percentage"] = 1e-9
    scaling = _scaling(model.replicas.min, model.replicas.max)
    return serve.deployment(Replica, name=replica_deployment(model), **options, **scaling)


def _ingress(settings: Settings) -> Any:
    replicas = settings.ingress.replicas
    # vLLM refuses a request with more choices than may wait at once. Here the choices would be refused one by one, and streams would wait.
    most_choices = str(max(128, settings.ingress.max_waiting_requests))
    options = _common(settings, settings.ingress.num_cpus, {**INGRESS_ENVIRONMENT, "VLLM_MAX_N_SEQUENCES": most_choices})
    options["max_surge_percent"] = 100  # a new ingress listens before an old one stops, so that one always listens
    if settings.ingress.resources:  # a node with these resources takes one ingress: two would share its port
        options["ray_actor_options"]["resources"] = dict(settings.ingress.resources)
        options["max_replicas_per_node"] = 1
    # Serve collects statistics only from deployments that it autoscales, and ingresses report the statistics of models.
    reports = is_scaled(settings)
    return serve.deployment(Ingress, name=INGRESS, **options, **_scaling(replicas.min, replicas.max, reports=reports))


def autoscaling_policy(settings: Settings) -> dict[str, Any] | None:
    """Return the application's ``autoscaling_policy`` for Serve's config; None when nothing may scale."""
    if not is_scaled(settings):
        return None
    arguments = {"settings": settings.model_dump(mode="json", exclude={"ui"})}
    return {"policy_function": "serve_app.autoscaling.policy:DemandPolicy", "policy_kwargs": arguments}


def serve_config(settings: Settings) -> dict[str, Any]:
    """Return the whole Serve config (``serve deploy``'s schema; RayService's ``serveConfigV2``)."""
    application: dict[str, Any] = {
        "name": settings.name,
        "route_prefix": None,
        "import_path": "serve_app.application:build",
        "args": settings.model_dump(mode="json", exclude={"ui"}),
    }
    if (policy := autoscaling_policy(settings)) is not None:
        application["autoscaling_policy"] = policy
    if entries := first_entries(settings):
        application["deployments"] = entries
    return {"proxy_location": "Disabled", "applications": [application]}
