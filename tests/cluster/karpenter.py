"""`FakeKarpenter` does to nodes what Karpenter does when it disrupts them, so that tests see what a release makes of that.

A disrupted node gets Karpenter's taint, and its pods are evicted as fast as their disruption budgets allow. The node ends when they have
gone, or at its deadline with those that still run. The next node is a machine whose node ended before: its kubelet finds its Node object
again, and has the images. Source: karpenter.sh/docs/concepts/disruption, and docs/concepts/nodepools on terminationGracePeriod.
"""

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.kube import apply, get, is_ready, kubectl, wait_until

TAINT = "karpenter.sh/disrupted"
SPOT_NOTICE_S = 120.0
"""Time between the notice of AWS and the end of the instance."""
GPU = "nvidia.com/gpu"
AT_ONCE = ("--force", "--grace-period=0", "--ignore-not-found")


@dataclass
class Notice:
    """Nodes that are to end, with the pods that are evicted for it."""

    pods: frozenset[str]
    ends_at: float
    """When what is left of the pods ends with its node, on the monotonic clock."""
    refused: set[str] = field(default_factory=set)
    """Pods whose eviction a disruption budget refused at least once."""
    left: frozenset[str] = frozenset()
    """Pods that ended with their node."""


@dataclass
class FakeKarpenter:
    """The pods of one namespace and the nodes that offer GPUs. A test of one node passes the names of the pods that count as its pods."""

    namespace: str
    _ended: list[dict[str, Any]] = field(default_factory=list)
    """Nodes that have ended, as objects to create again."""

    def gpu_nodes(self) -> list[str]:
        """Return the names of the nodes that take no pods but those that tolerate GPUs."""
        nodes = get("nodes")["items"]
        return [n["metadata"]["name"] for n in nodes if any(t["key"] == GPU for t in n["spec"].get("taints", []))]

    def pods_on(self, node: str) -> list[str]:
        """Return the names of the namespace's pods on the node."""
        items = get("pods", "-n", self.namespace, "--field-selector", f"spec.nodeName={node}")["items"]
        return [pod["metadata"]["name"] for pod in items]

    def notify(self, nodes: Mapping[str, Collection[str]], *, limit_s: float) -> Notice:
        """Taint the nodes and ask once for the eviction of their pods. Args: node -> pods; the nodes end after ``limit_s``."""
        for node in nodes:
            kubectl("taint", "node", node, f"{TAINT}:NoSchedule", "--overwrite")
        notice = Notice(frozenset().union(*nodes.values()), time.monotonic() + limit_s)
        self._evict_left(notice)
        return notice

    def drain(self, notice: Notice) -> None:
        """Evict the pods until none is left, or their nodes end; then delete the rest with no grace."""
        wait_until("empty nodes, or their end", lambda: not self._evict_left(notice) or time.monotonic() >= notice.ends_at)
        notice.left = frozenset(self._present(notice.pods))
        if notice.left:
            kubectl("delete", "pod", "-n", self.namespace, *notice.left, *AT_ONCE)

    def _evict_left(self, notice: Notice) -> set[str]:
        """Ask for the eviction of the pods that do not leave yet; return all that exist."""
        there = self._present(notice.pods)
        notice.refused |= {name for name, leaving in there.items() if not leaving and not self._evict(name)}
        return set(there)

    def _present(self, pods: frozenset[str]) -> dict[str, bool]:
        """Return which of the pods exist, and whether each is being deleted."""
        items = get("pods", "-n", self.namespace)["items"]
        return {p["metadata"]["name"]: "deletionTimestamp" in p["metadata"] for p in items if p["metadata"]["name"] in pods}

    def _evict(self, pod: str) -> bool:
        """Ask the Eviction API; return False if a disruption budget refuses."""
        metadata = {"name": pod, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        try:
            kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
        except AssertionError as exc:
            if "TooManyRequests" in str(exc):
                return False
            if "NotFound" not in str(exc):
                raise
        return True

    def take_back(self, node: str) -> None:
        """Let a node that was disrupted but has not ended take pods again."""
        kubectl("taint", "node", node, f"{TAINT}:NoSchedule-")

    def offer(self, node: str, gpus: int) -> None:
        """Have the node pretend to have so many GPUs."""
        status = {"status": {"capacity": {GPU: str(gpus)}}}
        kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        # The kubelet copies the capacity to allocatable with its next status.
        wait_until(f"{node} offers its GPUs", lambda: get("node", node)["status"].get("allocatable", {}).get(GPU) == str(gpus))

    def end(self, node: str) -> None:
        """End the node: its pods end without warning, and its Node object goes."""
        found = get("node", node)
        metadata = {key: found["metadata"][key] for key in ("name", "labels", "annotations")}
        taints = [taint for taint in found["spec"]["taints"] if taint["key"] == GPU]
        kubectl("delete", "node", node)
        self._ended.append({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}})
        if pods := self.pods_on(node):
            kubectl("delete", "pod", "-n", self.namespace, *pods, *AT_ONCE)

    def launch(self, gpus: int = 1) -> str:
        """Bring the node that ended first as the next one, with so many GPUs; return its name when it is ready."""
        manifest = self._ended.pop(0)
        node: str = manifest["metadata"]["name"]
        apply(manifest)
        self.offer(node, gpus)
        wait_until(f"{node} is ready", lambda: is_ready(get("node", node)))
        return node

    def provision(self) -> None:
        """Bring a node if a pod waits for one and none is empty."""
        if self._ended and self._waiting() and all(self.pods_on(node) for node in self.gpu_nodes()):
            self.launch()

    def _waiting(self) -> bool:
        """Whether the scheduler finds no node for one of the namespace's pods."""
        pods = get("pods", "-n", self.namespace)["items"]
        conditions = [condition for pod in pods for condition in pod["status"].get("conditions", [])]
        return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)

    def launch_all(self) -> None:
        """Bring every node that has ended."""
        while self._ended:
            self.launch()

    def remove_empty(self) -> list[str]:
        """Consolidate by the policy WhenEmpty: end the nodes without pods of the namespace; return their names."""
        empty = [node for node in self.gpu_nodes() if not self.pods_on(node)]
        for node in empty:
            self.end(node)
        return empty
