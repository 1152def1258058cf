"""Ray's own autoscaler, given the RayCluster of the chart, adds and removes the pods of whole replicas over two nodes of 8 GPUs.

The API server, KubeRay's part and the GPUs are simulated.
"""

from typing import Any, cast

from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.kuberay.node_provider import IKubernetesHttpApiClient
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, NodeState
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

from tests.chart.places import NODES
from tests.chart.render import models, render
from tests.test_application import deployments

GROUP = "model-wide"
IDLE_S = 60.0
VALUES = models({"name": "wide", **NODES, "num_cpus": 4, "replicas": {"min": 1, "max": 2}})


class SimulatedCluster(IKubernetesHttpApiClient):  # type: ignore[misc]  # Ray's class is untyped
    """The API server with one RayCluster, and KubeRay, which makes its pods and deletes those that the autoscaler names."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.made = 0
        self.pods: list[str] = []
        self.cluster = {"metadata": {"name": "demo", "namespace": "serving"}, "spec": spec}
        self.reconcile()

    @property
    def group(self) -> dict[str, Any]:
        groups = cast(list[dict[str, Any]], self.cluster["spec"]["workerGroupSpecs"])
        return next(group for group in groups if group["groupName"] == GROUP)

    def reconcile(self) -> None:
        gone = self.group.pop("scaleStrategy", {}).get("workersToDelete", [])
        self.pods = [pod for pod in self.pods if pod not in gone]
        while len(self.pods) < self.group["replicas"]:
            self.pods.append(f"pod-{self.made}")
            self.made += 1

    def get(self, path: str) -> dict[str, Any]:
        if path.startswith("rayclusters/"):
            return self.cluster
        labels = {"ray.io/node-type": "worker", "ray.io/group": GROUP}
        running: dict[str, Any] = {"containerStatuses": [{"state": {"running": {}}}]}
        items = [
            {"metadata": {"name": pod, "labels": labels}, "spec": {"containers": []}, "status": running} for pod in self.pods
        ]
        return {"metadata": {"resourceVersion": "1"}, "items": items}

    def patch(self, path: str, payload: Any, content_type: str = "application/json-patch+json") -> dict[str, Any]:
        for change in payload:
            *_, index, key = change["path"].split("/")
            self.cluster["spec"]["workerGroupSpecs"][int(index)][key] = change["value"]
        self.reconcile()
        return self.cluster

    def delete(self, path: str) -> dict[str, Any]:
        raise AssertionError(path)


class Autoscaler:
    """Ray's scheduler and its provider for KubeRay, over a simulated cluster."""

    def __init__(self) -> None:
        self.kube = SimulatedCluster(render(VALUES).cluster)
        self.provider = KubeRayProvider("demo", {"namespace": "serving"}, gcs_client=None, k8s_api_client=self.kube)
        types = _derive_autoscaling_config_from_ray_cr(self.kube.cluster)["available_node_types"]
        self.types = {
            name: NodeTypeConfig(name, kind["min_workers"], kind["max_workers"], resources=kind["resources"])
            for name, kind in types.items()
            if name != "headgroup"
        }
        self.rounds = 0

    @property
    def offers(self) -> dict[str, float]:
        return dict(self.types[GROUP].resources)

    def judge(self, *, idle: frozenset[str] = frozenset(), pending: int = 0) -> SchedulingReply:
        """Schedule ``pending`` placement groups of two bundles; pods but the ``idle`` ones are held by replicas."""
        (bundles,) = [
            d._replica_config.placement_group_bundles for n, d in deployments(render(VALUES).config).items() if n != "ingress"
        ]
        gangs = []
        for number in range(pending):
            apart = [(ResourceRequestUtil.PlacementConstraintType.ANTI_AFFINITY, f"_PG_{number}", "")]
            gangs.append(GangResourceRequest(requests=[ResourceRequestUtil.make(bundle, apart) for bundle in bundles]))
        instances = [self._instance(pod, is_idle=pod in idle) for pod in self.kube.pods]
        return ResourceDemandScheduler(None).schedule(
            SchedulingRequest(
                disable_launch_config_check=True,
                node_type_configs=self.types,
                idle_timeout_s=IDLE_S,
                gang_resource_requests=gangs,
                current_instances=instances,
            )
        )

    def _instance(self, pod: str, *, is_idle: bool) -> AutoscalerInstance:
        state = NodeState(node_id=pod.encode(), ray_node_type_name=GROUP, idle_duration_ms=90_000 if is_idle else 0)
        state.total_resources.update(self.offers)
        state.available_resources.update(self.offers if is_idle else dict.fromkeys(self.offers, 0.0))
        instance = Instance(
            instance_id=pod,
            status=Instance.RAY_RUNNING,
            instance_type=GROUP,
            node_id=pod,
            node_kind=NodeKind.WORKER,
            cloud_instance_id=pod,
        )
        return AutoscalerInstance(cloud_instance_id=pod, ray_node=state, im_instance=instance)

    def act(self, reply: SchedulingReply) -> None:
        """Do what the scheduler asks for."""
        self.rounds += 1
        self.provider.get_non_terminated()
        if reply.to_launch:
            self.provider.launch({launch.instance_type: launch.count for launch in reply.to_launch}, f"launch-{self.rounds}")
        if reply.to_terminate:
            self.provider.terminate([request.instance_id for request in reply.to_terminate], f"terminate-{self.rounds}")


def test_a_pod_offers_what_a_bundle_asks_for_and_takes_no_second_one() -> None:
    built = deployments(render(VALUES).config)["replica-wide"]._replica_config
    bundles, offered = built.placement_group_bundles, Autoscaler().offers
    assert bundles == [{"CPU": 4.0, "GPU": 8, "serve_app_model_wide": 1.0}] * 2
    assert built.placement_group_strategy == "STRICT_SPREAD"
    assert {name: offered[name] for name in bundles[0]} == bundles[0]


def test_the_pods_follow_from_one_replica_to_two_and_back_to_one() -> None:
    autoscaler = Autoscaler()
    kube = autoscaler.kube
    assert kube.pods == ["pod-0", "pod-1"]
    autoscaler.act(autoscaler.judge(pending=1))
    assert (kube.group["replicas"], kube.pods) == (4, ["pod-0", "pod-1", "pod-2", "pod-3"])
    autoscaler.act(autoscaler.judge())
    assert kube.pods == ["pod-0", "pod-1", "pod-2", "pod-3"]
    autoscaler.act(autoscaler.judge(idle=frozenset({"pod-1", "pod-2"})))  # Ray may have placed a replica on any two
    assert (kube.group["replicas"], kube.pods) == (2, ["pod-0", "pod-3"])


def test_a_pod_that_was_lost_is_replaced_alone_and_the_pod_beside_it_stays() -> None:
    autoscaler = Autoscaler()
    kube = autoscaler.kube
    kube.pods.remove("pod-1")
    kube.reconcile()
    autoscaler.act(autoscaler.judge(idle=frozenset(kube.pods), pending=1))
    assert (kube.group["replicas"], kube.pods) == (2, ["pod-0", "pod-2"])
