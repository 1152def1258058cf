"""This program starts a Ray cluster of two nodes in FOLDER, drains the second, and prints which node an actor on the first hears of.

    python -m tests.replica.draining FOLDER

The actor has a placement group over both nodes, as a replica over two nodes has. Prints `drained NODE` and `heard NODE`.
"""

import sys

import ray
from ray._private import worker
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.replica.node_drain import until_one_drains

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


class Listener:
    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def hear(self) -> str:
        return await until_one_drains(every_s=0.1)


def main(folder: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "temp_dir": folder})
    try:
        second = cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        listener = ray.remote(Listener).options(num_cpus=1, scheduling_strategy=place).remote()
        own = ray.get(listener.node.remote())
        (other,) = {cluster.head_node.node_id, second.node_id} - {own}
        hearing = listener.hear.remote()
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = worker.global_worker.gcs_client.drain_node(other, reason, "test", 0)  # 0: no deadline
        assert accepted, why
        print("drained", other, flush=True)
        print("heard", ray.get(hearing), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
