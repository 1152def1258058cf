"""This test kills the pod of a batch Job of the chart `batch`: another pod continues, and each line has one answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.kube import apply, get, kubectl, run, wait_until
from tests.cluster.release import CHART, MODEL, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

BATCH, SPACE = "answers", "serve-app-batch"
NUM_LINES = 400
AS_ROOT = "import os; os.chown('/data', 10001, 10001)"
READ = "import sys; sys.stdout.write(open('/data/answers.jsonl').read())"


def with_claim(name: str, image: str, script: str, user: int) -> dict[str, Any]:
    """Return a pod that runs a script beside the batch's volume."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    container = {"name": "python", "image": image, "command": ["python", "-c", script], "volumeMounts": mounts}
    spec: dict[str, Any] = {"containers": [container], "restartPolicy": "Never", "securityContext": {"runAsUser": user}}
    spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": SPACE}, "spec": spec}


def phase(name: str) -> str:
    return str(get("pod", name, "-n", SPACE)["status"].get("phase"))


@pytest.fixture
def space(release: Release) -> Iterator[None]:
    """A namespace with the input, the key, and a volume that user 10001 owns, whatever storage the cluster has."""
    lines = [{"id": f"id-{i}", "prompt": f"prompt {i}", "max_tokens": 40} for i in range(NUM_LINES)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    try:
        for kind, name, content in (
            ("ConfigMap", "prompts", {"data": {"prompts.jsonl": text}}),
            ("Secret", "key", {"stringData": {"keys": release.api_key()}}),
            ("PersistentVolumeClaim", "data", {"spec": claim}),
        ):
            apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": SPACE}, **content})
        apply(with_claim("owner", release.images.app, AS_ROOT, 0))
        wait_until("the volume's owner", lambda: phase("owner") == "Succeeded")
        yield
    finally:
        kubectl("delete", "namespace", SPACE, "--ignore-not-found")


@pytest.mark.usefixtures("space")
def test_a_batch_whose_pod_is_killed_goes_on_in_another_and_answers_each_line_once(release: Release) -> None:
    chart = CHART.parent / "batch"
    values = {
        "target": {"url": release.url, "existingSecret": "key"},
        "batch": {"options": ["--no-chat", "--model", MODEL, "--concurrency", "4"]},
        "data": {"existingClaim": "data"},
        "pod": {"resources": {"requests": {"cpu": "50m"}}},
    }
    command = (
        "helm",
        "install",
        BATCH,
        str(chart),
        "-n",
        SPACE,
        *release.images.values()[:4],
        "-f",
        str(chart / "ci" / "job-values.yaml"),
    )
    run(*command, "-f", "-", stdin=json.dumps(values), limit_s=240)
    first = wait_until("the first pod runs", lambda: running_pods())[0]
    wait_until("lines are answered", lambda: "lines/s" in kubectl("logs", "-n", SPACE, first))
    kubectl("delete", "pod", first, "-n", SPACE, "--grace-period=0", "--force")
    wait_until("another pod", lambda: [name for name in running_pods() if name != first])
    wait_until("the end of the Job", lambda: get("job", f"{BATCH}-1", "-n", SPACE)["status"].get("succeeded") == 1)
    apply(with_claim("reader", release.images.app, READ, 10001))
    wait_until("the answers", lambda: phase("reader") == "Succeeded")
    answers = [json.loads(line)["custom_id"] for line in kubectl("logs", "-n", SPACE, "reader").splitlines()]
    assert answers == [f"id-{i}" for i in range(NUM_LINES)]


def running_pods() -> list[str]:
    pods = get("pods", "-n", SPACE, "-l", "app.kubernetes.io/name=batch")["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
