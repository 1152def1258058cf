"""The schema refuses values of a wrong form by their path, and the rules of forms by a sentence with the value and the way out."""

import re
from typing import Any

import pytest

from serve_app.config import problems
from tests.chart.places import HUB, S3
from tests.chart.render import Refused, at, merged, models, render


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
        ("networkPolicies.operatorNamespace", ""),
        ("networkPolicies.prometheusNamespace", ""),
        ("networkPolicies.clients", [{"ipBlock": {"cidr": ""}}]),
        ("gcsFaultTolerance.existingSecretKey", ""),
        ("weights.activeDeadlineSeconds", 0),
        ("head.extraEnv", [{"value": "x"}]),
        ("head.tmpSize", ""),
        ("weights.downloads", [{"path": "a"}]),
        ("ignoredRules", ["no-such-rule"]),
        ("ignoredRules", ["port-taken"]),
        ("serviceAccounts.worker.name", "My_Account"),
        ("commonLabels", {"a": "b c"}),
        ("head.extraEnv", [{"name": "N", "value": 1}]),
        ("check.timeoutSeconds", 0),
        ("ingressPods.extra.topologySpreadConstraints", [{"topologyKey": "rack"}]),
        ("modelPods.image", "gpu"),
        ("modelPods.resources.limits.cpu", None),
    ],
)
def test_a_value_of_a_wrong_form_is_refused(path: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"at '/{path.replace('.', '/')}"):
        render(at(path, value))


@pytest.mark.parametrize("key", ["dns", "apiServerCidrs", "apiServerPorts", "weightsCidrs", "redisCidrs"])
def test_an_empty_list_in_a_policy_which_would_mean_everybody_is_refused(key: str) -> None:
    with pytest.raises(Refused, match=f"/networkPolicies/{key}"):
        render(at(f"networkPolicies.{key}", []))


SIZE = "write a number and k, M, G, T or Ki, Mi, Gi, Ti without a blank, as in 16Gi"
NAME = "give the name of the object in the cluster, of small letters, digits and dashes, not what it holds"
RANGE = "write a range of addresses, such as 203.0.113.0/24: of a single one its address and /32"
IMAGE = "write the registry's host and the path in small letters, without https://"
MADE = models({"name": "m", "model": "/opt/m", "replicas": {"min": 1, "max": 2}})


@pytest.mark.parametrize(
    ("path", "wrong", "said", "right"),
    [
        ("head.resources.requests.cpu", "1Gi", '"1Gi": write CPUs, as in 2 or 0.5, or thousandths of one, as in 500m', "500m"),
        ("head.resources.limits.memory", "500m", f'"500m": {SIZE}', "5G"),
        ("head.resources.limits.memory", "1.2.3Gi", f'"1.2.3Gi": {SIZE}', 4294967296),
        ("modelPods.shmSize", "16 GB", f'"16 GB": {SIZE}', ""),
        ("weights.size", "100GB", f'"100GB": {SIZE}', "100G"),
        ("networkPolicies.weightsCidrs", ["0.0.0.0/0", "10.0.0.1"], f'"10.0.0.1": {RANGE}', ["10.0.0.1/32"]),
        ("networkPolicies.apiServerCidrs", ["::/0", "999.1.1.1/8"], f'"999.1.1.1/8": {RANGE}', ["255.199.9.1/8"]),
        ("networkPolicies.redisCidrs", ["10.0.0.0/8", "fd00::/129"], f'"fd00::/129": {RANGE}', ["fd00::/128"]),
        ("service.loadBalancerSourceRanges", ["10.0.0.0/8", "10.0.0.0/33"], f'"10.0.0.0/33": {RANGE}', []),
        ("monitoring.grafanaUrl", "grafana.example.com", "begin with https:// or http://", "http://grafana.example.com"),
        ("weights.s3Endpoint", "minio:9000", "begin with https:// or http://", "http://minio:9000"),
        ("apiKeys.existingSecret", "serve-app/api-keys", f"no name of an object: {NAME}", "api-keys"),
        ("weights.existingClaim", "Weights", f'"Weights": {NAME}', ""),
        ("global.imageRegistry", "https://r.example", f'"https://r.example": {IMAGE}', "r.example"),
        ("image.repository", "r.example/App", f'"r.example/App": {IMAGE}', "r.example/app"),
        ("image.digest", "a" * 64, "write sha256: and its 64 digits of 0 to 9 and a to f", "sha256:" + "a" * 64),
        ("image.tag", 1.5, "is the number 1.5, without the zeros that it may have ended with: put the tag into quotes", "1.5"),
        ("image.tag", "v1 new", '"v1 new": a tag has letters, digits', "v1"),
    ],
)
def test_a_text_of_a_wrong_form_is_refused_with_what_to_write(path: str, wrong: Any, said: str, right: Any) -> None:
    with pytest.raises(Refused, match=rf"wrong-form: {re.escape(path)}(\[1\])? is .*{re.escape(said.removeprefix('is '))}"):
        render(at(path, wrong))
    render(at(path, right))


