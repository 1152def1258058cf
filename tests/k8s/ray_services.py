"""This module has RayServices as KubeRay 1.6 reports them, and the meaning of each for the health checks of Argo CD and Flux."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Meaning = Literal["Healthy", "Progressing", "Degraded"]


class Case(NamedTuple):
    """A moment of a RayService."""

    name: str
    service: dict[str, Any]
    meaning: Meaning


def condition(kind: str, *, is_true: bool, reason: str = "NonZeroServeEndpoints") -> dict[str, str]:
    return {"type": kind, "status": "True" if is_true else "False", "reason": reason, "message": f"said of {kind}"}


def cluster(name: str, status: str = "") -> dict[str, Any]:
    """Return a cluster's status; "" is that of one whose application has none yet."""
    applications = {"demo": {"status": status, "message": "why", "serveDeploymentStatuses": {}}} if status else {}
    return {"rayClusterName": name, "rayClusterStatus": {}} | ({"applicationStatuses": applications} if applications else {})


def service(*conditions: Mapping[str, str], observed: int = 2, **status: Any) -> dict[str, Any]:
    """Return a RayService of generation 2."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "demo", "namespace": "serve-app", "generation": 2},
        "spec": {},
        "status": {"conditions": list(conditions), "observedGeneration": observed, **status},
    }


READY = condition("Ready", is_true=True)
UNREADY = condition("Ready", is_true=False, reason="ZeroServeEndpoints")
STEADY = condition("UpgradeInProgress", is_true=False)
UPGRADING = condition("UpgradeInProgress", is_true=True)
ROLLING_BACK = condition("RollbackInProgress", is_true=True)
NO_CLUSTER = {"rayClusterStatus": {"desiredCPU": "0"}}
"""The status that KubeRay writes if there is no cluster."""

NEW = {
    "apiVersion": "ray.io/v1",
    "kind": "RayService",
    "metadata": {"name": "demo", "namespace": "serve-app", "generation": 1},
    "spec": {},
}
RUNNING = service(READY, STEADY, activeServiceStatus=cluster("a", "RUNNING"), pendingServiceStatus=NO_CLUSTER)

CASES = [
    Case("it runs", RUNNING, "Healthy"),
    Case("KubeRay has not seen it", NEW, "Progressing"),
    Case("KubeRay has not seen the change", RUNNING | {"status": {**RUNNING["status"], "observedGeneration": 1}}, "Progressing"),
    Case(
        "its first cluster starts",
        service(UNREADY, STEADY, activeServiceStatus=NO_CLUSTER, pendingServiceStatus=cluster("a")),
        "Progressing",
    ),
    Case(
        "its first cluster deploys",
        service(UNREADY, STEADY, activeServiceStatus=NO_CLUSTER, pendingServiceStatus=cluster("a", "DEPLOYING")),
        "Progressing",
    ),
    Case(
        "its first cluster fails",
        service(UNREADY, STEADY, activeServiceStatus=NO_CLUSTER, pendingServiceStatus=cluster("a", "DEPLOY_FAILED")),
        "Degraded",
    ),
    Case("a change is made in place", service(READY, STEADY, activeServiceStatus=cluster("a", "DEPLOYING")), "Progressing"),
    Case("a change in place fails", service(READY, STEADY, activeServiceStatus=cluster("a", "DEPLOY_FAILED")), "Degraded"),
    Case("a replica was lost", service(READY, STEADY, activeServiceStatus=cluster("a", "UNHEALTHY")), "Progressing"),
    Case(
        "a second cluster starts behind one that runs",
        service(READY, UPGRADING, activeServiceStatus=cluster("a", "RUNNING"), pendingServiceStatus=cluster("b")),
        "Progressing",
    ),
    Case(
        "a second cluster runs and has not taken over",
        service(READY, UPGRADING, activeServiceStatus=cluster("a", "RUNNING"), pendingServiceStatus=cluster("b", "RUNNING")),
        "Progressing",
    ),
    Case(
        "a second cluster fails behind one that runs",
        service(
            READY, UPGRADING, activeServiceStatus=cluster("a", "RUNNING"), pendingServiceStatus=cluster("b", "DEPLOY_FAILED")
        ),
        "Degraded",
    ),
    Case(
        "the first failed and the second starts",
        service(READY, UPGRADING, activeServiceStatus=cluster("a", "DEPLOY_FAILED"), pendingServiceStatus=cluster("b")),
        "Progressing",
    ),
    Case("KubeRay rolls back", service(READY, ROLLING_BACK, activeServiceStatus=cluster("a", "RUNNING")), "Degraded"),
    Case("no ingress is ready", service(UNREADY, STEADY, activeServiceStatus=cluster("a", "RUNNING")), "Progressing"),
    Case("its cluster has no application", service(READY, STEADY, activeServiceStatus=cluster("a")), "Progressing"),
    Case(
        "its cluster has no application any more",
        service(READY, STEADY, activeServiceStatus=cluster("a") | {"applicationStatuses": {}}),
        "Progressing",
    ),
    Case("the switch is not over", service(READY, UPGRADING, activeServiceStatus=cluster("b", "RUNNING")), "Progressing"),
]
REFUSED = [
    Case(reason, service(condition("Ready", is_true=False, reason=reason), activeServiceStatus=NO_CLUSTER), "Degraded")
    for reason in ("ValidationFailed", "InitializingTimeout")
]
"""Cases in which KubeRay has given up for good. `serve-app rollout` takes them for progress until its time limit."""
