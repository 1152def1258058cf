"""These tests check the installed release: helm's own test, answers through the Service, refused values, Pod Security."""

import json
import subprocess
from itertools import pairwise

import pytest

from tests.cluster.kube import get, run
from tests.cluster.release import CHART, MODEL, NAMESPACE, RELEASE, Release, num_gpus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ASK = """
import json, os, sys, httpx
url, path, body = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
headers = {"authorization": "Bearer " + os.environ["API_KEY"]}
with httpx.stream("POST", url + path, json=body, headers=headers, timeout=60) as answer:
    print(json.dumps([answer.status_code, [line for line in answer.iter_lines() if line and line[0] != ":"]]))
"""


def test_helm_test_passes(release: Release) -> None:
    said = run("helm", "test", RELEASE, "-n", NAMESPACE, "--logs", "--timeout", "3m", limit_s=240)
    assert "Phase:          Succeeded" in said, said


def ask(release: Release, path: str, body: dict[str, object]) -> tuple[int, list[str]]:
    status, lines = json.loads(release.python(ASK, release.url, path, json.dumps(body)))
    return status, lines


def test_a_chat_streams_through_the_service(release: Release) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    status, lines = ask(release, "/v1/chat/completions", body)
    assert status == 200
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert len([e for e in events if e["choices"]]) > 10  # streamed, not sent at once
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]


def test_generate_streams_through_the_service(release: Release) -> None:
    status, lines = ask(release, "/generate", {"prompt": "hello", "max_tokens": 20, "stream": True})
    assert status == 200
    texts = [json.loads(line)["text"][0] for line in lines]
    assert len(texts) > 10
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


@pytest.mark.parametrize("component", ["head", "ingress", "model"])
def test_only_model_pods_run_the_cuda_image_where_there_is_one(release: Release, component: str) -> None:
    wanted = release.images.cuda if component == "model" and release.images.cuda else release.images.app
    pods = release.pods(component)
    assert pods
    assert {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {wanted}


def test_without_a_key_nothing_is_answered(release: Release) -> None:
    script = ASK.replace('os.environ["API_KEY"]', '"wrong"')
    status, _ = json.loads(release.python(script, release.url, "/v1/chat/completions", "{}"))
    assert status == 401


def test_status_tells_of_every_pod_and_that_the_rollout_is_done(release: Release) -> None:
    told = json.loads(release.serve_app("status", "--json"))
    assert told["rollout"]["kind"] == "done", told["rollout"]
    ready = {pod for component in ("head", "ingress", "model", "redis") for pod in release.ready_pods(component)}
    assert f"{RELEASE}-redis-0" in ready
    assert ready <= {pod["name"] for pod in told["pods"]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("config.modles=1", "modles"),
        ("image.tag=latest", "latest"),
        ("timeouts.overrides.terminationGracePeriodSeconds=10", "terminationGracePeriodSeconds"),
    ],
)
def test_wrong_values_are_refused_by_the_upgrade(release: Release, wrong: str, said: str) -> None:
    before = get("rayservice", RELEASE, "-n", NAMESPACE)["metadata"]["generation"]
    command = ["helm", "upgrade", RELEASE, str(CHART), "-n", NAMESPACE, "--reuse-values", "--set", wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert get("rayservice", RELEASE, "-n", NAMESPACE)["metadata"]["generation"] == before


def test_a_model_pod_takes_a_gpu_where_there_are_some(release: Release) -> None:
    if not num_gpus():
        pytest.skip("no node offers nvidia.com/gpu")
    containers = [pod["spec"]["containers"][0] for pod in release.pods("model")]
    assert [c["resources"]["limits"]["nvidia.com/gpu"] for c in containers] == ["1"] * len(containers)


def test_a_namespace_with_restricted_pod_security_accepts_every_pod(release: Release) -> None:
    labels = get("namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    ready = {component: len(release.ready_pods(component)) for component in ("head", "ingress", "model", "redis")}
    assert all(ready.values()), ready
    for component in ready:
        for pod in release.pods(component):
            for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True, (component, container["name"])
