"""These tests install models whose engines need more than a pod of their own: KV between pods, one GPU for two models, two pods for one.

GPUs are pretended, and accelerators simulated unless a test says that its engines are real. The namespace has the chart's network policies.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.chart.render import merged
from tests.cluster.karpenter import GPU, FakeKarpenter
from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import MODEL, NAMESPACE, RELEASE, Release, images_from_environment
from tests.cluster.test_1_release import ask
from tests.cluster.test_4_losses import engines
from tests.replica.tensor_parallel import ENVIRONMENT

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS, LONG_TOKENS = 6, 300, 1900  # 61 s at 32 ms a step: longer than drain_s, so that a drain moves the stream
GUEST = "guest"
AT_ONCE = ("--force", "--grace-period=0")
PATIENT = {
    "config": {"timeouts": {"no_replica_s": 300, "drain_s": 300}, "ingress": {"keep_alive_s": 610}},
    "timeouts": {"loadBalancerIdleSeconds": 600},
}
"""Requests wait for a replica that starts or wakes."""
KV = {"config": {"models": {MODEL: {"kv": {"transfer": "nixl"}, "replicas": {"min": 2, "max": 2}}}}}
SLEEPER: dict[str, Any] = {
    "required": False,
    "replicas": {"min": 0, "max": 1},
    "gpus_per_replica": 1,
    "sleep": {"replicas_per_gpu": 2, "after_s": 5},
}
SLEEP = {
    "config": {
        "models": {
            MODEL: SLEEPER | {"pods": {"asleepSize": "1Gi"}},
            GUEST: SLEEPER
            | {
                "podsOf": MODEL,
                "model": "embedded:smollm2-135m-instruct",
                "simulated": {"profile": "a10g-llama-8b"},
                "num_cpus": 0.5,
                "engine_args": {"max_model_len": 2048, "max_num_seqs": 64},
            },
        },
    }
}
NODES = {"config": {"models": {MODEL: {"nodes": 2, "gpus_per_replica": 2, "replicas": {"min": 2, "max": 2}}}}}
CHECKPOINT = "/tiny/model"
MAKE = f"from pathlib import Path; from serve_app.checkpoints import make_tiny_llama; make_tiny_llama(Path('{CHECKPOINT}'))"
REAL_NODES = {
    "config": {
        "models": {
            MODEL: {
                "model": CHECKPOINT,
                "device": "cuda",  # vLLM's CPU build takes the place of CUDA's
                "simulated": None,
                "nodes": 2,
                "gpus_per_replica": 2,
                "replicas": {"min": 1, "max": 1},
                "engine_args": {"max_num_seqs": 8, "enforce_eager": True, "dtype": "float32"},
                "env": {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
            }
        },
    }
}
REAL_KV = {
    "config": {
        "models": {
            MODEL: {
                "model": CHECKPOINT,
                "simulated": None,
                "engine_args": {"max_num_seqs": 8, "enforce_eager": True, "dtype": "float32"},
                "env": ENVIRONMENT,
            }
        },
        "timeouts": {"drain_s": 3, "no_replica_s": 3},
    }
}
NODES_ON_GPUS = ("--set", "config.models.sim.gpus_per_replica=2,modelPods.gpusPerNode=1")


@pytest.fixture(scope="module")
def karpenter() -> Iterator[FakeKarpenter]:
    """The GPU nodes, with two GPUs each while the tests run."""
    if images_from_environment() is None:
        pytest.skip("no images: see `make test-interruptions`")
    karpenter = FakeKarpenter(NAMESPACE)
    nodes = karpenter.gpu_nodes()
    if len(nodes) < 2:
        pytest.skip("it needs two GPU nodes: see `make test-interruptions`")
    for node in nodes:
        karpenter.offer(node, 2)
    yield karpenter
    for node in nodes:
        karpenter.offer(node, 1)


def installed(values: dict[str, Any], folder: Path, *arguments: str) -> Release:
    """Return the release with these values in place of the one before."""
    images = images_from_environment()
    assert images is not None
    run("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "5m", "--ignore-not-found", limit_s=400)
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    release = Release(images)
    release.install("-f", str(file), *arguments)
    return release


def series(release: Release, name: str, **labels: str) -> list[float]:
    """Return the values of the ingress's series of this name with these labels."""
    script = "import sys, httpx; print(httpx.get(sys.argv[1], timeout=30).text)"
    families = text_string_to_metric_families(release.python(script, f"{release.url}/metrics"))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return [sample.value for sample in samples if labels.items() <= sample.labels.items()]


