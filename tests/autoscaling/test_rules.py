from typing import Any

import pytest

from serve_app.autoscaling.capacity import Slo
from serve_app.autoscaling.decision import ScalingRules
from serve_app.autoscaling.fleet import FleetRules
from serve_app.autoscaling.rules import is_scaled, replica_deployment, rules_of
from serve_app.config import parse_settings

TINY: dict[str, Any] = {"model": "/models/tiny"}


@pytest.mark.parametrize(
    ("name", "deployment"),
    [
        ("tiny", "replica-tiny"),
        ("tiny_2-b", "replica-tiny_2-b"),
        ("a/b", "replica-a-b-c14cdd"),
        ("a:b", "replica-a-b-6783a3"),
        ("a-b", "replica-a-b"),
    ],
)
def test_deployments_of_models_whose_names_look_alike_have_different_names(name: str, deployment: str) -> None:
    (model,) = parse_settings({"models": {name: TINY}}).models.values()
    assert replica_deployment(model) == deployment


def test_there_is_a_rule_for_each_model_that_may_scale() -> None:
    replicas = {"min": 0, "max": 4, "ttft_slo_s": 1.5, "itl_slo_s": 0.05, "utilization": 0.7, "headroom": 0.5, "priority": 2}
    big = {"model": "org/big", "replicas": replicas, "required": False}
    ingress = {"replicas": {"min": 1, "max": 3, "target_streams": 50}}
    settings = parse_settings({"models": {"tiny": TINY, "big": big}, "ingress": ingress})
    rules = ScalingRules(slo=Slo(ttft_s=1.5, itl_s=0.05), utilization=0.7, headroom=0.5, priority=2)
    assert rules_of(settings) == FleetRules(models={"big": rules}, target_streams=50)
    assert is_scaled(settings)
    assert not is_scaled(parse_settings({"models": {"tiny": TINY}}))


def test_models_that_do_not_scale_hold_their_gpus_beforehand() -> None:
    fixed = {"model": "org/fixed", "device": "cuda", "gpus_per_replica": 2, "replicas": {"min": 3, "max": 3}}
    big = {"model": "org/big", "device": "cuda", "gpus_per_replica": 4, "replicas": {"min": 1, "max": 4}}
    rules = rules_of(parse_settings({"models": {"fixed": fixed, "big": big}, "autoscaling": {"max_gpus": 16}}))
    assert rules.max_gpus == 10
    assert rules.models["big"].gpus_per_replica == 4
