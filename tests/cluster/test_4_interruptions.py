"""These tests interrupt nodes under streams, as Karpenter and spot markets do. Accelerators are simulated; `FakeKarpenter` is the cloud.

Of one node, a pod counts as what runs on the interrupted node, and the deadline is seconds. With three or more nodes of one pretended GPU
each (`make test-interruptions`), whole nodes are disrupted, with the 120 s of a spot notice.
"""

import shlex
from collections.abc import Iterator

import pytest

from tests.cluster.karpenter import SPOT_NOTICE_S, FakeKarpenter
from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.release import NAMESPACE, Release, pods_of, ray_clusters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NUM_STREAMS, TOKENS = 6, 300
LONG_TOKENS = 900  # 29 s at 32 ms a step
MUCH = 16  # streams; values.yaml wants a third replica at about 10
LITTLE = 2  # streams; with 6, the fleet of a busy machine may want a third replica, for which there is no GPU
SHORT_NOTICE_S = 10.0
"""In place of `SPOT_NOTICE_S`: less than half of drain_s (30 s), so that no stream has been moved when the node ends."""
DRIFT_LIMIT_S = 600.0
"""terminationGracePeriod of the NodePool; in k8s/cluster/karpenter.yaml 30 minutes, longer than these tests wait."""
PATIENCE_S = 30
"""How long `rollout` watches an upgrade that cannot end."""
NUM_REPLICAS = 2


@pytest.fixture
def karpenter() -> Iterator[FakeKarpenter]:
    """Karpenter. Afterwards there are as many GPU nodes as before."""
    karpenter = FakeKarpenter(NAMESPACE)
    yield karpenter
    karpenter.launch_all()


@pytest.fixture
def used_nodes(release: Release, karpenter: FakeKarpenter) -> list[str]:
    """The GPU nodes, each with a replica. The others have ended, so that each further pod waits until Karpenter brings one."""
    if len(karpenter.gpu_nodes()) <= NUM_REPLICAS:
        pytest.skip(f"it needs more than {NUM_REPLICAS} GPU nodes: see `make test-interruptions`")
    wait_until("a ready replica for each model pod", lambda: len(release.ready_pods("model")) == len(release.pods("model")))
    karpenter.remove_empty()
    return karpenter.gpu_nodes()


@pytest.fixture
def nodes(release: Release, karpenter: FakeKarpenter, used_nodes: list[str]) -> list[str]:
    """The same once the fleet is the smallest."""
    wait_for_replicas(release, karpenter)
    karpenter.remove_empty()
    return karpenter.gpu_nodes()


def wait_for_replicas(release: Release, karpenter: FakeKarpenter, num: int = NUM_REPLICAS) -> None:
    """Wait until there are that many model pods and all are ready, while Karpenter brings nodes for those that wait.

    Ray's autoscaler replaces the pod of a replica that drains, and KubeRay replaces it again when it has ended: one pod too many, and in
    the cloud a node for it, until the autoscaler finds it idle.
    """

    def is_done() -> bool:
        karpenter.provision()
        return len(release.ready_pods("model")) == num == len(release.pods("model"))

    wait_until(f"{num} replicas", is_done)


def test_streams_continue_when_a_spot_node_ends_in_the_drain_of_its_replica(release: Release, karpenter: FakeKarpenter) -> None:
    """The next replica's pod waits until Karpenter brings a node; the streams do not."""
    victim = release.pods("model")[0]
    name, node = victim["metadata"]["name"], victim["spec"]["nodeName"]
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        notice = karpenter.notify({node: [name]}, limit_s=SHORT_NOTICE_S)
        karpenter.drain(notice)
        karpenter.take_back(node)
        wait_for_replicas(release, karpenter)
    assert not notice.refused
    assert notice.left == {name}
    seen[0].require_all_complete()


@pytest.mark.slow
def test_a_spot_notice_of_120_s_cuts_no_stream_and_the_node_ends_empty(
    release: Release, karpenter: FakeKarpenter, nodes: list[str]
) -> None:
    """Karpenter brings the next node at the notice, beside the drain."""
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        notice = karpenter.notify({nodes[0]: karpenter.pods_on(nodes[0])}, limit_s=SPOT_NOTICE_S)
        karpenter.launch()
        karpenter.drain(notice)
        karpenter.end(nodes[0])
        wait_for_replicas(release, karpenter)
    assert not notice.left
    seen[0].require_all_complete()


@pytest.mark.slow
def test_of_two_spot_nodes_reclaimed_together_one_serves_until_the_next_node_does(
    release: Release, karpenter: FakeKarpenter, nodes: list[str]
) -> None:
    """The disruption budget keeps one of two pods, but no node: the next replica must be ready before the second node ends."""
    pods = {node: karpenter.pods_on(node) for node in nodes}
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        notice = karpenter.notify(pods, limit_s=SPOT_NOTICE_S)
        assert len(notice.refused) == 1
        karpenter.launch()
        karpenter.drain(notice)
        for node in nodes:
            karpenter.end(node)
        karpenter.launch()
        wait_for_replicas(release, karpenter)
    seen[0].require_all_complete()


