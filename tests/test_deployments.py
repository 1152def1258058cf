from typing import Any

import pytest

from serve_app.config import parse_settings
from serve_app.deployments import ScalingRule, replica_deployment, scaling_rules

TINY: dict[str, Any] = {"name": "tiny", "model": "/models/tiny"}


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
def test_deployments_of_models_whose_names_look_alike_are_told_apart(name: str, deployment: str) -> None:
    (model,) = parse_settings({"models": [TINY | {"name": name}]}).models
    assert replica_deployment(model) == deployment


def test_there_is_a_rule_for_each_deployment_that_may_scale() -> None:
    replicas = {"min": 0, "max": 4, "target_outstanding_tokens": 900}
    big = {"name": "big", "model": "org/big", "replicas": replicas, "required": False}
    ingress = {"replicas": {"min": 1, "max": 3, "target_streams": 50}}
    assert scaling_rules(parse_settings({"models": [TINY, big], "ingress": ingress})) == {
        "replica-big": ScalingRule("outstanding_tokens/big", target=900, min=0, max=4),
        "ingress": ScalingRule("streams", target=50, min=1, max=3),
    }
    assert scaling_rules(parse_settings({"models": [TINY]})) == {}
