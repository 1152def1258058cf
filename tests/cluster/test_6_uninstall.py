"""`helm uninstall` leaves nothing behind. The last file: the release is gone afterwards."""

import pytest

from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import NAMESPACE, RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

OF_EVERY_NAMESPACE = {"kube-root-ca.crt", "default"}  # the API server's own
NOT_OBJECTS = ("events", "events.events.k8s.io", "pods.metrics.k8s.io")


def test_uninstall_leaves_nothing_behind(release: Release) -> None:
    assert release.ready_pods("ingress")
    run("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "4m", limit_s=300)
    wait_until("an empty namespace", lambda: not left())


def left() -> list[str]:
    """Return every object of the namespace that somebody made, as kind/name."""
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    items = get(",".join(kind for kind in kinds if kind not in NOT_OBJECTS), "-n", NAMESPACE)["items"]
    return [f"{i['kind']}/{i['metadata']['name']}" for i in items if i["metadata"]["name"] not in OF_EVERY_NAMESPACE]