def answers(release: Release, model: str, tokens: int = 20) -> bool:
    """Whether the model answers a chat of so many tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    status, lines = ask(release, "/v1/chat/completions", body)
    return status == 200 and lines[-1] == "data: [DONE]"


@pytest.mark.usefixtures("karpenter")
@pytest.mark.parametrize("is_real", [False, True], ids=["simulated", "real"])
def test_the_streams_of_a_pod_that_is_evicted_take_their_kv_to_another_pod(tmp_path: Path, *, is_real: bool) -> None:
    """The two pods reach each other's ports for KV under policies that refuse the rest (test_2_network.py).

    The real engines compute on CPUs, with random weights, and move KV by NIXL over TCP.
    """
    image = images_from_environment()
    assert image is not None
    values = merged(KV, REAL_KV, with_checkpoint(image.app)) if is_real else KV
    gpus = ["--set", "config.models.sim.gpus_per_replica=0"] if is_real else []
    release = installed(values, tmp_path, "--set", "modelPods.onePerNode=true", *gpus)
    wait_until("two replicas", lambda: len(release.ready_pods("model")) == 2)
    victim = release.ready_pods("model")[0]
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": victim, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{victim}/eviction"
        kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
        wait_until("another replica", lambda: len(set(release.ready_pods("model")) - {victim}) == 2)
    seen[0].require_all_complete()
    assert sum(series(release, "serve_app_hand_overs_total", result="read")) > 0
    assert sum(series(release, "serve_app_kv_read_bytes_total", model=MODEL)) > 0


@pytest.mark.usefixtures("karpenter")
def test_two_models_share_the_gpu_of_one_pod_and_change_places_without_a_start(tmp_path: Path) -> None:
    release = installed(merged(SLEEP, PATIENT), tmp_path)
    for model in (MODEL, GUEST):
        wait_until(f"an answer of {model}", functools.partial(answers, release, model))
    (pod,) = release.pods("model")
    assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    name = pod["metadata"]["name"]
    before = engines(name)
    assert len(before) == 2
    for model in (MODEL, GUEST) * 2:
        assert answers(release, model)
    assert engines(name) == before


@pytest.mark.usefixtures("karpenter")
def test_the_streams_of_an_engine_over_two_pods_continue_when_one_pod_is_lost_and_the_engine_returns(tmp_path: Path) -> None:
    release = installed(NODES, tmp_path, *NODES_ON_GPUS)
    pods = wait_until("two engines over two pods each", lambda: four_pods(release))
    assert [get("pod", pod, "-n", NAMESPACE)["spec"]["containers"][0]["resources"]["limits"][GPU] for pod in pods] == ["1"] * 4
    victim = pods[0]
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        kubectl("delete", "pod", "-n", NAMESPACE, victim, *AT_ONCE)
        wait_until("four pods again", lambda: (now := four_pods(release)) and victim not in now)
        wait_until("two replicas", lambda: len(series(release, "serve_app_replica_draining")) == 2)
    seen[0].require_all_complete()


@pytest.mark.usefixtures("karpenter")
def test_a_real_engine_over_two_pods_ends_with_either_and_its_streams_wait_for_the_next(tmp_path: Path) -> None:
    """It computes on CPUs, tensor parallel over two nodes, with random weights."""
    image = images_from_environment()
    assert image is not None
    release = installed(merged(REAL_NODES, PATIENT, with_checkpoint(image.app)), tmp_path, *NODES_ON_GPUS)
    wait_until("an answer", lambda: answers(release, MODEL))
    pods = release.ready_pods("model")
    assert len(pods) == 2
    with release.streams(num=2, tokens=TOKENS) as seen:
        kubectl("delete", "pod", "-n", NAMESPACE, pods[1], *AT_ONCE)
        wait_until("two pods again", lambda: len(now := release.ready_pods("model")) == 2 and pods[1] not in now)
    seen[0].require_all_complete()


def with_checkpoint(image: str) -> dict[str, Any]:
    """Return the values by which pods make the checkpoint before they start."""
    restricted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    mounts = [{"name": "tiny", "mountPath": "/tiny"}]
    make = {
        "name": "tiny",
        "image": image,
        "command": ["python", "-c", MAKE],
        "volumeMounts": mounts,
        "securityContext": restricted,
    }
    pods = {"extraVolumes": [{"name": "tiny", "emptyDir": {}}], "extraVolumeMounts": mounts, "extra": {"initContainers": [make]}}
    return {
        "head": pods,
        "ingressPods": pods,
        "modelPods": {**pods, "image": "cpu", "extraEnv": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}]},
        "ignoredRules": ["cuda-model-in-cpu-image"],
    }


def four_pods(release: Release) -> list[str]:
    """Return the model's pods once four are ready."""
    pods = release.ready_pods("model")
    return pods if len(pods) == 4 else []
