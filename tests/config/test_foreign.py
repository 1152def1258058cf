"""Names of other systems are refused with the key that is meant here."""

from typing import Any

import pytest

from serve_app.config import Settings, problems
from serve_app.config.foreign import FOREIGN
from serve_app.config.places import sections
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
        ("rpm", "quotas are a tenant's: set limits.requests_per_minute"),
        ("api_base", "remove it: serve-app starts its engines itself, and forwards to no other service"),
        ("--max-model-len", "it is an argument of vLLM's engine: put it under models.NAME.engine_args"),
        ("data_parallel_backend", "it is an argument of vLLM's engine"),
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
    assert own & FOREIGN.keys() == set()


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
