"""`serve-app up` declares the machine's resources to Ray when it starts it."""

import os
from typing import Any

import pytest
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from serve_app.cli.cluster import _gpus_for_ray, _num_cpus, simulated_gpus
from serve_app.config import parse_settings

SIMULATED = {"model": "/m", "simulated": {"profile": "a10g-llama-8b"}, "gpus_per_replica": 2, "replicas": {"min": 1, "max": 3}}
SURGING = SIMULATED | {"replicas": {"min": 1, "max": 3, "surge": 1}}
REAL = {"model": "/m", "device": "cuda", "gpus_per_replica": 1}


@pytest.mark.parametrize(
    ("models", "autoscaling", "told"),
    [
        pytest.param({"a": SIMULATED, "b": SIMULATED}, {}, 12, id="as-many-as-all-may-hold"),
        pytest.param({"a": SURGING, "b": SIMULATED}, {}, 14, id="as-many-as-an-update-with-surge-holds"),
        pytest.param({"a": SURGING, "b": SIMULATED}, {"max_gpus": 5}, 5, id="as-many-as-they-share"),
        pytest.param({"a": SIMULATED, "b": {"model": "/m"}}, {}, 6, id="beside-a-model-on-cpu"),
        pytest.param({"a": SIMULATED, "b": REAL}, {}, None, id="a-real-model-needs-real-ones"),
        pytest.param({"a": {"model": "/m"}}, {}, None, id="nobody-holds-any"),
    ],
)
def test_gpus_are_simulated_where_all_models_that_hold_some_are(
    models: dict[str, Any], autoscaling: dict[str, Any], told: int | None
) -> None:
    assert simulated_gpus(parse_settings({"models": models, "autoscaling": autoscaling})) == told


@pytest.mark.parametrize("visible", ["", "0"])
def test_ray_takes_simulated_gpus_whatever_real_ones_the_environment_allows(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = _gpus_for_ray(parse_settings({"models": {"a": SIMULATED}}))
    spec = ResourceAndLabelSpec(1, told, 1 << 30, 1 << 30, {}, {})
    assert spec.resolve(is_head=True, node_ip_address="127.0.0.1").num_gpus == 6


def test_real_gpus_stay_those_that_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (_gpus_for_ray(parse_settings({"models": {"a": REAL}})), os.environ["CUDA_VISIBLE_DEVICES"]) == (None, "0")


def test_ray_is_told_of_cpus_for_each_model_s_surge_and_for_two_generations_of_ingresses() -> None:
    models = {
        "surging": {"model": "/m", "num_cpus": 30, "replicas": {"max": 2}},
        "spare": {"model": "/m", "num_cpus": 40, "replicas": {"max": 2, "surge": 0}},
        "simulated": {**SIMULATED, "num_cpus": 5},
    }
    settings = parse_settings({"models": models, "ingress": {"num_cpus": 2, "replicas": {"max": 3}}})
    assert _num_cpus(settings) == (2 + 1) * 30 + 2 * 40 + 3 * 5 + 2 * 3 * 2 + 1