def test_forms_are_judged_in_the_pods_of_one_model_and_not_among_names_that_the_user_chooses() -> None:
    with pytest.raises(Refused, match=r'wrong-form: config\.models\.m\.pods\.homeSize is "1 Gi": write a number'):
        render(merged(MADE, at("config.models.m.pods.homeSize", "1 Gi")))
    render(at("head.nodeSelector", {"size": "large", "memory": "64GB"}))


def test_what_may_be_a_token_in_place_of_its_secrets_name_is_not_printed() -> None:
    token = "hf_" + "aB" * 17
    with pytest.raises(Refused, match=NAME) as refusal:
        render(at("weights.huggingFaceTokenSecret", token))
    assert token not in str(refusal.value)


def test_a_mapping_in_place_of_a_secrets_name_is_refused_with_what_to_write() -> None:
    with pytest.raises(Refused, match=f"wrong-form: weights.huggingFaceTokenSecret is a mapping: {NAME}"):
        render(at("weights", {"enabled": True, "downloads": [HUB], "huggingFaceTokenSecret": {"name": "a", "key": "b"}}))


@pytest.mark.parametrize("required", [{}, {"required": True}])
def test_no_replica_of_a_required_model_has_the_sentence_of_serve_app_check(required: dict[str, bool]) -> None:
    values = models({"name": "m", "model": "/opt/m", "replicas": {"min": 0}} | required)
    (told,) = problems(values["config"])
    with pytest.raises(Refused, match=re.escape(f"required-from-zero: config.{told}")):
        render(values)


@pytest.mark.parametrize(
    ("download", "said"),
    [
        (
            HUB | {"source": "https://huggingface.co/o/n"},
            "source is https://huggingface.co/o/n: write hf:o/n and the commit as revision",
        ),
        (HUB | {"source": "o/n"}, "source is o/n: write hf:o/n and the commit as revision"),
        (
            S3 | {"source": "https://b/p"},
            "source is https://b/p: write hf:ORG/NAME and the commit as revision, or s3://BUCKET/PREFIX",
        ),
        (HUB | {"path": "/models/m"}, "path is /models/m: write the name of a folder, as in m, which pods find below /models"),
        (HUB | {"path": "/models/Qwen2.5-7B"}, "write the name of a folder, as in Qwen2.5-7B, which"),
        (HUB | {"path": "."}, "path is .: write the name of a folder, as in qwen3-8b, which"),
        (HUB | {"sha256": "b" * 64}, "is from the hub and has a sha256: give it the commit as revision, and no sha256"),
        (
            {"path": "m", "source": "hf:o/n"},
            "has no revision: give it the commit as revision, and no sha256; git ls-remote https://",
        ),
        (
            S3 | {"revision": "a" * 40},
            "is from a bucket and has a revision: give it no revision, and the sha256 that aws s3 cp s3://b/p/",
        ),
        (
            {"path": "m", "source": "s3://b/p"},
            "has no sha256: give it no revision, and the sha256 that aws s3 cp s3://b/p/SHA256SUMS -",
        ),
        (S3 | {"sha256": "ABC"}, "has a sha256 that is not of 64 digits in small letters: give it"),
    ],
)
def test_a_download_that_cannot_be_is_refused_with_what_to_write(download: dict[str, str], said: str) -> None:
    with pytest.raises(Refused, match=rf"download-cannot-be: weights\.downloads\[0\][. ].*{re.escape(said)}"):
        render({"weights": {"enabled": True, "downloads": [download]}})


def test_an_account_that_is_not_made_needs_a_name() -> None:
    with pytest.raises(
        Refused, match=r"account-without-name: serviceAccounts\.head\.create is false, but its name is empty: name"
    ):
        render(at("serviceAccounts.head", {"create": False}))
    render(at("serviceAccounts.head", {"create": False, "name": "mine"}))


@pytest.mark.parametrize(
    "path", ["autoscaling.max_gpus", "models.m.replicas.max", "models.m.replicas.schedule"], ids=["GPUs", "replicas", "window"]
)
def test_a_most_of_zero_has_the_sentence_of_serve_app_check(path: str) -> None:
    number: Any = [{"min": 0, "max": 0}] if path.endswith("schedule") else 0
    values = merged(MADE, at(f"config.{path}", number))
    (told,) = [str(problem) for problem in problems(values["config"]) if "is 0, but" in problem.problem]
    assert told.endswith(("; remove it for no limit", "in the windows of replicas.schedule that need some"))
    with pytest.raises(Refused, match=re.escape(f"max-is-zero: config.{told}")):
        render(values)
