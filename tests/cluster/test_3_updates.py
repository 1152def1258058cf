"""These tests upgrade by helm under endless streams, and no stream is cut."""

import json
from typing import Any

import pytest

from tests.cluster.kube import kubectl, run, wait_until
from tests.cluster.release import MODEL, NAMESPACE, RELEASE, Release, num_gpus, pods_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300
NUM_REPLICAS = 2  # of values.yaml
CANARY, CANARY_TOKENS = "next", 40  # tokens of an answer: a verdict takes some 25 answers of the canary
SLOW = {
    "model": "embedded:smollm2-135m-instruct",
    "simulated": {"profile": "a10g-llama-8b", "time_scale": 4.0},
    "num_cpus": 0.5,
    "engine_args": {"max_model_len": 2048, "max_num_seqs": 64},
    "canary": {"of": MODEL, "share": 0.5},
}


def test_a_release_that_answers_its_golden_prompt_otherwise_takes_no_request_and_is_rolled_back(release: Release) -> None:
    wait_until("no pods left over by an update", lambda: len(release.ready_pods("model")) == NUM_REPLICAS)
    cluster = release.active_cluster()
    golden = json.dumps([{"prompt": "Once upon a time", "expect": "no engine says this", "max_tokens": 8}])
    changes = ("--set", "config.models.sim.replicas.surge=0", "--set-json", f"config.models.sim.golden={golden}")
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade(*changes)
        said = release.serve_app("rollout", code=3)
        assert "golden prompt 'Once upon a time' was answered with" in said, said
        assert len(release.ready_pods("model")) == NUM_REPLICAS - 1
        _, way_back = said.split("way back: ")
        run(*way_back.split())
        release.serve_app("rollout")
        wait_until("as many replicas as before", lambda: len(release.ready_pods("model")) == NUM_REPLICAS)
    seen[0].require_all_complete()
    assert release.active_cluster() == cluster


@pytest.mark.slow
def test_a_canary_that_is_slow_loses_its_share_and_goes_in_the_ray_cluster_in_which_it_came(release: Release) -> None:
    """Both are changes of the configuration in place: the ingresses are replaced, the API key and the pods of the model's group stay.

    Short answers come between the two: the only ingress is replaced by another, and who connects in that moment may be refused.
    """
    cluster, key = release.active_cluster(), release.api_key()
    slow = SLOW | ({"gpus_per_replica": 1} if num_gpus() else {})
    ingresses = set(release.ready_pods("ingress"))
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as long:
        release.upgrade("--set-json", f"config.models.{CANARY}={json.dumps(slow)}")
        assert f"cluster {cluster} is ready" in release.serve_app("rollout")
        wait_until("none but new ingresses", lambda: not ingresses & set(release.ready_pods("ingress")))
        with release.streams(num=NUM_STREAMS, tokens=CANARY_TOKENS) as short:
            wait_until("a verdict on the canary", lambda: canary(release).get("state") == "bad")
            found = canary(release)
            assert "of the model's own" in found["reason"]
            assert canary(release)["requests"] == found["requests"], "it got more after the verdict"
        release.upgrade("--set-json", f"config.models.{CANARY}={json.dumps(slow | {'served': False})}")
        assert f"cluster {cluster} is ready" in release.serve_app("rollout")
        wait_until("the canary's pod is gone", lambda: {group_of(pod) for pod in release.pods("model")} == {f"model-{MODEL}"})
    assert release.active_cluster() == cluster
    assert release.api_key() == key
    for seen in (long, short):
        seen[0].require_all_complete()


@pytest.mark.slow
def test_a_value_of_the_pods_makes_a_new_ray_cluster_and_the_rollback_of_one_that_cannot_start_another(release: Release) -> None:
    """The second change comes while the Ray cluster from before the first still lives on, as it does for a minute and a half.

    An image that no node can get is found by the chart's check job, before anything changes; without that job, by `serve-app rollout`.
    """
    first = release.active_cluster()
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade("--set", "ingressPods.podAnnotations.changed=yes")
        release.serve_app("rollout")
        second = release.active_cluster()
        assert second != first

        refused = release.upgrade("--set-string", "image.tag=0.0.0-none", "--set", "check.timeoutSeconds=20", code=1)
        assert f"{RELEASE}-check" in refused, refused
        assert release.is_ready()
        release.upgrade("--set-string", "image.tag=0.0.0-none", "--set", "check.enabled=false")
        said = release.serve_app("rollout", code=3)
        assert "ImagePull" in said, said
        _, way_back = said.split("way back: ")
        assert release.active_cluster() == second

        run(*way_back.split())  # KubeRay compares with the failed cluster only: it makes another one, and switches to that
        release.serve_app("rollout")
        assert release.active_cluster() not in (first, second)
        release.upgrade(
            "--set", "ingressPods.podAnnotations.changed=yes"
        )  # as it is; the failed check job goes with the next that passes
        wait_until("the first Ray cluster's pods are gone", lambda: not pods_of(first))
    seen[0].require_all_complete()


def canary(release: Release) -> dict[str, Any]:
    """Return what the newest ingress says of the canary; nothing before it knows of one, or while the head cannot be asked."""
    (head,) = release.ready_pods("head")
    ask = ("exec", "-n", NAMESPACE, head, "-c", "ray-head", "--", "serve-app", "status", RELEASE, "--address", "auto", "--json")
    members = json.loads(kubectl(*ask))["members"]
    newest = max((m for m in members if m["role"] == "ingress"), key=lambda m: int(m["epoch"]))
    return dict(newest["load"].get("models", {}).get(CANARY, {}).get("canary", {}))


def group_of(pod: dict[str, Any]) -> str:
    """Return the name of the pod's worker group."""
    return str(pod["metadata"]["labels"]["ray.io/group"])
