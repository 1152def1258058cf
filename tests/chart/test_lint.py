"""Each check across values is triggered by one set of values, names both values, and leaves the set beside it alone.

The order of timeouts has test_lint_timeouts.py.
"""

import re
from typing import Any

import pytest

from serve_app.config.checks import RESERVED_PORTS
from tests.chart.cloud_rows import CLOUD
from tests.chart.folder_rows import FOLDERS
from tests.chart.lint_edge_rows import EDGE, EFFECT
from tests.chart.lint_rows import IMAGES, PODS, SCALING, WEIGHTS, Check
from tests.chart.lint_tenant_rows import TENANTS
from tests.chart.places import ALB
from tests.chart.render import Refused, at, merged, models, render
from tests.chart.sleep_rows import SLEEP
from tools.chart_schema import rule_names

MODEL: dict[str, Any] = {"name": "m", "model": "embedded:smollm2-135m-instruct"}
INNOCENT = {
    "HF_TOKEN_PATH": "abcd1234",
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKEN": "123456789",
    "AWS_WEB_IDENTITY_TOKEN": "none",
    "AWS_SHARED_CREDENTIALS_FILE": "/var/run/secrets/credentials",
}
"""Variables whose names or values resemble a secret's."""
CUDA = MODEL | {"model": "/opt/model", "device": "cuda", "gpus_per_replica": 2}

