"""A release with the chart's own values: one ingress, one replica, the real embedded model. After the others: a node may be small."""

import pytest

from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import CHART, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAME = NAMESPACE = "serve-app-plain"


def test_the_default_values_serve_a_real_model(release: Release) -> None:
    try:
        run("helm", "install", NAME, str(CHART), "-n", NAMESPACE, "--create-namespace", *release.images.values()[:4])
        release.serve_app("rollout", name=NAME, namespace=NAMESPACE)
        said = run("helm", "test", NAME, "-n", NAMESPACE, "--logs", "--timeout", "3m", limit_s=240)
        assert "Phase:          Succeeded" in said, said
        run("helm", "uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "4m", limit_s=300)
        wait_until("no pods", lambda: not get("pods", "-n", NAMESPACE)["items"])
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
