"""Pods that die under streams: the head's loss is not noticed, a replica's is a pause."""

import pytest

from tests.cluster.kube import kubectl, wait_until
from tests.cluster.release import NAMESPACE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300
AT_ONCE = ("--force", "--grace-period=0")


def test_the_loss_of_the_head_pod_cuts_no_stream(release: Release) -> None:
    workers = {*release.ready_pods("ingress"), *release.ready_pods("model")}
    (head,) = release.ready_pods("head")
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        kubectl("delete", "pod", "-n", NAMESPACE, head, *AT_ONCE)
        wait_until("a new head", lambda: set(release.ready_pods("head")) - {head})
        wait_until("the RayService is ready", release.is_ready)
    seen[0].require_all_complete()
    assert {*release.ready_pods("ingress"), *release.ready_pods("model")} == workers


def test_streams_resume_when_a_replica_pod_is_lost(release: Release) -> None:
    victim, *others = release.ready_pods("model")
    num_replicas = 1 + len(others)
    assert others
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        kubectl("delete", "pod", "-n", NAMESPACE, victim, *AT_ONCE)
        wait_until("as many pods as before", lambda: len(set(release.ready_pods("model")) - {victim}) == num_replicas)
    seen[0].require_all_complete()
