"""Helm upgrades under streams that never stop: none is cut."""

import json

import pytest

from tests.cluster.kube import get, run, wait_until
from tests.cluster.release import NAMESPACE, RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300
NUM_REPLICAS = 2  # of values.yaml


def test_a_value_of_the_configuration_changes_in_place(release: Release) -> None:
    cluster, key = release.active_cluster(), release.api_key()
    ingresses = set(release.ready_pods("ingress"))
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade("--set", "config.ingress.max_waiting_requests=999")
        assert f"cluster {cluster} is ready" in release.serve_app("rollout")
        wait_until("none but new ingresses", lambda: not ingresses & set(release.ready_pods("ingress")))
    seen[0].require_all_complete()
    assert release.active_cluster() == cluster
    assert release.api_key() == key


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


def pods_of(cluster: str) -> list[str]:
    """Return the names of a Ray cluster's pods; that of the job which cleans Redis after it is none of them."""
    selector = f"ray.io/cluster={cluster},ray.io/node-type in (head, worker)"
    return [pod["metadata"]["name"] for pod in get("pods", "-n", NAMESPACE, "-l", selector)["items"]]
