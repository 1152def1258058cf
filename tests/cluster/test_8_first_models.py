"""Each file of k8s/cluster/values/models is installed on nodes that pretend its GPUs, and each of its models answers.

Accelerators are simulated with the memory and speed that `serve-app fit` gives the model on these GPUs. Changed is what such a cluster
lacks: weights, secrets from outside, persistent volumes, monitoring, AWS, and the CPUs and memory of several pods; one ingress must do.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.sizing.rate import profile_of
from tests.cluster.karpenter import GPU, FakeKarpenter
from tests.cluster.kube import LIMIT_S, get, is_ready, kubectl, run, wait_until
from tests.cluster.release import CHART, NAMESPACE, RELEASE, Images, images_from_environment
from tests.k8s.test_model_values import CASES, estimates, instance_of, values_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]

EMBEDDED = "embedded:smollm2-135m-instruct"
LACKING = ("weights", "apiKeys", "clusterToken", "rayToken", "monitoring", "gcsFaultTolerance")
"""Values that name what such a cluster lacks; the chart's own take their place."""
SMALL = {"requests": {"cpu": "50m", "memory": "1Gi", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "2", "memory": "4Gi"}}
NUM_NODES = 2
"""GPU nodes that the files need: one for each of two replicas."""
TOKENS = 5
# Run in an ingress pod. Args: path, key, body. Prints the status, 0 if nothing listens, and the body.
POST = """
import json, sys, urllib.error, urllib.request
path, key, body = sys.argv[1:]
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
try:
    with urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8010" + path, body.encode(), headers), timeout=600) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


class Installed:
    """The release of a file, named as its namespace."""

    def __init__(self, name: str) -> None:
        self.name = f"first-{name}"

    def pods(self, component: str, model: str = "") -> list[dict[str, Any]]:
        """Return the component's pods, of a model if one is named. Its worker group's name has dashes for dots and may end by a digest."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        items: list[dict[str, Any]] = get("pods", "-n", self.name, "-l", selector)["items"]
        group = f"model-{model.replace('.', '-')}" if model else ""
        return [pod for pod in items if pod["metadata"]["labels"]["ray.io/group"].startswith(group)]

    def ready_pods(self, component: str, model: str = "") -> list[dict[str, Any]]:
        return [pod for pod in self.pods(component, model) if is_ready(pod)]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of an ingress's answer 200; nothing if it has another status."""
        keys = get("secret", f"{self.name}-api-keys", "-n", self.name)["data"]["keys"]
        key = run("base64", "-d", stdin=keys).split()[0]
        pod = self.ready_pods("ingress")[0]["metadata"]["name"]
        call = ("exec", "-n", self.name, pod, "-c", "ray-worker", "--", "python", "-c", POST)
        status, answer = json.loads(kubectl(*call, path, key, json.dumps(body), limit_s=LIMIT_S))
        return dict(json.loads(answer)) if status == 200 else {}

    def answers(self, model: str, settings: dict[str, Any]) -> bool:
        """Whether the model answers one request: a chat, or a text to embed."""
        if settings["engine_args"].get("runner") == "pooling":
            return bool(self.post("/v1/embeddings", {"model": model, "input": "hello"}).get("data"))
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
        answer = self.post("/v1/chat/completions", body)
        return bool(answer) and answer["usage"]["completion_tokens"] == TOKENS


