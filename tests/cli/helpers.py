"""This module makes RayServices and pods as the API server shows them."""

from typing import Any


def cluster(name: str, application: str = "RUNNING", deployment: str = "HEALTHY", message: str = "") -> dict[str, Any]:
    """The status of one of a RayService's clusters."""
    deployments = {"replica-tiny": {"status": deployment, "message": message}, "ingress": {"status": "HEALTHY"}}
    return {
        "rayClusterName": name,
        "applicationStatuses": {"demo": {"status": application, "message": "", "serveDeploymentStatuses": deployments}},
    }


def rayservice(
    *,
    generation: int = 1,
    observed: int = 1,
    active: dict[str, Any] | None = None,
    pending: dict[str, Any] | None = None,
    conditions: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    redis: str = "",
) -> dict[str, Any]:
    """A RayService `demo`; by default one that is ready."""
    said = {"Ready": "True", "UpgradeInProgress": "False"} | (conditions or {})
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": "demo",
            "namespace": "llm",
            "uid": "1234",
            "generation": generation,
            "annotations": annotations or {},
        },
        "spec": {
            "serveConfigV2": "applications: []",
            **({"rayClusterConfig": {"gcsFaultToleranceOptions": {"redisAddress": redis}}} if redis else {}),
        },
        "status": {
            "observedGeneration": observed,
            "conditions": [{"type": t, "status": s, "reason": "Because", "message": "it is so"} for t, s in said.items()],
            "activeServiceStatus": cluster("demo-old") if active is None else active,
            **({"pendingServiceStatus": pending} if pending else {}),
        },
    }


def pod(
    name: str, cluster_name: str = "demo-old", *, ready: bool = True, group: str = "model-chat", **waiting: Any
) -> dict[str, Any]:
    """A pod of a worker group; ``waiting`` is the state of its container where it does not run."""
    state: dict[str, Any] = {"waiting": waiting} if waiting else {"running": {}}
    last = {"terminated": {"exitCode": 137}} if waiting.get("reason") == "CrashLoopBackOff" else {}
    return {
        "metadata": {"name": name, "labels": {"ray.io/cluster": cluster_name, "ray.io/group": group}},
        "spec": {"nodeName": "node1"},
        "status": {
            "phase": "Pending" if waiting else "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready and not waiting else "False"}],
            "containerStatuses": [{"name": "ray-worker", "restartCount": 2 if last else 0, "state": state, "lastState": last}],
        },
    }


def unschedulable(name: str, cluster_name: str = "demo-old") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}
    labels = {"ray.io/cluster": cluster_name, "ray.io/group": "model-chat"}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Pending", "conditions": [condition]}}


def redis_pod(**waiting: Any) -> dict[str, Any]:
    value = pod("demo-redis-0", **waiting)
    value["metadata"]["labels"] = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "redis"}
    return value


def warning(pod_name: str, reason: str, message: str, at: str = "2026-11-21T00:00:00Z") -> dict[str, Any]:
    return {"involvedObject": {"kind": "Pod", "name": pod_name}, "reason": reason, "message": message, "lastTimestamp": at}
