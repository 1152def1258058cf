from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID
from ray.serve._private.deployment_state import DeploymentState, DeploymentTargetState

from serve_app.application import autoscaling_policy, build, serve_config
from serve_app.autoscaling.policy import DemandPolicy
from serve_app.config import parse_settings
from serve_app.engine_args import INGRESS_ENVIRONMENT, PROCESS_ENVIRONMENT
from serve_app.errors import ConfigError

TINY = {"model": "/models/tiny"}
SCALED = {
    "model": "org/big",
    "device": "cuda",
    "gpus_per_replica": 2,
    "replicas": {"min": 0, "max": 4},
    "required": False,
}
COMMON = {
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 71.0,
    "health_check_period_s": 5.0,
    "max_ongoing_requests": 100,
}


def deployments(values: dict[str, Any]) -> dict[str, Any]:
    """Return name -> deployment of the whole bound application."""
    root = build(values)
    bound = [root, *(a for a in root._bound_deployment.init_args if hasattr(a, "_bound_deployment"))]
    return {b._bound_deployment.name: b._bound_deployment for b in bound}


def options(deployment: Any) -> dict[str, Any]:
    config = deployment._deployment_config
    return {
        name: getattr(config, name)
        for name in (
            "graceful_shutdown_wait_loop_s",
            "graceful_shutdown_timeout_s",
            "health_check_period_s",
            "max_ongoing_requests",
        )
    }


def test_every_deployment_drains_longer_than_its_streams_may() -> None:
    built = deployments({"models": {"tiny": TINY}, "timeouts": {"drain_s": 60}})
    assert {name: options(d) for name, d in built.items()} == {"ingress": COMMON, "replica-tiny": COMMON}


def test_a_replicas_resources_are_its_models() -> None:
    model = {**TINY, "num_cpus": 0.5, "resources": {"zone-a": 1}}
    built = deployments({"models": {"tiny": model, "big": SCALED}, "ingress": {"num_cpus": 2}})
    environment = {"runtime_env": {"env_vars": PROCESS_ENVIRONMENT}}
    without_device = {"runtime_env": {"env_vars": {**INGRESS_ENVIRONMENT, "VLLM_MAX_N_SEQUENCES": "1000"}}}
    assert {name: d.ray_actor_options for name, d in built.items()} == {
        "ingress": {"num_cpus": 2.0, **without_device},
        "replica-tiny": {"num_cpus": 0.5, "resources": {"zone-a": 1.0}, **environment},
        "replica-big": {"num_cpus": 1.0, "num_gpus": 2, "resources": {}, **environment},
    }


@pytest.mark.parametrize("device", [{"device": "cuda"}, {"simulated": {"profile": "a10g-llama-8b"}}])
def test_a_replica_over_two_nodes_reserves_both_or_none_and_its_actor_has_the_first(device: dict[str, Any]) -> None:
    model = {"model": "org/big", "gpus_per_replica": 16, "nodes": 2, "num_cpus": 4, "resources": {"rack-7": 1}, **device}
    built = deployments({"models": {"wide": model}})["replica-wide"]
    config = built._replica_config
    assert config.placement_group_bundles == [{"CPU": 4.0, "GPU": 8, "rack-7": 1.0}] * 2
    assert (config.placement_group_strategy, config.max_replicas_per_node) == ("STRICT_SPREAD", None)
    assert {k: built.ray_actor_options[k] for k in ("num_cpus", "num_gpus", "resources")} == {
        "num_cpus": 4.0,
        "num_gpus": 8,
        "resources": {"rack-7": 1.0},
    }


def test_only_what_may_scale_is_autoscaled_and_never_by_serves_own_delays() -> None:
    built = deployments({"models": {"tiny": {**TINY, "replicas": {"min": 2, "max": 2}}, "big": SCALED}})
    fixed, scaled = built["replica-tiny"]._deployment_config, built["replica-big"]._deployment_config
    assert (fixed.num_replicas, fixed.autoscaling_config) == (2, None)
    scaling = scaled.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (0, None, 4)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0)
    assert (scaling.metrics_interval_s, scaling.look_back_period_s) == (1, 2)


def target(running: int, *versions: Any) -> int:
    """Return Serve's target after these versions of a deployment; ``running``: replicas of the first version when the others come."""
    state = DeploymentAutoscalingState(DeploymentID("d", "app"))
    number = state.register(versions[0], DeploymentTargetState.default().target_num_replicas)
    for version in versions[1:]:
        number = state.register(version, running)
    return int(number)