def adapted(name: str) -> dict[str, Any]:
    """Return the values of the README's command with what the module changes."""
    values = values_of(name)
    for key in LACKING:
        values.pop(key, None)
    values["config"]["ingress"]["replicas"] = {"min": 1, "max": 1}
    for pods in ("head", "ingressPods", "modelPods"):
        values[pods]["resources"] = SMALL
    for model, _, found in estimates(name):
        settings = values["config"]["models"][model]
        settings |= {"model": EMBEDDED, "device": "cpu"}
        args = settings["engine_args"]
        for checkpoints_own in ("adapters", "frontend_args"):
            settings.pop(checkpoints_own, None)
        for checkpoints_own in ("reasoning_parser", "enable_expert_parallel", "max_loras"):
            args.pop(checkpoints_own, None)
        if args.get("runner") == "pooling":
            settings["gpus_per_replica"] = 0  # only generation is simulated: this one computes, on the CPU
        else:
            settings["simulated"] = {"profile": asdict(profile_of(found.shape, found.counts, found.fit))}
            args["hf_overrides"] = {"max_position_embeddings": args["max_model_len"]}  # the embedded model has 8192
    return values


@pytest.fixture(scope="module")
def images() -> Images:
    """The images under test, while no other release holds the GPUs."""
    found = images_from_environment()
    if found is None:
        pytest.skip("no images: see `make test-interruptions`")
    run("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "5m", "--ignore-not-found", limit_s=400)
    return found


@pytest.fixture(scope="module")
def karpenter(images: Images) -> Iterator[FakeKarpenter]:
    """The GPU nodes, with the labels of k8s/cluster/karpenter.yaml. Afterwards they have one GPU each."""
    karpenter = FakeKarpenter("")
    gpu_nodes = karpenter.gpu_nodes()
    if len(gpu_nodes) < NUM_NODES:
        pytest.skip(f"it needs {NUM_NODES} GPU nodes: see `make test-interruptions`")
    for node in get("nodes")["items"]:
        name = node["metadata"]["name"]
        kind = "gpu" if name in gpu_nodes else "cpu"
        kubectl("label", "node", name, f"serve-app/nodes={kind}", "topology.kubernetes.io/zone=z", "--overwrite")
    yield karpenter
    for node in gpu_nodes:
        karpenter.offer(node, 1)


@pytest.fixture(params=CASES)
def installed(
    request: pytest.FixtureRequest, karpenter: FakeKarpenter, images: Images, tmp_path: Path
) -> Iterator[tuple[Installed, dict[str, Any]]]:
    """The release of a file, and its values, on nodes with as many GPUs as its own."""
    for node in karpenter.gpu_nodes():
        karpenter.offer(node, instance_of(request.param).num_gpus)
    values, release = adapted(request.param), Installed(request.param)
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    name = release.name
    try:
        command = ("helm", "install", name, str(CHART), "-n", name, "--create-namespace", "-f", str(file))
        run(*command, *images.values()[:4], limit_s=LIMIT_S)
        yield release, values
    finally:
        run("helm", "uninstall", name, "-n", name, "--wait", "--timeout", "5m", "--ignore-not-found", limit_s=400)
        kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def test_every_model_of_the_file_answers_from_as_many_replicas_and_gpus_as_the_file_says(
    installed: tuple[Installed, dict[str, Any]],
) -> None:
    """A model that may go to zero starts for its first request, and where models take turns, for the second model's the first one ends."""
    release, values = installed
    wait_until("a ready ingress", lambda: release.ready_pods("ingress"))
    for model, settings in values["config"]["models"].items():
        require_answer(release, model, settings, one_per_node=values["modelPods"].get("onePerNode", True))


def require_answer(release: Installed, model: str, settings: dict[str, Any], *, one_per_node: bool) -> None:
    """Wait until the model answers, and all its least replicas are ready with their GPUs."""
    wait_until(f"an answer of {model}", lambda: release.answers(model, settings))
    num, gpus = max(1, settings["replicas"]["min"]), settings["gpus_per_replica"]
    wait_until(f"{num} replicas of {model}", lambda: len(release.ready_pods("model", model)) == num)
    pods = [pod["spec"] for pod in release.ready_pods("model", model)]
    assert [int(pod["containers"][0]["resources"]["limits"].get(GPU, 0)) for pod in pods] == [gpus] * num
    if gpus and one_per_node:
        assert len({pod["nodeName"] for pod in pods}) == num
