"""A load test by `helm/loadtest` adds a worker pod, less load takes the pod away again, and no request notices either."""

import pytest

from tests.cluster.kube import wait_until
from tests.cluster.load import LoadTest
from tests.cluster.release import Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

LITTLE, TOKENS = 2, 300  # streams; values.yaml has 1000 outstanding tokens per replica, and the bounds
MIN, MAX = 2, 3


def test_load_adds_a_worker_pod_and_removes_it_again(release: Release) -> None:
    wait_until("the smallest fleet", lambda: len(release.ready_pods("model")) == MIN)
    load = LoadTest(release)
    load.start()
    wait_until("one more model pod", lambda: len(release.ready_pods("model")) == MAX or load.has_ended())
    assert not load.has_ended()
    load.require_restricted()
    with release.streams(num=LITTLE, tokens=TOKENS) as little:
        wait_until("the smallest fleet again", lambda: len(release.pods("model")) == MIN)
    little[0].require_all_complete()
    wait_until("the end of the load test", load.has_ended)
    result = load.result()
    assert (result.failed_gates(), result.states()) == (set(), {"ok"})
    assert {MIN, MAX} <= result.ready_pods()
    assert "<html" in result.files["report.html"]
    load.uninstall()