@pytest.mark.parametrize("name", ["ingress", "replica-big"])
def test_an_upgrade_keeps_the_replicas_that_run_and_a_first_deployment_has_the_minimum(name: str) -> None:
    ingress = {"replicas": {"min": 2, "max": 8}}
    model = {**SCALED, "replicas": {"min": 2, "max": 8, "initial": 5}}
    config = deployments({"models": {"big": model}, "ingress": ingress})[name]._deployment_config
    first, second = (
        SimpleNamespace(
            deployment_config=config,
            config_changed=lambda other: True,
            target_capacity=None,
            target_capacity_direction=None,
            version=version,
        )
        for version in "12"
    )
    assert target(0, first) == 2
    assert target(7, first, second) == 7


def test_a_new_ingress_listens_before_an_old_one_stops_and_gpus_are_not_asked_for_twice() -> None:
    spare = {**TINY, "replicas": {"surge": 0}}
    simulated = {**TINY, "simulated": {"profile": "a10g-llama-8b"}}
    holding = {**simulated, "gpus_per_replica": 1}
    surging = {**holding, "replicas": {"surge": 1}}
    models = {"big": SCALED, "tiny": TINY, "spare": spare, "simulated": simulated, "holding": holding, "surging": surging}
    built = deployments({"models": models})
    surge = {name.removeprefix("replica-"): d._deployment_config.max_surge_percent for name, d in built.items()}
    assert surge == {"ingress": 100, "big": 0, "tiny": 1, "spare": 0, "simulated": 1, "holding": 0, "surging": 1}


def test_an_update_without_surge_stops_one_replica_at_a_time_however_many_there_are() -> None:
    config = deployments({"models": {"big": SCALED}})["replica-big"]._deployment_config
    target = SimpleNamespace(target_num_replicas=50)
    state: Any = SimpleNamespace(
        _deployed_info=SimpleNamespace(deployment_config=config), _target_state=target, _is_gang_deployment=False
    )
    assert DeploymentState._rollout_size(state) == 1


def test_ingresses_report_for_a_model_that_may_scale_also_where_they_may_not() -> None:
    """Serve collects statistics only of deployments that it autoscales."""
    built = deployments({"models": {"big": SCALED}, "ingress": {"replicas": {"min": 2, "max": 2}}})
    scaling = built["ingress"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 2)


def test_a_gpu_replica_has_its_node_to_itself_unless_configured_otherwise() -> None:
    built = deployments({"models": {"tiny": TINY, "big": SCALED}})
    assert {name: d._replica_config.max_replicas_per_node for name, d in built.items()} == {
        "ingress": None,
        "replica-tiny": None,
        "replica-big": 1,
    }


def test_an_ingress_with_a_resource_has_the_nodes_that_offer_it_to_itself() -> None:
    ingress = deployments({"models": {"tiny": TINY}, "ingress": {"resources": {"serve_app_ingress": 1}}})["ingress"]
    assert ingress.ray_actor_options["resources"] == {"serve_app_ingress": 1.0}
    assert ingress._replica_config.max_replicas_per_node == 1


def test_each_deployment_gets_the_whole_configuration_and_a_replica_its_models_name() -> None:
    root = build({"models": {"tiny": TINY}})._bound_deployment
    (replica,) = root.init_args[1:]
    whole = parse_settings({"models": {"tiny": TINY}}).model_dump(mode="json", exclude={"ui"})
    assert root.init_args[0] == whole
    assert replica._bound_deployment.init_args == (whole, "tiny")


def test_a_wrong_configuration_builds_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^models\.tiny\.modle: unknown key; did you mean model\?"):
        build({"models": {"tiny": {**TINY, "modle": "x"}}})


def test_the_serve_config_is_the_whole_of_what_a_cluster_needs() -> None:
    settings = parse_settings({"name": "shop", "models": {"tiny": TINY}})
    assert serve_config(settings) == {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "shop",
                "route_prefix": None,
                "import_path": "serve_app.application:build",
                "args": settings.model_dump(mode="json", exclude={"ui"}),
            }
        ],
    }
    assert parse_settings(settings.model_dump(mode="json")) == settings


def test_the_policy_gets_the_configuration_where_something_may_scale() -> None:
    settings = parse_settings({"models": {"tiny": TINY, "big": SCALED}})
    policy = {
        "policy_function": "serve_app.autoscaling.policy:DemandPolicy",
        "policy_kwargs": {"settings": settings.model_dump(mode="json", exclude={"ui"})},
    }
    assert autoscaling_policy(settings) == policy
    assert serve_config(settings)["applications"][0]["autoscaling_policy"] == policy
    assert DemandPolicy(**policy["policy_kwargs"])({}) == ({}, {})  # type: ignore[arg-type]
    assert autoscaling_policy(parse_settings({"models": {"tiny": TINY}})) is None
