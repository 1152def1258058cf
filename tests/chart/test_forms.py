"""The schema refuses values of a wrong form by their path."""

from typing import Any

import pytest

from tests.chart.places import HUB, S3
from tests.chart.render import Refused, at, render


@pytest.mark.parametrize(
    "path", ["serviceAcounts", "head.resorces", "config.ingress.prot", "config.models.m.pods.gpu", "image.tags"]
)
def test_a_misspelt_key_is_refused(path: str) -> None:
    with pytest.raises(Refused, match="additional properties"):
        render(at(path, "x"))


@pytest.mark.parametrize("path", ["apiKeys.enabled", "networkPolicies.enabled", "head.tmpSize", "weights", "config"])
def test_a_null_that_would_drop_a_default_is_refused(path: str) -> None:
    with pytest.raises(Refused, match=f"missing property '{path.rpartition('.')[2]}'"):
        render(at(path, None))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("head.resources.requests.cpu", -1),
        ("head.resources.requests.cpu", "1Gi"),
        ("head.resources.limits.memory", "1.2.3Gi"),
        ("head.resources.limits.memory", "500m"),
        ("modelPods.shmSize", "1 Gi"),
        ("networkPolicies.operatorNamespace", ""),
        ("networkPolicies.prometheusNamespace", ""),
        ("networkPolicies.weightsCidrs", ["10.0.0.1"]),
        ("networkPolicies.clients", [{"ipBlock": {"cidr": "10.0.0.0"}}]),
        ("monitoring.grafanaUrl", "grafana.example.com"),
        ("apiKeys.existingSecret", "serve-app/api-keys"),
        ("weights.existingClaim", "Weights"),
        ("weights.huggingFaceTokenSecret", "arn:aws:secretsmanager:eu-central-1:1:secret:a"),
        ("gcsFaultTolerance.existingSecretKey", ""),
        ("weights.activeDeadlineSeconds", 0),
        ("weights.s3Endpoint", "minio:9000"),
        ("head.extraEnv", [{"value": "x"}]),
        ("config.models.m", {"replicas": {"min": 0}}),
        ("config.models.m", {"replicas": {"min": 0}, "required": True}),
        ("weights.downloads", [HUB | {"sha256": "b" * 64}]),
        ("weights.downloads", [{key: value for key, value in HUB.items() if key != "revision"}]),
        ("weights.downloads", [S3 | {"revision": "a" * 40}]),
        ("weights.downloads", [{key: value for key, value in S3.items() if key != "sha256"}]),
        ("ignoredRules", ["no-such-rule"]),
        ("ignoredRules", ["port-taken"]),
        ("global.imageRegistry", "https://r.example"),
        ("image.repository", "https://r.example/app"),
        ("serviceAccounts.worker.name", "My_Account"),
        ("commonLabels", {"a": "b c"}),
        ("head.extraEnv", [{"name": "N", "value": 1}]),
        ("check.timeoutSeconds", 0),
        ("serviceAccounts.head", {"create": False}),
        ("ingressPods.extra.topologySpreadConstraints", [{"topologyKey": "rack"}]),
        ("modelPods.image", "gpu"),
        ("modelPods.resources.limits.cpu", None),
        ("config.models.m.pods.homeSize", "1 Gi"),
    ],
)
def test_a_value_of_a_wrong_form_is_refused(path: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"at '/{path.replace('.', '/')}"):
        render(at(path, value))


@pytest.mark.parametrize("key", ["dns", "apiServerCidrs", "apiServerPorts", "weightsCidrs", "redisCidrs"])
def test_an_empty_list_in_a_policy_which_would_mean_everybody_is_refused(key: str) -> None:
    with pytest.raises(Refused, match=f"/networkPolicies/{key}"):
        render(at(f"networkPolicies.{key}", []))
