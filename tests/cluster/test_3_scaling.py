"""Load adds a worker pod, less of it takes the pod away again, and no request notices either."""

import pytest

from tests.cluster.kube import wait_until
from tests.cluster.release import Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MUCH, LITTLE = 16, 2  # streams of 300 tokens; values.yaml has 1000 outstanding tokens per replica, and the bounds
TOKENS = 300
MIN, MAX = 2, 3


def test_load_adds_a_worker_pod_and_removes_it_again(release: Release) -> None:
    wait_until("the smallest fleet", lambda: len(release.ready_pods("model")) == MIN)
    with release.streams(num=MUCH, tokens=TOKENS) as much:
        wait_until("one more model pod", lambda: len(release.ready_pods("model")) == MAX)
    with release.streams(num=LITTLE, tokens=TOKENS) as little:
        wait_until("the smallest fleet again", lambda: len(release.pods("model")) == MIN)
    much[0].require_all_complete()
    little[0].require_all_complete()
