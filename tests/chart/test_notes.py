"""helm prints the chart's notes after an install."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.chart.places import CUDA
from tests.chart.render import CHART, at, merged, models, render, tool
from tools.batch_chart_schema import CHART as BATCH_CHART

AWAY = "takes the model away for one load of its engine"


def notes(values: dict[str, Any], chart: Path = CHART) -> str:
    """Return the notes of an install with these values. No cluster is asked: at the address of its API server nothing listens."""
    if (helm := tool("helm")) is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")
    nowhere = ["--dry-run=client", "--kube-apiserver", "http://127.0.0.1:1"]
    command = [helm, "install", "demo", str(chart), *nowhere, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({}, True),
        ({"min": 1, "max": 3, "surge": 0}, True),
        ({"min": 1, "max": 3, "surge": 1}, False),
        ({"min": 2, "max": 2}, False),
    ],
)
def test_an_update_that_takes_a_model_away_is_announced(replicas: dict[str, int], said: bool) -> None:
    assert (AWAY in notes(models(CUDA | {"replicas": replicas}))) is said


@pytest.mark.parametrize(("gpus", "said"), [(0, False), (1, True)])
def test_that_is_so_for_simulated_gpus_too(gpus: int, said: bool) -> None:
    simulated = {"name": "m", "model": "/opt/m", "simulated": {"profile": "a10g-llama-8b"}, "gpus_per_replica": gpus}
    assert (AWAY in notes(models(simulated))) is said


def test_the_model_to_ask_is_one_that_always_has_a_replica() -> None:
    asleep = {"name": "a", "model": "/opt/a", "replicas": {"min": 0, "max": 1}, "required": False}
    assert '{"model": "b",' in notes(models(asleep, {"name": "b", "model": "/opt/b"}))
    assert '{"model": "a",' in notes(models(asleep))


def test_a_model_on_cpu_stays_through_an_update() -> None:
    assert AWAY not in notes({})


@pytest.mark.parametrize(
    ("model", "keys", "said"),
    [
        ({"engine_args": {"scheduling_policy": "fcfs"}}, {"enabled": True}, True),
        ({"engine_args": {"scheduling_policy": "fcfs"}}, {"enabled": False}, False),
        ({"engine_args": {"scheduling_policy": "priority"}}, {"enabled": True}, False),
        ({"engine_args": {"max_num_seqs": 8}}, {"enabled": True}, False),
        ({}, {"enabled": True}, False),
    ],
)
def test_a_model_whose_engines_know_no_weights_is_announced_where_there_are_tenants(
    model: dict[str, Any], keys: dict[str, Any], said: bool
) -> None:
    printed = notes(merged(models({"name": "m", "model": "/opt/m", **model}), at("apiKeys", keys)))
    assert ("The engines of model m start requests in the order of arrival" in printed) is said


@pytest.mark.parametrize(
    ("values", "has_pod"),
    [
        ({}, True),
        (at("tenants.inline", {"red": {}}), False),
        (at("tenants.existingSecret", "s"), False),
        (merged(at("tenants.existingSecret", "s"), at("test.apiKeySecret", "k")), True),
    ],
)
def test_helm_test_is_named_where_it_has_a_pod(values: dict[str, Any], has_pod: bool) -> None:
    assert ("test" in render(values).of("Pod")) is has_pod
    printed = notes(values)
    assert ("helm -n default test demo" in printed) is has_pod
    assert ("in test.apiKeySecret" in printed) is not has_pod


@pytest.mark.parametrize(
    ("ingress", "said"),
    [
        ({}, ["no TLS", "buffering"]),
        ({"className": "traefik", "hosts": ["h"]}, ["buffering"]),
        ({"className": "nginx", "hosts": ["h"]}, ["no fixes"]),
        ({"className": "alb", "alb": True, "hosts": ["h"]}, []),
    ],
)
def test_what_an_ingress_controller_must_be_told_is_announced(ingress: dict[str, Any], said: list[str]) -> None:
    unready = at("config.ingress.unready_s", 15)
    clients = at("networkPolicies.clients", [{"ipBlock": {"cidr": "10.2.0.0/16"}}])
    printed = notes(merged(at("ingress", {"enabled": True, **ingress}), unready, clients))
    assert [words for words in ("no TLS", "buffering", "no fixes") if words in printed] == said


@pytest.mark.parametrize(
    ("config", "num_bytes"), [({}, 10 << 20), ({"batch": {"files": "s3://b/p"}}, (200 << 20) + (64 << 10))], ids=str
)
def test_another_controller_is_to_take_uploads_where_there_are_any(config: dict[str, Any], num_bytes: int) -> None:
    printed = notes(merged(at("ingress", {"enabled": True, "className": "traefik"}), at("config.ingress", config)))
    assert f"bodies of {num_bytes} bytes" in printed


@pytest.mark.parametrize(("labels", "said"), [({}, True), ({"release": "monitoring"}, False)])
def test_podmonitors_that_kube_prometheus_stack_may_not_see_are_announced(labels: dict[str, str], said: bool) -> None:
    printed = notes(at("monitoring", {"podMonitors": True, "labels": labels}))
    assert ("have no labels of their own" in printed) is said


@pytest.mark.parametrize(
    ("replicas", "strategy", "said"),
    [
        ({"min": 3, "max": 4}, "NewCluster", "needs 6 free GPUs"),
        ({"min": 0, "max": 4, "initial": 2}, "NewCluster", "needs 4 free GPUs"),
        ({"min": 3, "max": 4}, "None", ""),
    ],
)
def test_the_gpus_that_an_upgrade_needs_are_counted(replicas: dict[str, int], strategy: str, said: str) -> None:
    model = models(CUDA | {"required": False, "replicas": replicas})
    printed = notes(merged(model, {"upgradeStrategy": strategy, "ignoredRules": ["wake-outlasts-wait"]}))
    assert said in printed
    assert ("free GPUs" in printed) is bool(said)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model": "/models/m"}, True),
        ({"model": "/models/m", "pods": {"checkpointSize": "15Gi"}}, False),
        ({"model": "/opt/m"}, False),
        ({"model": "/models/m", "device": "cpu", "gpus_per_replica": 0}, False),
    ],
)
def test_weights_of_unknown_size_on_a_network_volume_are_announced(model: dict[str, Any], said: bool) -> None:
    printed = notes(merged(models(CUDA | model), at("weights", {"enabled": True, "existingClaim": "c"})))
    assert ("The pods of model m have no checkpointSize" in printed) is said


@pytest.mark.parametrize(
    ("images", "said"),
    [({}, True), ({"image": {"tag": "1-cuda"}, "cudaImage": {"tag": "1-cuda"}}, False), ({"image": {"tag": "1"}}, True)],
)
def test_a_model_on_gpus_that_may_refuse_media_is_announced(images: dict[str, Any], said: bool) -> None:
    assert ("may refuse images, sound and video" in notes(merged(models(CUDA), images))) is said
    assert "refuse images" not in notes(models(CUDA | {"device": "cpu", "gpus_per_replica": 0}))


@pytest.mark.parametrize(("surge", "said"), [(1, True), (0, False)])
def test_the_gpus_that_an_update_in_place_needs_are_counted_apart(surge: int, said: bool) -> None:
    other = {"name": "b", "model": "/opt/b", "device": "cuda", "gpus_per_replica": 4, "replicas": {"surge": surge}}
    printed = notes(models(CUDA | {"replicas": {"min": 3, "max": 4, "surge": surge}}, other))
    assert ("in place needs 6 free GPUs" in printed) is said
    assert "needs 10 free GPUs" in printed


@pytest.mark.parametrize(
    ("given", "said"), [("https://h/in.jsonl?signature=secret", "the URL batch.input"), ("in.jsonl", "/data/in.jsonl")]
)
def test_a_presigned_url_is_not_told(given: str, said: str) -> None:
    printed = notes(merged(at("target.url", "http://demo"), at("batch.input", given)), BATCH_CHART)
    assert f"for each line of {said}." in printed
    assert "://" not in printed
