"""This module installs the release under test, sends it requests from a pod, and runs streams during an action."""

import base64
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.kube import LIMIT_S, apply, get, is_ready, kubectl, run, wait_until

HERE = Path(__file__).parent
CHART = HERE.parent.parent / "helm" / "serve-app"
RELEASE, NAMESPACE = "demo", "serve-app-test"
CLIENT_NAMESPACE = "serve-app-client"
MODEL = "sim"
ANSWERS_END_S = 600.0
# Where nodes offer GPUs, be they pretended: a replica holds one, and Kubernetes and Ray count them. The accelerator stays simulated.
# Such nodes may have the taint that keeps other pods off.
GPU_VALUES = (
    *("--set", "config.models.sim.gpus_per_replica=1,modelPods.gpusPerNode=0,modelPods.onePerNode=false"),
    *("--set", "modelPods.tolerations[0].key=nvidia.com/gpu,modelPods.tolerations[0].operator=Exists"),
)


@dataclass(frozen=True)
class Images:
    """Repository and tag of the images under test, which every node can get."""

    app: str
    redis: str
    cuda: str = ""
    """Image of the model pods, if they run the CUDA image; else they run ``app``. Their accelerator is simulated either way."""

    def values(self) -> list[str]:
        """Return helm's arguments that name the images."""
        repository, _, tag = self.app.rpartition(":")
        redis_repository, _, redis_tag = self.redis.rpartition(":")
        prefix = "gcsFaultTolerance.redis.image"
        named = {
            "image.repository": repository,  # these two are what every chart of ours has
            "image.tag": tag,
            f"{prefix}.repository": redis_repository,
            f"{prefix}.tag": redis_tag,
        }
        if self.cuda:
            cuda_repository, _, cuda_tag = self.cuda.rpartition(":")
            named |= {"cudaImage.repository": cuda_repository, "cudaImage.tag": cuda_tag, "modelPods.image": "cuda"}
        return [argument for key, value in named.items() for argument in ("--set-string", f"{key}={value}")]


@dataclass(frozen=True)
class Streams:
    """The results of the clients of `streams.py`."""

    counts: dict[str, int]
    others: list[str]
    """Outcome and detail of the first requests that were not complete."""
    num_texts: int
    """Different answers; the question is the same, greedy and simulated, so 1 unless a resumed stream was wrong."""
    longest_gap_s: float

    def require_all_complete(self) -> None:
        """Raises AssertionError if any request was refused, cut or answered otherwise than the rest."""
        assert set(self.counts) == {"complete"}, self
        assert self.num_texts == 1, self


