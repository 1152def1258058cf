"""Names of other systems are refused with the key that is meant here."""

import ast
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import Settings, problems
from serve_app.config.foreign import FOREIGN, foreign_hint
from serve_app.config.places import sections
from serve_app.config.vllm_arguments import misplaced_arguments
from serve_app.config.vllm_source import engine_arg_types, frontend_arg_types, listener_arg_types
from tests.config.helpers import LLAMA

GPUS = "set models.NAME.gpus_per_replica, the GPUs of one engine and its tensor parallel size"
REPLICAS = "for engines set models.NAME.replicas: {min: 1, max: 2}, for ingresses ingress.replicas"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_gpus", GPUS),
        ("gpus", GPUS),
        ("tensor_parallel_size", GPUS),
        ("--tensor-parallel-size", GPUS),
        ("num_replicas", REPLICAS),
        ("autoscaling_config", REPLICAS),
        ("nodeSelector", "pods are the Helm chart's: set it in its values, under modelPods, ingressPods or head; "),
        ("served_model_name", "the key under models is the name; more names go into models.NAME.aliases"),
        ("task", "set models.NAME.engine_args.runner: pooling for embeddings"),
        ("rpm", "quotas are a tenant's: set limits.requests_per_minute"),
        ("api_base", "remove it: serve-app starts its engines itself, and forwards to no other service"),
        ("--max-model-len", "it is an argument of vLLM's engine: put it under models.NAME.engine_args"),
        ("data_parallel_backend", "each engine is a replica of the fleet; raise replicas.min and replicas.max"),
        ("allowed_origins", "set ingress.cors_origins"),
        ("cors", "set ingress.cors_origins"),
        ("lora", "set models.NAME.adapters: {ADAPTER: {path: /FOLDER}}"),
        ("uvicorn_log_level", "remove it: it concerns vLLM's own HTTP listener"),
        ("max_replicas_per_node", "set models.NAME.replicas_per_node"),
        ("livenessProbe", "health says when an engine counts as hung, timeouts.engine_start_s how long its start may take"),
        ("envFrom", "pods are the Helm chart's: set it in its values, under modelPods.extra"),
        ("limits", "set num_cpus and gpus_per_replica; the pod's own are the Helm chart's: modelPods.resources"),
        ("modelURL", "set models.NAME.model to the weights"),
        ("requestGPU", GPUS),
        ("requestGPUType", "models.NAME.resources binds replicas to nodes"),
        ("numGPUBlocksOverride", "it is an argument of vLLM's engine: put it under models.NAME.engine_args"),
        ("storageUri", "set models.NAME.model to a folder; on Kubernetes the Helm chart's weights.downloads fetches it"),
        ("max_parallel_requests", "quotas are a tenant's: set limits.max_concurrent in ingress.tenants_file"),
        ("routing_strategy", "set models.NAME.routing.by: prefix or load"),
        ("kv_transfer_config", "set models.NAME.kv.transfer: nixl to move running requests with their KV; "),
        ("ec_transfer_config", "remove it: requests name no other engine here"),
    ],
)
@pytest.mark.parametrize("place", ["", "ingress", "models.m"])
def test_a_key_of_another_system_is_refused_with_our_own_wherever_it_stands(key: str, meant: str, place: str) -> None:
    places: dict[str, dict[str, Any]] = {
        "": {"models": {"m": LLAMA}, key: 1},
        "ingress": {"models": {"m": LLAMA}, "ingress": {key: 1}},
        "models.m": {"models": {"m": LLAMA | {key: 1}}},
    }
    (problem,) = problems(places[place])
    assert str(problem).startswith(f"{place}.{key}: unknown key; {meant}".removeprefix("."))


def test_no_key_of_ours_counts_as_foreign() -> None:
    own = {key for _, section in sections(Settings) for key in section.model_fields}
    assert own & FOREIGN.keys() == {"requests"}, "a canary's requests; elsewhere it is Kubernetes's, and in a canary it is known"
    assert problems({"models": {"m": LLAMA, "c": LLAMA | {"canary": {"of": "m", "requests": 30}}}}) == []


