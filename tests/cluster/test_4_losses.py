"""These tests kill, hang or remove pods under streams: Redis and head unnoticed, a replica as a pause, an ingress with its streams."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import get, is_ready, kubectl, wait_until
from tests.cluster.release import NAMESPACE, RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300
LONG_TOKENS = 900  # 29 s at 32 ms a step; what is left of it 15 s before the end of drain_s (30 s) moves
HERE = Path(__file__).parent
AT_ONCE = ("--force", "--grace-period=0")
REDIS_POD = f"{RELEASE}-redis-0"


def test_redis_that_crashes_again_and_again_takes_the_head_away_and_cuts_no_stream(release: Release) -> None:
    """The kubelet starts it at once, then after 10 s, then after 20 s; its data stays. The head ends with the first crash."""
    workers = {*release.ready_pods("ingress"), *release.ready_pods("model")}
    (head,) = release.ready_pods("head")
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        for crashes in range(1, 4):
            kubectl("exec", "-n", NAMESPACE, REDIS_POD, "--", "sh", "-c", "kill 1")
            wait_until(f"Redis after {crashes} crashes", functools.partial(redis_was_restarted, crashes))
        wait_until("a new head", lambda: set(release.ready_pods("head")) - {head})
        wait_until("the RayService is ready", release.is_ready)
    seen[0].require_all_complete()
    assert {*release.ready_pods("ingress"), *release.ready_pods("model")} == workers


def redis_was_restarted(times: int) -> bool:
    """Whether it runs, and has been started again so often."""
    pod = get("pod", REDIS_POD, "-n", NAMESPACE)
    return is_ready(pod) and pod["status"]["containerStatuses"][0]["restartCount"] == times


def test_streams_resume_when_a_replica_pod_is_lost(release: Release) -> None:
    victim, *others = release.ready_pods("model")
    num_replicas = 1 + len(others)
    assert others
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        kubectl("delete", "pod", "-n", NAMESPACE, victim, *AT_ONCE)
        wait_until("as many pods as before", lambda: len(set(release.ready_pods("model")) - {victim}) == num_replicas)
    seen[0].require_all_complete()


def test_an_engine_that_hangs_is_replaced_in_its_pod_and_its_streams_go_on(release: Release) -> None:
    """Nothing of Kubernetes notices a stopped process; its replica does, and Serve starts another one."""
    pods = release.ready_pods("model")
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        (stopped,) = engines(pods[0], stop=True)
        wait_until("another engine", lambda: [pid for pid in engines(pods[0]) if pid != stopped])
        wait_until("as many pods as before", lambda: len(release.ready_pods("model")) == len(pods))
    seen[0].require_all_complete()


def engines(pod: str, *, stop: bool = False) -> list[str]:
    """Return the process ids of the pod's engine cores, stopped by a signal if they are to be."""
    script = (HERE / "engines.py").read_text()
    return kubectl("exec", "-n", NAMESPACE, pod, "-c", "ray-worker", "--", "python", "-c", script, "stop" if stop else "").split()


def test_a_node_drain_takes_a_replica_whose_streams_end_or_move(release: Release) -> None:
    """A label limits the drain to one of the model's pods: a single node has no room for the rest."""
    victim, *others = release.ready_pods("model")
    node = get("pod", victim, "-n", NAMESPACE)["spec"]["nodeName"]
    kubectl("label", "pod", "-n", NAMESPACE, victim, "drained=yes")
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        drain(node, "drained=yes")
        wait_until("as many pods as before", lambda: len(set(release.ready_pods("model")) - {victim}) >= 1 + len(others))
    seen[0].require_all_complete()


def drain(node: str, selector: str) -> None:
    """Evict these pods of the node as its operator does, wait until they are gone, and let the node take pods again."""
    try:
        kubectl("drain", node, f"--pod-selector={selector}", "--delete-emptydir-data", "--timeout=5m", limit_s=330)
    finally:
        kubectl("uncordon", node)


@pytest.mark.slow
def test_a_node_drain_may_take_the_only_ingress_which_ends_its_streams_first(release: Release) -> None:
    """The drain is limited to the ingress: a single node has no room for the rest. New requests fail during the drain, as expected."""
    (ingress,) = wait_until("one ingress pod", lambda: only_pod(release))
    node, name = ingress["spec"]["nodeName"], ingress["metadata"]["name"]
    with release.streams(num=NUM_STREAMS, tokens=TOKENS) as seen:
        drain(node, f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=ingress")
        wait_until("another ingress", lambda: set(release.ready_pods("ingress")) - {name})
    assert seen[0].counts.keys() <= {"complete", "not answered"}, seen[0]
    assert seen[0].num_texts == 1
    # KubeRay and the autoscaler both replace an evicted pod; what is too much goes again.
    wait_until("one ingress pod again", lambda: only_pod(release))


def only_pod(release: Release) -> list[dict[str, Any]]:
    """Return the ingress pod, nothing while there are more."""
    pods = release.pods("ingress")
    return pods if len(pods) == 1 else []