@pytest.mark.slow
def test_drift_replaces_every_node_one_at_a_time_and_cuts_no_stream(
    release: Release, karpenter: FakeKarpenter, nodes: list[str]
) -> None:
    """The budget of Drifted is one node: the next is up before the old one drains, and the second drains when the first has ended."""
    with release.streams(num=NUM_STREAMS, tokens=LONG_TOKENS) as seen:
        for node in nodes:
            karpenter.launch()
            notice = karpenter.notify({node: karpenter.pods_on(node)}, limit_s=DRIFT_LIMIT_S)
            karpenter.drain(notice)
            assert not notice.left
            karpenter.end(node)
        wait_for_replicas(release, karpenter)
    seen[0].require_all_complete()


@pytest.mark.slow
@pytest.mark.usefixtures("nodes")
def test_consolidation_ends_a_node_after_its_replica_has_gone_and_none_before(release: Release, karpenter: FakeKarpenter) -> None:
    """WhenEmpty touches no node with a replica. With less load the autoscaler removes a replica first, by a drain."""
    with release.streams(num=MUCH, tokens=TOKENS) as much:
        wait_for_replicas(release, karpenter, NUM_REPLICAS + 1)
        assert karpenter.remove_empty() == []
    with release.streams(num=LITTLE, tokens=TOKENS) as little:
        wait_for_replicas(release, karpenter)
        running = release.ready_pods("model")
        assert len(karpenter.remove_empty()) == 1
        assert release.ready_pods("model") == running
    for seen in (much, little):
        seen[0].require_all_complete()


@pytest.mark.slow
@pytest.mark.usefixtures("used_nodes")
def test_an_upgrade_without_spare_gpus_says_what_it_waits_for_and_its_way_back_cuts_no_stream(
    release: Release,
) -> None:
    """After the rollback KubeRay makes a third Ray cluster, which waits as well, until it is made to forget that."""
    first = release.active_cluster()
    with release.streams(num=LITTLE, tokens=TOKENS) as seen:
        release.upgrade("--set", "ingressPods.podAnnotations.changed=no-spare-gpus")
        said = release.serve_app("rollout", "--timeout-s", str(PATIENCE_S), code=4)
        assert "Insufficient nvidia.com/gpu" in said
        way_back, then = said.split("way back: ")[1].split("and then: ")
        for command in (way_back, then):
            run(*shlex.split(command))
        release.serve_app("rollout")
        wait_until("one Ray cluster", lambda: ray_clusters() == [first])
    seen[0].require_all_complete()


@pytest.mark.slow
@pytest.mark.usefixtures("used_nodes")
def test_with_strategy_none_the_end_of_the_ray_cluster_makes_the_next_and_cuts_no_answer_that_has_begun(
    release: Release,
) -> None:
    """The way of the runbook for fleets without spare GPUs. `rollout` reports the old Ray cluster until it is deleted.

    From then until the new replicas serve, requests are refused or find no ingress.
    """
    first = release.active_cluster()
    with release.streams(num=LITTLE, tokens=TOKENS) as seen:
        release.upgrade("--set-string", "ingressPods.podAnnotations.changed=strategy-none,upgradeStrategy=None")
        assert f"cluster {first} is ready" in release.serve_app("rollout")
        assert ray_clusters() == [first]
        kubectl("delete", "raycluster", "-n", NAMESPACE, first, "--wait=false")
        wait_until("the old pods are gone", lambda: not pods_of(first))
        release.serve_app("rollout")
        wait_until("the new Ray cluster's ingress", lambda: release.active_cluster() != first and release.ready_pods("ingress"))
    counts = dict(seen[0].counts)
    assert counts.pop("complete")
    assert counts.keys() <= {"not answered", "refused with 503"}, seen[0]
    assert seen[0].num_texts == 1


@pytest.mark.slow
def test_a_node_lost_in_an_upgrade_cuts_no_stream_of_either_ray_cluster(
    release: Release, karpenter: FakeKarpenter, used_nodes: list[str]
) -> None:
    """The node ends without notice, with a replica of the old Ray cluster and the pod of one that starts for the new.

    It is the last test: each node keeps two GPUs, and the replicas of the new Ray cluster may be on one node.
    """
    first = release.active_cluster()
    for node in used_nodes:
        karpenter.offer(node, 2)
    with release.streams(num=LITTLE, tokens=LONG_TOKENS) as seen:
        release.upgrade("--set", "ingressPods.podAnnotations.changed=lost-node")
        lost = wait_until("both Ray clusters on a node", lambda: [n for n in used_nodes if {first} < clusters_on(n)])[0]
        karpenter.end(lost)
        karpenter.launch(gpus=2)
        release.serve_app("rollout")
        wait_until("the old pods are gone", lambda: not pods_of(first))
    assert release.active_cluster() != first
    seen[0].require_all_complete()


def clusters_on(node: str) -> set[str]:
    """Return the Ray clusters that have a pod on the node."""
    pods = get("pods", "-n", NAMESPACE, "-l", "ray.io/cluster", "--field-selector", f"spec.nodeName={node}")["items"]
    return {pod["metadata"]["labels"]["ray.io/cluster"] for pod in pods}