WITHOUT_A_ROW = {
    "logging_config": "serve_app.config.vllm_arguments has it as vLLM's",
    "log_level": "serve_app.config.vllm_arguments has it as vLLM's",
    "middlewares": "a fleet loads no code of others into the ingress; nearest is vLLM's middleware, which is refused by its name",
    "location": "too general a word: in ten sections it could mean ten things",
    "encoding": "too general a word",
    "logs_dir": "Ray's session folder has the logs, and no key moves them",
    "enable_access_log": "no key switches the access log",
    "additional_log_standard_attrs": "no key adds fields to log lines",
    "experimental_configs": "a bag of anything",
    "callback_config": "no key runs code of others around an engine's start",
    "server_cls": "no key replaces the deployments",
    **dict.fromkeys(
        (
            *("request_router_kwargs", "request_routing_stats_period_s", "request_routing_stats_timeout_s"),
            *("initial_backoff_s", "backoff_multiplier", "max_backoff_s"),
        ),
        "only below request_router_config, which has a row",
    ),
}
"""Fields of Ray Serve that get no sentence of ours, and why."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models
def test_every_field_of_ray_serves_configuration_has_a_row_or_a_reason_for_none() -> None:
    from ray.serve import config, schema

    classes = [schema.DeploymentSchema, schema.ServeApplicationSchema, schema.ServeDeploySchema, schema.RayActorOptionsSchema]
    classes += [config.AutoscalingConfig, config.HTTPOptions, config.RequestRouterConfig, schema.LoggingConfig]
    assert_known({field for each in classes for field in each.model_fields})


def test_every_field_of_rays_llm_configuration_has_a_row_or_a_reason_for_none() -> None:
    import ray

    file = Path(ray.__file__).parent / "llm/_internal/serve/core/configs/llm_config.py"  # whose import would load vLLM
    tree = ast.parse(file.read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LLMConfig")
    fields = {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert {"model_loading_config", "engine_kwargs"} <= fields
    assert_known({field for field in fields if not field.startswith("_")})


def assert_known(fields: set[str]) -> None:
    own = {key for _, section in sections(Settings) for key in section.model_fields}
    assert sorted(f for f in fields - own - WITHOUT_A_ROW.keys() if not foreign_hint(f)) == []


def test_every_argument_of_vllm_has_a_sentence_wherever_it_stands() -> None:
    known = misplaced_arguments()
    assert {"max_model_len", "chat_template", "uvicorn_log_level", "tensor_parallel_size"} <= known.keys()
    everything = {*engine_arg_types(), *frontend_arg_types(), *listener_arg_types()}
    assert everything - known.keys() == {"host", "port"}, "keys of several sections here, which the hint names"


@pytest.mark.parametrize(("path", "values"), [("ingress.replicas", {"ingress": {"replicas": 2}}), ("models.m.replicas", {})])
def test_a_number_of_replicas_is_refused_with_the_mapping_to_write(path: str, values: dict[str, Any]) -> None:
    model = LLAMA | ({} if values else {"replicas": 2})
    (problem,) = problems({"models": {"m": model}} | values)
    assert str(problem) == f"{path}: is 2, but should be a mapping; write {{min: 2, max: 2}}"


def test_an_adapter_that_is_a_path_alone_is_refused_with_the_mapping_to_write() -> None:
    (problem,) = problems({"models": {"m": LLAMA | {"adapters": {"a": "s3://bucket/a"}}}})
    hint = "write {path: FOLDER}, with the absolute path of the adapter's folder"
    assert str(problem) == f"models.m.adapters.a: is 's3://bucket/a', but should be a mapping; {hint}"


def test_among_arguments_of_vllm_a_name_of_another_system_is_not_taken_for_a_misspelt_one() -> None:
    (problem,) = problems({"models": {"m": LLAMA | {"engine_args": {"num_gpus": 2}}}})
    assert str(problem) == f"models.m.engine_args.num_gpus: unknown argument; {GPUS}"


def test_resources_of_a_pod_are_not_those_of_ray() -> None:
    (problem,) = problems({"models": {"m": LLAMA | {"resources": {"limits": {"nvidia.com/gpu": 1}}}}})
    assert str(problem) == (
        "models.m.resources.limits: is a key of pods, but this section holds custom Ray resources; "
        "set num_cpus and gpus_per_replica; the pod's own are the Helm chart's: modelPods.resources"
    )


@pytest.mark.parametrize("path", ["s3://bucket/lora", "s3:/bucket/lora", "org/lora", "hf:org/lora"])
def test_an_adapter_is_a_folder_and_shown_as_it_was_written(path: str) -> None:
    (problem,) = problems({"models": {"m": LLAMA | {"adapters": {"a": {"path": path}}}}})
    assert str(problem) == (
        f"models.m.adapters.a.path: is {path!r}, not the absolute path of a folder; fetch it, and give the folder's absolute path; "
        "on Kubernetes the Helm chart's weights.downloads fetches it, from s3:// or hf:"
    )


def test_a_url_in_place_of_a_file_is_shown_as_it_was_written() -> None:
    (problem,) = problems({"models": {"m": LLAMA}, "ingress": {"tenants_file": "https://host/tenants.yaml"}})
    assert str(problem) == (
        "ingress.tenants_file: is 'https://host/tenants.yaml', a URL, but should be a path of this machine; copy the file there; "
        "write it from /"
    )