CHECKS: list[Check] = [
    *PODS,
    *IMAGES,
    *EDGE,
    *EFFECT,
    *TENANTS,
    *SCALING,
    *SLEEP,
    *WEIGHTS,
    *FOLDERS,
    *CLOUD,
    (
        "more replicas than there may be",
        models(MODEL | {"replicas": {"min": 3, "max": 2}}),
        ("config.models.m.replicas.min is 3, but max is 2", "set max to 3 or more"),
        models(MODEL | {"replicas": {"min": 3, "max": 3}}),
    ),
    (
        "keys of other systems",
        merged(models(MODEL | {"num_gpus": 2, "nodeSelector": {}}), {"replicaCount": 2}, at("config.ingress.apiKey", "x")),
        (
            "foreign-key: config.models.m.num_gpus: unknown key; set models.NAME.gpus_per_replica, the GPUs of one engine",
            "config.models.m.nodeSelector: unknown key; pods are the Helm chart's",
            "replicaCount: unknown key; set config.models.NAME.replicas: {min: 1, max: 2}",
            "config.ingress.apiKey: unknown key; set ingress.tenants_file or ingress.api_keys_file",
        ),
        models(MODEL | {"replicas": {"min": 1, "max": 2}}),
    ),
    (
        "keys of other systems in the sections below, and arguments of vLLM",
        merged(
            models(
                MODEL | {"max_model_len": 2048, "--max-num-seqs": 8, "replicas": {"schedule": [{"min": 1, "minReplicas": 1}]}},
                {"name": "n", "model": "/opt/n", "replicas": {"upscaleDelayS": 3}, "engine_args": {"num_gpus": 2}},
            ),
            at("config.timeouts.gracefulShutdownTimeoutS", 30),
            at("config.trust-remote-code", True),
        ),
        (
            "config.models.m.max_model_len: unknown key; it is an argument of vLLM's engine: put it under models.NAME.engine_args",
            "config.models.m.--max-num-seqs: unknown key; it is an argument of vLLM's engine",
            "config.models.m.replicas.schedule[0].minReplicas: unknown key; for engines set models.NAME.replicas",
            "config.models.n.engine_args.num_gpus: unknown argument; set models.NAME.gpus_per_replica",
            "config.models.n.replicas.upscaleDelayS: unknown key; remove it: serve-app has its own policy",
            "config.timeouts.gracefulShutdownTimeoutS: unknown key; set timeouts.drain_s",
            "config.trust-remote-code: unknown key; it is an argument of vLLM's engine",
        ),
        models(
            MODEL | {"engine_args": {"max_model_len": 2048, "tensor-parallel-size": 1}},
            # `requests` is Kubernetes's name for another thing, and a canary's own key
            {"name": "c", "model": "/opt/c", "canary": {"of": "m", "requests": 30}},
        ),
    ),
    (
        "keys with several capitals in a row",
        merged(
            models(
                MODEL | {"requestGPUType": "a", "numGPUBlocksOverride": 1, "maxCPULoras": 1, "replicas": {"requestGPUType": "a"}}
            ),
            at("config.timeouts.requestGPUType", "a"),
            at("config.ingress", {"mmIpcGPUMemoryGb": 1, "dcpQReplicate": True}),
        ),
        (
            *(
                f"config.{at}.requestGPUType: unknown key; models.NAME.resources"
                for at in ("models.m", "models.m.replicas", "timeouts")
            ),
            *(f"config.models.m.{key}: unknown key; it is an argument" for key in ("numGPUBlocksOverride", "maxCPULoras")),
            *(f"config.ingress.{key}: unknown key; it is an argument" for key in ("mmIpcGPUMemoryGb", "dcpQReplicate")),
        ),
        models(MODEL),
    ),
    (
        "numbers of replicas, and an adapter's path alone",
        merged(models(MODEL | {"replicas": 2, "adapters": {"a": "s3://b/a"}}), at("config.ingress.replicas", 3)),
        (
            "not-a-mapping: config.models.m.adapters.a: is 's3://b/a', but should be a mapping; write {path: FOLDER}, with the absolute",
            "not-a-mapping: config.models.m.replicas: is 2, but should be a mapping; write {min: 2, max: 2}",
            "not-a-mapping: config.ingress.replicas: is 3, but should be a mapping; write {min: 3, max: 3}",
        ),
        models(MODEL | {"replicas": {"min": 2, "max": 2}}),
    ),
    (
        "a port of the links that is the API's",
        at("config.protocol.port", 8010),
        ("config.protocol.port is 8010, and so is config.ingress.port",),
        merged(at("config.protocol.port", 8010), at("config.ingress.port", 8011)),
    ),
    (
        "a port of root's",
        at("config.protocol.port", 1023),
        ("config.protocol.port is 1023, which belongs to root alone", "for example 8020"),
        at("config.protocol.port", 1024),
    ),
    (
        "GPUs that do not divide",
        merged(models(CUDA | {"gpus_per_replica": 3}), at("modelPods.gpusPerNode", 8)),
        ("gpus_per_replica is 3", "gpusPerNode is 8"),
        merged(models(CUDA), at("modelPods", {"gpusPerNode": 8, "onePerNode": False})),
    ),
    (
        "one pod on a node with GPUs for several",
        merged(models(CUDA), at("modelPods.gpusPerNode", 8)),
        ("onePerNode is true", "6 GPUs", "nodes of 2 GPUs by config.models.m.pods: {gpusPerNode: 2, nodeSelector"),
        merged(models(CUDA), at("modelPods.gpusPerNode", 2)),
    ),
    (
        "GPUs set twice",
        merged(models(CUDA), {"modelPods": {"resources": {"limits": {"nvidia.com/gpu": 4}}}}),
        ("nvidia.com/gpu 4", "gpus_per_replica is 2"),
        models(CUDA),
    ),
    (
        "a drain that an AWS load balancer would cut",
        merged(ALB, at("config.timeouts.drain_s", 3601), at("timeouts.clientSeconds", 4000)),
        ("drain_s is 3601", "ingress.alb is true", "3600 s"),
        merged(ALB, at("config.timeouts.drain_s", 3600), at("timeouts.clientSeconds", 4000)),
    ),
    (
        "silence that an AWS load balancer would not bear",
        merged(ALB, at("timeouts.loadBalancerIdleSeconds", 4001), at("config.ingress.keep_alive_s", 4010)),
        ("loadBalancerIdleSeconds is 4001", "ingress.alb is true", "4000 s"),
        merged(ALB, at("timeouts.loadBalancerIdleSeconds", 4000), at("config.ingress.keep_alive_s", 4010)),
    ),
    (
        "the class of an AWS load balancer without its settings",
        {"ingress": {"enabled": True, "className": "alb"}},
        ("ingress.className is alb", "ingress.alb is false"),
        {"ingress": {"enabled": True, "className": "nginx"}},
    ),
    (
        "a certificate that nothing uses",
        {"ingress": {"enabled": True, "albCertificateArn": "arn:aws:acm:x"}},
        ("ingress.albCertificateArn is arn:aws:acm:x", "ingress.alb is false"),
        merged(ALB, at("ingress.albCertificateArn", "arn:aws:acm:x")),
    ),
    (
        "an AWS load balancer of another controller",
        merged(ALB, at("ingress.className", "nginx")),
        ("ingress.alb is true", "ingress.className is nginx"),
        merged(ALB, at("ingress.className", "alb")),
    ),
    (
        "models for everybody on the internet",
        merged(ALB, {"ingress": {"albScheme": "internet-facing"}, "apiKeys": {"enabled": False}}),
        ("albScheme is internet-facing", "apiKeys.enabled is false"),
        merged(ALB, at("ingress.albScheme", "internet-facing"), at("tenants.existingSecret", "s")),
    ),
    (
        "an AWS load balancer that no policy lets in",
        merged(ALB, at("networkPolicies.clients", [{"namespaceSelector": {}}])),
        ("ingress.alb is true", "networkPolicies.clients has no ipBlock"),
        ALB,
    ),
    (
        "a Service that no policy lets the world to",
        at("service.type", "LoadBalancer"),
        ("service.type is LoadBalancer", "networkPolicies.clients has no ipBlock"),
        merged(at("service.type", "LoadBalancer"), at("networkPolicies.clients", [])),
    ),
    ("latest", at("image.tag", "latest"), ("image.tag is latest", "image.digest is empty"), at("image.tag", "1.2.3")),
    (
        "latest of another image",
        at("gcsFaultTolerance.redis.image.tag", "latest"),
        ("redis.image.tag is latest",),
        {"gcsFaultTolerance": {"redis": {"image": {"tag": "latest", "digest": "sha256:" + "a" * 64}}}},
    ),
    (
        "a tag in the repository",
        at("image.repository", "host:5000/app:1"),
        ("host:5000/app:1", 'image.tag is ""'),
        at("image.repository", "host:5000/app"),
    ),
    (
        "a secret in a model's environment",
        models(MODEL | {"env": {"HF_TOKEN": "abcd1234"}}),
        ("config.models.m.env.HF_TOKEN", "secret"),
        models(MODEL | {"env": INNOCENT}),
    ),
    *[
        (
            f"a secret in {key}",
            models(MODEL | {"engine_args": {key: "x"}}),
            (f"config.models.m.engine_args.{key} is a secret", "weights.huggingFaceTokenSecret"),
            models(MODEL | {"engine_args": {key: True}}),
        )
        for key in ("hf_token", "hf-token")
    ],
    (
        "a secret in a pod's environment",
        at("head.extraEnv", [{"name": "MY_PASSWORD", "value": "abcd1234"}]),
        ("head gives a container MY_PASSWORD with a value",),
        at("head.extraEnv", [{"name": "MY_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
    ),
    (
        "a secret of a sidecar",
        at("head.extra.containers", [{"name": "s", "env": [{"name": "DB_PASSWORD", "value": "abcd1234"}]}]),
        ("head gives a container DB_PASSWORD",),
        at("head.extra.containers", [{"name": "s", "env": [{"name": "DB_PASSWORD", "value": "$(OTHER_PASSWORD)"}]}]),
    ),
    (
        "a Secret with its data",
        at("extraObjects", [{"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}}]),
        ("extraObjects has a Secret with its data",),
        at("extraObjects", [{"kind": "ExternalSecret", "metadata": {"name": "s"}}]),
    ),
    (
        "one account for the head and the workers",
        at("serviceAccounts", {"head": {"name": "a"}, "worker": {"name": "a"}}),
        ("serviceAccounts.head and serviceAccounts.worker are both a",),
        at("serviceAccounts", {"head": {"name": "a"}, "worker": {"name": "b"}}),
    ),
    (
        "annotations that are Helm's",
        at("commonAnnotations", {"helm.sh/hook": "pre-install"}),
        ("commonAnnotations has helm.sh/hook",),
        at("commonAnnotations", {"example.com/hook": "pre-install"}),
    ),
    (
        "the Secret that the chart itself makes",
        at("gcsFaultTolerance", {"enabled": True, "existingSecret": "demo-redis"}),
        ("gcsFaultTolerance.existingSecret is demo-redis, which the chart makes",),
        at("gcsFaultTolerance", {"enabled": True, "existingSecret": "mine"}),
    ),
    (
        "a digest in the repository",
        at("image.repository", "host/app@sha256:" + "a" * 64),
        ("put what follows the @ into image.digest",),
        at("image.digest", "sha256:" + "a" * 64),
    ),
    (
        "a keep-alive that is half a second too short",
        at("config.ingress.keep_alive_s", 120.5),
        ("config.ingress.keep_alive_s is 120.5 and", "121 or more"),
        at("config.ingress.keep_alive_s", 121.5),
    ),
    (
        "a configuration that no annotation holds",
        models(MODEL | {"engine_args": {"chat_template": "x" * 250_000}}),
        ("the configuration has 250", "set check.enabled to false"),
        merged(models(MODEL | {"engine_args": {"chat_template": "x" * 250_000}}), at("check.enabled", False)),
    ),
    (
        "a secret in one model's pods",
        models(MODEL | {"pods": {"extraEnv": [{"name": "API_KEY", "value": "abcd1234"}]}}),
        ("config.models.m.pods gives a container API_KEY with a value",),
        models(MODEL | {"pods": {"extraEnv": [{"name": "LEVEL", "value": "x"}]}}),
    ),
    (
        "something that looks like a secret anywhere",
        at("service.annotations", {"note": "hf_" + "a" * 34}),
        ("service.annotations.note holds something that looks like a secret (hf_aaa",),
        at("service.annotations", {"note": "hf_short"}),
    ),
    (
        "a key of OpenAI's anywhere",
        at("service.annotations", {"note": "Bearer sk-proj-" + "a1" * 12}),
        ("service.annotations.note holds something that looks like a secret (sk-pro",),
        at("service.annotations", {"note": "task-inference-of-the-second-floor"}),
    ),
    (
        "a password in a proxy's address",
        at("weights.extraEnv", [{"name": "HTTPS_PROXY", "value": "http://user:pass@proxy:3128"}]),
        ("weights.extraEnv[0].value holds something that looks like a secret (://use",),
        at("weights.extraEnv", [{"name": "HTTPS_PROXY", "value": "http://user@proxy:3128/a:b@c"}]),
    ),
    (
        "a key of OpenAI's in a second line",
        at("extraObjects", ["kind: A\nkey:\n  sk-proj-" + "a1" * 12]),
        ("extraObjects[0] holds something that looks like a secret (sk-pro",),
        at("service.annotations", {"note": "eu-sk-learn-workers-of-the-second-floor"}),
    ),
    (
        "a password in Redis' address",
        {"gcsFaultTolerance": {"enabled": True, "address": "redis://user:pw@host:6379"}},
        ("gcsFaultTolerance.address holds something that looks like a secret (://use",),
        {"gcsFaultTolerance": {"enabled": True, "address": "redis://host:6379"}},
    ),
    ("another name", at("config.name", "x"), ('config.name is "x"', '"demo"'), at("config.name", "demo")),
    ("another host", at("config.ingress.host", "::1"), ('"::1"', '"0.0.0.0"'), at("config.ingress.host", "0.0.0.0")),
    (
        "a token file elsewhere",
        at("config.protocol.cluster_token_file", "/x"),
        ('"/x"', '"/etc/serve-app/cluster-token/token"'),
        at("config.protocol.cluster_token_file", "/etc/serve-app/cluster-token/token"),
    ),
    (
        "other resources of the ingress",
        at("config.ingress.resources", {"x": 1}),
        ('{"x":1}', '{"serve_app_ingress":1}'),
        at("config.ingress.resources", {"serve_app_ingress": 1}),
    ),
    ("resources of a model", models(MODEL | {"resources": {"x": 1}}), ('{"x":1}', "serve_app_model_m"), models(MODEL)),
    (
        "several replicas in a pod",
        models(MODEL | {"replicas_per_node": 2}),
        ("replicas_per_node is 2", "1 replica"),
        models(MODEL | {"replicas_per_node": 1}),
    ),
    (
        "GPUs that the nodes cannot share evenly",
        models(CUDA | {"nodes": 3}),
        ("nodes-cannot-be: config.models.m.nodes is 3 and gpus_per_replica is 2",),
        models(CUDA | {"nodes": 2}),
    ),
    ("a port of the links that nobody knows", at("config.protocol.port", 0), ("port is 0",), at("config.protocol.port", 8021)),
    (
        "a hub's model in pods that reach no hub",
        models(MODEL | {"model": "org/name"}),
        ("config.models.m.model is org/name", "networkPolicies.enabled is true"),
        merged(models(MODEL | {"model": "org/name"}), at("networkPolicies.enabled", False)),
    ),
]


@pytest.mark.parametrize(("wrong", "shown", "right"), [case[1:] for case in CHECKS], ids=[case[0] for case in CHECKS])
def test_wrong_values_are_refused_with_a_sentence_that_names_them(
    wrong: dict[str, Any], shown: tuple[str, ...], right: dict[str, Any]
) -> None:
    with pytest.raises(Refused) as refusal:
        render(wrong)
    message = str(refusal.value)
    assert "execution error at" in message, "a check of the chart, not an accident of its templates"
    assert {*re.findall(r"^  ([a-z-]+): ", message, re.MULTILINE)} <= rule_names()
    assert [text for text in shown if text not in message] == []
    render(right)


def test_all_broken_rules_are_reported_at_once_and_each_can_be_ignored_by_its_name() -> None:
    wrong = merged(at("image.tag", "latest"), at("service.type", "LoadBalancer"), at("timeouts.clientSeconds", 599))
    with pytest.raises(Refused) as refusal:
        render(wrong)
    names = re.findall(r"^  ([a-z-]+): ", str(refusal.value), re.MULTILINE)
    assert names == ["client-outlasts-drain", "balancer-out-of-reach", "image-latest"]
    with pytest.raises(Refused, match=r"break 1 of the chart's rules:\n  client-outlasts-drain: timeouts\.clientSeconds is 599"):
        render(wrong | {"ignoredRules": names[1:]})
    assert render(wrong | {"ignoredRules": names}).of("Service")[""]["spec"]["type"] == "LoadBalancer"


@pytest.mark.parametrize("key", ["ingress", "protocol"])
@pytest.mark.parametrize("ports", RESERVED_PORTS, ids=str)
def test_the_ports_that_serve_app_check_refuses_are_refused_with_the_same_owner(ports: range, key: str) -> None:
    for port in {ports[0], ports[-1]}:
        with pytest.raises(
            Refused, match=rf"config\.{key}\.port is {port}, which belongs to {RESERVED_PORTS[ports]}: choose another"
        ):
            render(at(f"config.{key}.port", port))
    beside = [port for port in (ports[0] - 1, ports[-1] + 1) if not any(port in others for others in RESERVED_PORTS)]
    for port in beside:
        render(at(f"config.{key}.port", port))


@pytest.mark.parametrize(
    ("release", "shown"), [("a" * 42, "42 characters, KubeRay allows 41"), ("1st", "cannot name a RayService")]
)
def test_a_release_that_kuberay_would_refuse_is_refused_here(release: str, shown: str) -> None:
    with pytest.raises(Refused, match=shown):
        render(release=release)
    render(release="a" * 41)


def test_pods_of_a_model_that_is_called_head_are_not_the_heads() -> None:
    model = {"name": "head", "model": "embedded:smollm2-135m-instruct"}
    pods = {"priorityClassName": "rare", "nodeSelector": {"gpu": "true"}}
    rendered = render(models(model | {"pods": pods}))
    assert rendered.pod("head").get("priorityClassName") != "rare"
    assert "nodeSelector" not in rendered.pod("head")
    assert rendered.pod("model")["priorityClassName"] == "rare"
