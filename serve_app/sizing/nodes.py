"""This module knows what pods the Helm chart makes for a model, and the AWS instances that hold them. Pure.

The pods' sizes are those of `serve-app.modelSizes` in helm/serve-app/templates/_model_pods.tpl; `tests/chart/test_fit_pods.py` compares.
"""

import math
from dataclasses import dataclass

PRICES_OF = "2026-07-20"
"""Day of the prices: on demand, Linux, us-east-1, as the AWS price list said. Source: zz_generated.pricing_aws.go of
github.com/aws/karpenter-provider-aws, 1d927085."""
HOURS_PER_MONTH = 730
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSizes:
    """What a model's pod on GPUs has: as the chart makes it when values say nothing, or as manifests say."""

    cpu_request: float
    cpu_limit: float
    memory_request_gib: float
    memory_limit_gib: float
    shm_gib: float
    """Size limit of /dev/shm, which counts as memory of the pod. KV that no longer fits the GPUs' memory is kept there."""

    def prefetches(self, checkpoint_bytes: int) -> bool:
        """Return whether vLLM reads so large a checkpoint ahead: 90 % of the memory that the limit leaves free must hold it."""
        return 10 * checkpoint_bytes <= 9 * (self.memory_limit_gib - self.memory_request_gib) * GIB  # both have the kept KV

    def limit_of_chart_gib(self, checkpoint_gib: int) -> float:
        """Return the memory limit in GiB that the chart sets with `modelPods.checkpointSize`."""
        return max(self.memory_limit_gib, -(-10 * checkpoint_gib // 9) + self.memory_request_gib)


def pod_sizes(num_gpus: int, offload_gib: float = 0.0) -> PodSizes:
    """Return the sizes of the pod of a replica with so many GPUs, whose memory keeps so many GiB of KV."""
    kept = math.ceil(offload_gib)
    return PodSizes(
        cpu_request=num_gpus + 2,
        cpu_limit=4 + 4 * num_gpus,
        memory_request_gib=4 + 8 * num_gpus + kept,
        memory_limit_gib=8 + 16 * num_gpus + kept,
        shm_gib=2 + num_gpus + kept,
    )


@dataclass(frozen=True, slots=True)
class Instance:
    """An AWS instance type."""

    name: str
    accelerator: str
    num_gpus: int
    vcpus: int
    memory_gib: int
    pods_cpu_m: int
    """CPUs that Kubernetes leaves to pods, in thousandths."""
    pods_memory_mib: int
    """Memory that Kubernetes leaves to pods. Source, as of the CPUs: the reference of instance types in the documentation of Karpenter."""
    usd_per_hour: float | None
    """None: the price list names none; the type is sold in capacity blocks."""

    def replicas(self, num_gpus: int, pod: PodSizes) -> int:
        """Return how many replicas of ``num_gpus`` GPUs the node holds, by GPUs, and CPUs and memory that their pods request."""
        by_cpu = self.pods_cpu_m / (1000 * pod.cpu_request) if pod.cpu_request else math.inf
        by_memory = self.pods_memory_mib / (1024 * pod.memory_request_gib) if pod.memory_request_gib else math.inf
        return int(min(self.num_gpus // num_gpus, by_cpu, by_memory))


INSTANCES = (
    Instance("g4dn.xlarge", "t4", 1, 4, 16, 3920, 14481, 0.526),
    Instance("g4dn.2xlarge", "t4", 1, 8, 32, 7910, 29636, 0.752),
    Instance("g4dn.12xlarge", "t4", 4, 48, 192, 47810, 178933, 3.912),
    Instance("g5.xlarge", "a10g", 1, 4, 16, 3920, 14162, 1.006),
    Instance("g5.2xlarge", "a10g", 1, 8, 32, 7910, 29317, 1.212),
    Instance("g5.4xlarge", "a10g", 1, 16, 64, 15890, 57691, 1.624),
    Instance("g5.12xlarge", "a10g", 4, 48, 192, 47810, 173400, 5.672),
    Instance("g5.48xlarge", "a10g", 8, 192, 768, 191450, 723299, 16.288),
    Instance("g6.xlarge", "l4", 1, 4, 16, 3920, 14162, 0.8048),
    Instance("g6.2xlarge", "l4", 1, 8, 32, 7910, 29317, 0.9776),
    Instance("g6.4xlarge", "l4", 1, 16, 64, 15890, 57691, 1.3232),
    Instance("g6.12xlarge", "l4", 4, 48, 192, 47810, 178933, 4.6016),
    Instance("g6.48xlarge", "l4", 8, 192, 768, 191450, 718987, 13.3504),
    Instance("g6e.xlarge", "l40s", 1, 4, 32, 3920, 29317, 1.861),
    Instance("g6e.2xlarge", "l40s", 1, 8, 64, 7910, 59627, 2.24208),
    Instance("g6e.12xlarge", "l40s", 4, 48, 384, 47810, 360157, 10.49264),
    Instance("g6e.48xlarge", "l40s", 8, 192, 1536, 191450, 1449132, 30.13118),
    Instance("p4d.24xlarge", "a100-40gb", 8, 96, 1152, 95690, 1082712, 21.957642),
    Instance("p4de.24xlarge", "a100-80gb", 8, 96, 1152, 95690, 1082712, 27.44705),
    Instance("p5.4xlarge", "h100", 1, 16, 256, 15890, 240830, 6.88),
    Instance("p5.48xlarge", "h100", 8, 192, 2048, 191450, 1938410, 55.04),
    Instance("p5e.48xlarge", "h200", 8, 192, 2048, 191450, 1938410, None),
    Instance("p5en.48xlarge", "h200", 8, 192, 2048, 191450, 1937332, 63.296),
    Instance("p6-b200.48xlarge", "b200", 8, 192, 2048, 191450, 1937332, 113.9328),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of one type that hold a number of replicas."""

    instance: Instance
    per_node: int
    """Pods of replicas on one node. With more than 1 the chart needs `modelPods.onePerNode: false`."""
    num: int

    @property
    def usd_per_hour(self) -> float | None:
        price = self.instance.usd_per_hour
        return None if price is None else price * self.num

    @property
    def usd_per_month(self) -> float | None:
        """The price of 730 hours."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly * HOURS_PER_MONTH


def nodes_for(accelerator: str, num_gpus: int, pod: PodSizes, replicas: int = 1, *, nodes_each: int = 1) -> list[Nodes]:
    """Return the types with this accelerator whose node holds a pod, the cheapest for all replicas first, those without price last.

    Args:
        num_gpus: GPUs of a pod.
        pod: What it requests.
        nodes_each: Nodes of each replica, with a pod on each.
    """
    found = []
    for instance in INSTANCES:
        if instance.accelerator == accelerator and (per_node := instance.replicas(num_gpus, pod)):
            found.append(Nodes(instance=instance, per_node=per_node, num=max(nodes_each, -(-replicas * nodes_each // per_node))))
    return sorted(found, key=lambda nodes: (nodes.usd_per_hour is None, nodes.usd_per_hour or 0.0, nodes.instance.vcpus))
