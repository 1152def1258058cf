"""This test checks that `helm uninstall` leaves nothing behind. It runs last, because the release is gone afterwards.

An uninstall is one long wait, for streams and for KubeRay's job that cleans Redis. Beside it another release comes and goes.
"""

import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import CHART, NAMESPACE, RELEASE, Release, ray_clusters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

UNINSTALL = ("helm", "uninstall", "--wait", "--timeout", "5m")
PLAIN = "serve-app-plain"  # name and namespace
OF_EVERY_NAMESPACE = {"kube-root-ca.crt", "default"}  # the API server's own
NOT_OBJECTS = ("events", "events.events.k8s.io", "pods.metrics.k8s.io")


@pytest.fixture(scope="module")
def uninstalling(release: Release) -> Iterator[subprocess.Popen[str]]:
    """The uninstall of the shared release, begun."""
    wait_until("the Ray cluster that failed in an update is gone", lambda: ray_clusters() == [release.active_cluster()])
    assert release.ready_pods("ingress")
    wait_until("an uninstall in a hurry that says how to go on", says_how_to_go_on)
    with subprocess.Popen([*UNINSTALL, RELEASE, "-n", NAMESPACE], stderr=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.usefixtures("uninstalling")
def test_the_default_values_serve_a_real_model(release: Release) -> None:
    """One ingress, one replica, the embedded model."""
    try:
        run("helm", "install", PLAIN, str(CHART), "-n", PLAIN, "--create-namespace", *release.images.values()[:4])
        release.serve_app("rollout", name=PLAIN, namespace=PLAIN)
        said = run("helm", "test", PLAIN, "-n", PLAIN, "--logs", "--timeout", "3m", limit_s=240)
        assert "Phase:          Succeeded" in said, said
        run(*UNINSTALL, PLAIN, "-n", PLAIN, limit_s=400)
        wait_until("no pods", lambda: not get("pods", "-n", PLAIN)["items"])
    finally:
        kubectl("delete", "namespace", PLAIN, "--ignore-not-found")


def test_uninstall_leaves_nothing_behind(uninstalling: subprocess.Popen[str]) -> None:
    _, said = uninstalling.communicate(timeout=400)
    assert uninstalling.returncode == 0, said
    wait_until("an empty namespace", lambda: not left())


def says_how_to_go_on() -> bool:
    """Uninstall with less time than it takes. On a busy machine the hook's pod may need all of that to start: nothing is said then."""
    command = ["helm", "uninstall", RELEASE, "-n", NAMESPACE, "--timeout", "20s"]
    in_a_hurry = subprocess.run(command, capture_output=True, text=True)
    assert in_a_hurry.returncode == 1, in_a_hurry
    return "run helm uninstall again" in in_a_hurry.stdout + in_a_hurry.stderr


def left() -> list[str]:
    """Return every object of the namespace that Kubernetes did not make itself, as kind/name."""
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    items = get(",".join(kind for kind in kinds if kind not in NOT_OBJECTS), "-n", NAMESPACE)["items"]
    return [f"{i['kind']}/{i['metadata']['name']}" for i in items if i["metadata"]["name"] not in OF_EVERY_NAMESPACE]