class Release:
    """One helm release and a client pod in a namespace of its own."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def install(self, *arguments: str) -> None:
        """Make the namespaces, the release with `upgrade`'s arguments and the client, and wait until the first answer could come."""
        for name in (NAMESPACE, CLIENT_NAMESPACE):
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self.upgrade(*arguments)
        apply(client_pod(self.images.app))
        self.wait_ready()
        wait_until("client pod", lambda: is_ready(get("pod", "client", "-n", CLIENT_NAMESPACE)))

    def upgrade(self, *arguments: str, code: int = 0) -> str:
        """`helm upgrade --install` with the tests' values and these arguments, and none of before; return what helm said."""
        command = ("helm", "upgrade", "--install", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(HERE / "values.yaml"))
        gpus = GPU_VALUES if num_gpus() else ()
        return run(*command, *self.images.values(), *gpus, *arguments, limit_s=LIMIT_S, code=code)

    def serve_app(self, command: str, *arguments: str, name: str = RELEASE, namespace: str = NAMESPACE, code: int = 0) -> str:
        """Return what `serve-app status` or `rollout` printed about a release."""
        ours = (sys.executable, "-m", "serve_app.cli.main", command, name, "-n", namespace)
        return run(*ours, *arguments, limit_s=LIMIT_S, code=code)

    def wait_ready(self) -> None:
        """Wait until KubeRay says Ready and the Service has an address."""
        wait_until("RayService Ready", self.is_ready)
        wait_until("ready ingress pod", lambda: self.ready_pods("ingress"))

    def is_ready(self) -> bool:
        """Whether the RayService's condition Ready is true."""
        return self.condition("Ready") == "True"

    def condition(self, name: str) -> str:
        """Return the RayService's condition, "" when it has none of that name."""
        conditions = self.status().get("conditions", [])
        return next((str(c["status"]) for c in conditions if c["type"] == name), "")

    def status(self) -> dict[str, Any]:
        """Return the RayService's status."""
        status: dict[str, Any] = get("rayservice", RELEASE, "-n", NAMESPACE).get("status", {})
        return status

    def active_cluster(self) -> str:
        """Return the name of the Ray cluster that serves."""
        return str(self.status()["activeServiceStatus"]["rayClusterName"])

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Return the component's pods, whatever their state; of Ray's those of the Ray cluster that serves."""
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"
        items: list[dict[str, Any]] = get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        active = self.active_cluster()
        return [pod for pod in items if pod["metadata"]["labels"].get("ray.io/cluster", active) == active]

    def ready_pods(self, component: str) -> list[str]:
        """Return the names of the component's pods that are ready."""
        return [pod["metadata"]["name"] for pod in self.pods(component) if is_ready(pod)]

    def api_key(self) -> str:
        """Return the generated key."""
        data = get("secret", f"{RELEASE}-api-keys", "-n", NAMESPACE)["data"]
        return base64.b64decode(data["keys"]).decode().split()[0]

    def python(self, script: str, *arguments: str, limit_s: float = 120.0) -> str:
        """Run a script in the client pod and return what it printed."""
        return kubectl(*self._in_client("python", "-c", script, *arguments), limit_s=limit_s)

    def _in_client(self, *command: str) -> tuple[str, ...]:
        return ("exec", "-i", "-n", CLIENT_NAMESPACE, "client", "--", "env", f"API_KEY={self.api_key()}", *command)

    @property
    def url(self) -> str:
        """The Service, as pods see it."""
        return f"http://{RELEASE}.{NAMESPACE}"

    @contextmanager
    def streams(self, *, num: int, tokens: int) -> Iterator[list[Streams]]:
        """Have ``num`` clients stream without pause while the block runs; afterwards the list holds what they saw.

        They know the Service's address: on a busy machine the cluster's DNS may fail, and it is not under test.
        """
        seen: list[Streams] = []
        url = f"http://{get('service', RELEASE, '-n', NAMESPACE)['spec']['clusterIP']}"
        script = (HERE / "streams.py").read_text()
        command = ["kubectl", *self._in_client("python", "-c", script, url, MODEL, str(num), str(tokens))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "started\n", f"the clients did not start: {line}"
            try:
                yield seen
            finally:
                rest, _ = process.communicate(timeout=ANSWERS_END_S)
            seen.append(Streams(**json.loads(rest)))
            print(seen[-1])  # pytest's -rP shows the counts of tests that passed


def ray_clusters() -> list[str]:
    """Return the names of the namespace's Ray clusters."""
    return [item["metadata"]["name"] for item in get("rayclusters", "-n", NAMESPACE)["items"]]


def pods_of(cluster: str) -> list[str]:
    """Return the names of a Ray cluster's pods; that of the job which cleans Redis after it is none of them."""
    selector = f"ray.io/cluster={cluster},ray.io/node-type in (head, worker)"
    return [pod["metadata"]["name"] for pod in get("pods", "-n", NAMESPACE, "-l", selector)["items"]]


@functools.cache
def num_gpus() -> int:
    """Return how many GPUs the cluster's nodes offer, or pretend to offer."""
    return sum(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in get("nodes")["items"])


def client_pod(image: str) -> dict[str, Any]:
    """A pod that waits for commands to run."""
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod_security = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    wait = {"name": "client", "image": image, "command": ["sleep", "infinity"], "securityContext": restricted}
    spec = {"containers": [wait], "securityContext": pod_security, "terminationGracePeriodSeconds": 0}
    metadata = {"name": "client", "namespace": CLIENT_NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def images_from_environment() -> Images | None:
    """Return the images named by `make test-cluster` and `test-cluster-cuda`; None where there are none."""
    app, redis = os.environ.get("SERVE_APP_IMAGE"), os.environ.get("SERVE_APP_REDIS_IMAGE")
    return Images(app, redis, os.environ.get("SERVE_APP_CUDA_IMAGE", "")) if app and redis else None
