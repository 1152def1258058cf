"""Helm upgrades under streams that never stop: none is cut."""

import pytest

from tests.cluster.kube import get, wait_until
from tests.cluster.release import NAMESPACE, RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300


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


def test_a_value_of_the_pods_makes_a_new_ray_cluster(release: Release) -> None:
    old = release.active_cluster()
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade("--set", "ingressPods.podAnnotations.changed=yes")
        release.serve_app("rollout")
        assert release.active_cluster() != old
        wait_until("the old Ray cluster is gone", lambda: ray_clusters() == [release.active_cluster()])
    seen[0].require_all_complete()


def test_an_image_that_is_not_there_fails_the_rollout_and_the_old_release_serves_on(release: Release) -> None:
    before = release.active_cluster()
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade("--set-string", "image.tag=0.0.0-none")
        said = release.serve_app("rollout", code=3)
        assert "ImagePull" in said, said
        assert f"helm rollback {RELEASE}" in said, said
        assert release.active_cluster() == before
        release.rollback()  # KubeRay compares with the failed cluster only: it makes a third one, and switches to that
        release.serve_app("rollout")
        wait_until("one Ray cluster", lambda: ray_clusters() == [release.active_cluster()])
    seen[0].require_all_complete()


def ray_clusters() -> list[str]:
    return [item["metadata"]["name"] for item in get("rayclusters", "-n", NAMESPACE)["items"]]
