"""A model whose engine sleeps is checked: which engines can, and how many share a GPU."""

import math
from typing import Any

import pytest

from serve_app.autoscaling.rules import rules_of
from serve_app.cli.cluster import simulated_gpus
from serve_app.config import ModelSettings, parse_settings
from tests.config.helpers import LLAMA, refusal

ON_GPU = LLAMA | {"device": "cuda", "gpus_per_replica": 1, "sleep": {"replicas_per_gpu": 3}}
SIMULATED = ON_GPU | {
    "device": "cpu",
    "simulated": {"profile": "a10g-llama-8b"},
    "required": False,
    "replicas": {"min": 0, "max": 1},
}


def model(**keys: Any) -> ModelSettings:
    return parse_settings({"models": {"m": ON_GPU | keys}}).models["m"]


@pytest.mark.parametrize(("sharing", "share"), [(1, 1), (2, 0.5), (3, 0.3333), (64, 0.0156)])
def test_so_many_replicas_share_a_gpu_of_ray_s(sharing: int, share: float) -> None:
    assert model(sleep={"replicas_per_gpu": sharing}).gpu_share() == share


def test_six_models_that_share_by_threes_fit_two_gpus_together() -> None:
    settings = parse_settings({"models": dict.fromkeys("abcdef", SIMULATED), "autoscaling": {"max_gpus": 2}})
    rules = rules_of(settings)
    assert sum(of.gpus_per_replica for of in rules.models.values()) <= 2
    assert all(of.sleeps for of in rules.models.values())
    assert math.ceil(6 * 0.3333) == simulated_gpus(parse_settings({"models": dict.fromkeys("abcdef", SIMULATED)}))


def test_models_that_sleep_may_have_a_least_number_that_their_gpus_hold_only_together() -> None:
    models = {name: SIMULATED | {"replicas": {"min": 1, "max": 1}} for name in "abc"}
    assert len(parse_settings({"models": models, "autoscaling": {"max_gpus": 1}}).models) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sleep": {"level": 3}}, "sleep.level: is 3, but should be 1 or 2"),
        ({"sleep": {"after_s": 0}}, "sleep.after_s: is 0, but should be greater than 0"),
        ({"sleep": {"replicas_per_gpu": 65}}, "sleep.replicas_per_gpu: is 65, but should be less than or equal to 64"),
        (
            {"device": "cpu", "gpus_per_replica": 0, "sleep": {}},
            "sleep: is set and device is cpu: an engine on a CPU cannot sleep; remove it, set device: cuda, or simulate an accelerator",
        ),
        (
            {"replicas": {"max": 2}},
            "sleep: is set and replicas.max is 2: a model that sleeps has one replica; set replicas.max: 1, or remove sleep",
        ),
        (
            {"kv": {"transfer": "nixl"}},
            "sleep: is set and kv.transfer is 'nixl': other replicas would read memory that a sleep has freed; "
            "remove it, or set kv.transfer: none",
        ),
        (
            {"gpus_per_replica": 16, "nodes": 2, "sleep": {}},
            "sleep: is set and nodes is 2; remove it: an engine over several nodes does not sleep",
        ),
        (
            {"sleep": {"level": 2}, "adapters": {"legal": {"path": "/a"}}},
            "sleep.level: is 2 and adapters is not empty: a wake-up would load the model without its adapters; set sleep.level: 1",
        ),
        (
            {"gpus_per_replica": 2},
            "sleep.replicas_per_gpu: is 3 and gpus_per_replica is 2: Ray divides one GPU only; set gpus_per_replica: 1, or remove it",
        ),
    ],
)
def test_what_cannot_sleep_is_refused_with_the_way_out(keys: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": ON_GPU | keys}) == f"models.m.{said}"


def test_a_canary_does_not_sleep() -> None:
    models = {"m": LLAMA, "next": ON_GPU | {"canary": {"of": "m"}}}
    said = "models.next.sleep: is set, and a canary that sleeps gets no request; remove it from the canary"
    assert refusal(models=models) == said


def test_the_host_memory_of_sleeping_engines_is_not_negative() -> None:
    said = "autoscaling.max_asleep_gib: is -1, but should be greater than or equal to 0"
    assert refusal(autoscaling={"max_asleep_gib": -1}) == said
