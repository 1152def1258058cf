"""Helm upgrades under streams that never stop: none is cut."""

from typing import Any

import pytest

from tests.cluster.kube import wait_until
from tests.cluster.release import RELEASE, Release

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


def test_a_value_of_the_pods_makes_a_new_ray_cluster_and_one_that_cannot_start_is_rolled_back(release: Release) -> None:
    """At once, since an old Ray cluster lives on for more than a minute, and one that failed for more than six."""
    first = release.active_cluster()
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        release.upgrade("--set", "ingressPods.podAnnotations.changed=yes")
        release.serve_app("rollout")
        second = release.active_cluster()
        assert second != first

        release.upgrade("--set-string", "image.tag=0.0.0-none")
        said = release.serve_app("rollout", code=3)
        assert "ImagePull" in said, said
        assert f"helm rollback {RELEASE}" in said, said
        assert release.active_cluster() == second

        release.rollback()  # KubeRay compares with the failed cluster only: it makes another one, and switches to that
        release.serve_app("rollout")
        third = release.active_cluster()
        assert third not in (first, second)
        wait_until(
            "no Ray pods but the new ones",
            lambda: {pod["metadata"]["labels"]["ray.io/cluster"] for pod in ray_pods(release)} == {third},
        )
    seen[0].require_all_complete()
    assert release.active_cluster() == third


def ray_pods(release: Release) -> list[dict[str, Any]]:
    return [pod for component in ("head", "ingress", "model") for pod in release.pods(component)]
