"""These tests install the values for GPU nodes where kwok's nodes pretend to have GPUs. No containers run, so no model answers.

Changed is what such a cluster lacks: weights, secrets from outside, persistent volumes, AWS, and the time that long answers may take.
"""

import functools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import CHART, Images, images_from_environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FILE = CHART.parents[1] / "k8s/cluster/values/serve-app.yaml"
GPUS = 4
"""GPUs of a pretended node."""
VARIANTS: dict[str, dict[str, Any]] = {
    "eks": {},
    "four": {"gpusPerNode": GPUS, "headroom": {"pods": 1}},
}
"""Changes of `modelPods`; with them, a replica has `gpusPerNode` GPUs."""
KWOK = {"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}
SMALL = {"requests": {"cpu": "50m", "memory": "1Gi"}, "limits": {"memory": "3Gi"}}
ASK = """
import json, os, sys, urllib.error, urllib.request
request = urllib.request.Request("http://127.0.0.1:8010" + sys.argv[1], headers={"authorization": "Bearer " + sys.argv[2]})
try:
    with urllib.request.urlopen(request, timeout=10) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""


@dataclass(frozen=True)
class Installed:
    """A release of one of the files, with a namespace of its own."""

    name: str
    model: str
    gpus: int
    """GPUs of one replica."""
    headroom: int
    images: Images

    def pods(self, component: str) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        items: list[dict[str, Any]] = get("pods", "-n", self.name, "-l", selector)["items"]
        return [pod for pod in items if pod["spec"].get("nodeName")]

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and body of an ingress's answer, or 0 while it does not listen."""
        keys = get("secret", f"{self.name}-api-keys", "-n", self.name)["data"]["keys"]
        key = run("base64", "-d", stdin=keys).split()[0]
        pod = self.pods("ingress")[0]["metadata"]["name"]
        try:
            said = kubectl("exec", "-n", self.name, pod, "-c", "ray-worker", "--", "python", "-c", ASK, path, key)
        except AssertionError:
            return 0, ""
        status, body = json.loads(said)
        return status, body


def adapted(variant: dict[str, Any], images: Images) -> dict[str, Any]:
    repository, _, tag = images.app.rpartition(":")
    filled = string.Template(FILE.read_text()).substitute(
        REGISTRY="none", TAG=tag, HOST="llm.example.com", VPC_CIDR="10.0.0.0/16"
    )
    values: dict[str, Any] = yaml.safe_load(filled)
    for key in ("weights", "apiKeys", "clusterToken", "rayToken", "monitoring"):
        values.pop(key, None)
    values["modelPods"] |= variant
    (model,) = values["config"]["models"].values()
    model["gpus_per_replica"] = values["modelPods"]["gpusPerNode"]
    model["model"] = "embedded:smollm2-135m-instruct"
    model["engine_args"]["max_model_len"] = 2048
    model["frontend_args"]["tool_call_parser"] = "hermes"
    values["config"]["timeouts"]["drain_s"] = 60
    values["image"] = {"repository": repository, "tag": tag}
    values["cudaImage"] = dict(zip(("repository", "tag"), images.cuda.rsplit(":", 1), strict=True))
    values["modelPods"]["tolerations"].append(KWOK)
    for pods in ("head", "ingressPods"):
        values[pods]["resources"] = SMALL
    redis_repository, _, redis_tag = images.redis.rpartition(":")
    redis = values["gcsFaultTolerance"]["redis"]
    redis |= {"image": {"repository": redis_repository, "tag": redis_tag}, "persistence": {"enabled": False}}
    return values


@functools.cache
def pretended_nodes() -> list[str]:
    nodes = get("nodes")["items"]
    pretended = [node for node in nodes if node["metadata"]["annotations"].get("kwok.x-k8s.io/node")]
    return [node["metadata"]["name"] for node in pretended if int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) == GPUS]


@pytest.fixture(scope="module", params=VARIANTS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    images = images_from_environment()
    if images is None or not images.cuda or len(pretended_nodes()) < 3:
        pytest.skip(f"it needs both images (`make test-cluster-cuda`) and three nodes of kwok with {GPUS} GPUs each")
    for node in get("nodes")["items"]:
        kind = "gpu" if node["metadata"]["name"] in pretended_nodes() else "cpu"
        labels = (f"serve-app/nodes={kind}", "topology.kubernetes.io/zone=z")  # the latter as every cloud does
        kubectl("label", "node", node["metadata"]["name"], *labels, "--overwrite")
    values = adapted(VARIANTS[request.param], images)
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    name = f"gpu-{request.param}"
    headroom = values["modelPods"].get("headroom", {}).get("pods", 0)
    try:
        run("helm", "install", name, str(CHART), "-n", name, "--create-namespace", "-f", str(file))
        ((model, settings),) = values["config"]["models"].items()
        yield Installed(name, model, settings["gpus_per_replica"], headroom, images)
    finally:
        run("helm", "uninstall", name, "-n", name, "--wait", "--timeout", "5m", "--ignore-not-found", limit_s=400)
        kubectl("delete", "namespace", name, "--ignore-not-found", limit_s=400)


def test_every_model_pod_has_a_node_and_its_gpus(installed: Installed) -> None:
    num_pods = 2 + installed.headroom
    pods = wait_until("model pods on nodes", lambda: _all(installed, num_pods))
    assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {installed.images.cuda}
    held = [pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    assert held == [str(installed.gpus)] * num_pods
    nodes = {pod["spec"]["nodeName"] for pod in pods}
    assert len(nodes) == num_pods
    assert nodes <= set(pretended_nodes())


def _all(installed: Installed, num_pods: int) -> list[dict[str, Any]]:
    pods = installed.pods("model") + installed.pods("headroom")
    return pods if len(pods) == num_pods else []


def test_head_and_ingresses_run_the_cpu_image_on_nodes_without_gpus(installed: Installed) -> None:
    wait_until("ingress pods on nodes", lambda: len(installed.pods("ingress")) == 2)
    for pod in installed.pods("head") + installed.pods("ingress"):
        assert pod["spec"]["nodeName"] not in pretended_nodes()
        for container in pod["spec"]["containers"]:
            assert container["image"] == installed.images.app
            assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


def test_an_ingress_starts_without_a_gpu_and_names_the_model_that_it_waits_for(installed: Installed) -> None:
    wait_until("an ingress listens", lambda: installed.ask("/v1/models")[0])
    status, models = installed.ask("/v1/models")
    assert status == 200
    assert [model["id"] for model in json.loads(models)["data"]] == [installed.model]
    status, reason = installed.ask("/readyz")
    assert status == 503
    assert installed.model in reason
