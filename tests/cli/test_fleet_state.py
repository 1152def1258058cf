"""`fleet_state` has one word and one sentence for every report of a fleet."""

from typing import Any

import pytest

from serve_app.cli.fleet_state import fleet_state, of_release
from serve_app.cli.rayservice import pod, ray_service
from tests.cli.helpers import cluster, rayservice, unschedulable
from tests.cli.helpers import pod as raw_pod
from tests.ui.fake_service import MODEL, ingress, lost, member, starting


def of_serve(status: str, replicas: dict[str, int], *, target: int, ingresses: int = 1, wanted: int = 1) -> dict[str, Any]:
    """The report of `status.collect`, where no ingress has told more."""
    deployments = {
        "ingress": {"replica_states": {"RUNNING": ingresses, "STARTING": wanted - ingresses}, "target": wanted},
        "replica-chat": {"replica_states": replicas, "target": target},
    }
    return {"status": status, "deployments": deployments, "members": []}


def of_ingress(*members: dict[str, Any], target: int, status: str = "", **others: Any) -> dict[str, Any]:
    """The report of `status.asked_by_http`; with a ``status`` of Serve, the one that `status.with_losses` makes."""
    models = {MODEL: {"target": target, "starting": others.pop("starting", [])}}
    report = {"time": 1000.0, "status": status, "deployments": {}, "members": [ingress(), *members], "models": models, "lost": []}
    return report | others


@pytest.mark.parametrize(
    ("report", "word", "said"),
    [
        (of_serve("RUNNING", {"RUNNING": 2}, target=2), "serving", "2 of 2 replicas ready"),
        (of_serve("RUNNING", {}, target=0), "serving", "0 of 0 replicas ready"),
        (
            of_serve("UNHEALTHY", {"RUNNING": 1, "STARTING": 1}, target=2),
            "degraded",
            "1 of 2 replicas ready, 1 starting; requests are answered",
        ),
        (
            of_serve("UNHEALTHY", {"RUNNING": 2}, target=2, ingresses=1, wanted=2),
            "degraded",
            "2 of 2 replicas ready, 1 of 2 ingresses ready; requests are answered",
        ),
        (
            of_serve("DEPLOY_FAILED", {"RUNNING": 2}, target=2),
            "degraded",
            "2 of 2 replicas ready; requests are answered",
        ),
        (
            of_serve("UNHEALTHY", {"STARTING": 2}, target=2),
            "down",
            "0 of 2 replicas ready, 2 starting; requests for replica-chat wait for a replica",
        ),
        (
            of_serve("UNHEALTHY", {"RUNNING": 2}, target=2, ingresses=0),
            "down",
            "2 of 2 replicas ready, 0 of 1 ingresses ready; no request is answered",
        ),
        (
            of_serve("DEPLOY_FAILED", {"STARTING": 1}, target=1),
            "failed",
            "0 of 1 replica ready, 1 starting; requests for replica-chat wait for a replica",
        ),
        (
            of_serve("DEPLOYING", {"STARTING": 1}, target=1, ingresses=0),
            "starting",
            "0 of 1 replica ready, 1 starting, 0 of 1 ingresses ready; no request is answered",
        ),
        (
            of_serve("DEPLOYING", {"RUNNING": 2, "STARTING": 1}, target=2),
            "deploying",
            "2 of 2 replicas ready, 1 starting; requests are answered",
        ),
        (
            of_serve("RUNNING", {"RUNNING": 1, "STARTING": 1}, target=2),
            "scaling",
            "1 of 2 replicas ready, 1 starting; requests are answered",
        ),
        (
            of_serve("DELETING", {"STOPPING": 1}, target=0, ingresses=0, wanted=0),
            "stopping",
            "0 of 0 replicas ready, 1 stopping; no request is answered",
        ),
        ({"status": "NOT_FOUND", "deployments": {}, "members": []}, "not running", "Ray Serve has no application of this name"),
        (of_ingress(member("a"), target=1), "serving", "1 of 1 replica ready"),
        (
            of_ingress(member("a"), target=2, lost=[lost("b", time=990.0)]),
            "degraded",
            "1 of 2 replicas ready, 1 lost; requests are answered",
        ),
        (
            of_ingress(member("a"), target=2, starting=[starting("b", since=990.0)]),
            "starting",
            "1 of 2 replicas ready, 1 starting; requests are answered",
        ),
        # The lost replica is replaced: an ingress shows it for a minute.
        (
            of_ingress(member("a"), member("c"), target=2, status="RUNNING", lost=[lost("b", time=990.0)]),
            "serving",
            "2 of 2 replicas ready, 1 lost",
        ),
    ],
)
def test_a_fleet_has_one_word_and_says_what_is_answered(report: dict[str, Any], word: str, said: str) -> None:
    assert fleet_state(report) == (word, said)


def test_a_model_without_a_replica_is_named_beside_one_that_answers() -> None:
    report = of_serve("UNHEALTHY", {"RUNNING": 1}, target=1)
    report["deployments"]["replica-code"] = {"replica_states": {"STARTING": 1}, "target": 1}
    assert fleet_state(report) == ("degraded", "1 of 2 replicas ready, 1 starting; requests for replica-code wait for a replica")


UNHEALTHY = cluster("demo-old", application="UNHEALTHY", deployment="UNHEALTHY")
FAILED = cluster("demo-new", application="DEPLOY_FAILED", deployment="DEPLOY_FAILED")
ENTRY = raw_pod("in", group="ingress")


@pytest.mark.parametrize(
    ("service", "pods", "word", "said"),
    [
        (rayservice(), [ENTRY, raw_pod("a"), raw_pod("b")], "serving", "2 of 2 model pods ready"),
        (
            rayservice(active=UNHEALTHY),
            [ENTRY, raw_pod("a"), raw_pod("b", ready=False)],
            "degraded",
            "1 of 2 model pods ready, 1 starting; requests are answered",
        ),
        # Serve took a replica away, and Ray has not yet stopped the pod.
        (rayservice(), [ENTRY, raw_pod("a"), raw_pod("b", ready=False)], "serving", "1 of 1 model pod ready, 1 idle"),
        (
            rayservice(active=cluster("demo-old", application="RUNNING", deployment="UPSCALING")),
            [ENTRY, raw_pod("a"), unschedulable("b")],
            "scaling",
            "1 of 2 model pods ready, 1 starting; requests are answered",
        ),
        (
            rayservice(active=UNHEALTHY),
            [ENTRY, unschedulable("a")],
            "down",
            "0 of 1 model pod ready, 1 starting; requests for model-chat wait for a model pod",
        ),
        (
            rayservice(),
            [raw_pod("in", group="ingress", ready=False), raw_pod("a")],
            "down",
            "1 of 1 model pod ready, 0 of 1 ingresses ready; no request is answered",
        ),
        # The first cluster is pending, and its head runs.
        (
            rayservice(active={}, pending=cluster("demo-new", application="", deployment="")),
            [raw_pod("head", "demo-new", group="headgroup"), unschedulable("a", "demo-new")],
            "starting",
            "0 of 1 model pod ready, 1 starting; no request is answered",
        ),
        (
            rayservice(active={}, pending=FAILED),
            [ENTRY, raw_pod("a", "demo-new", ready=False)],
            "failed",
            "0 of 1 model pod ready, 1 starting; no request is answered",
        ),
        # While a second cluster starts, or fails, the first one answers.
        (
            rayservice(pending=FAILED),
            [ENTRY, raw_pod("a"), unschedulable("c", "demo-new")],
            "deploying",
            "1 of 1 model pod ready; requests are answered",
        ),
        (rayservice(active={}), [], "starting", "0 of 0 replicas ready; no request is answered"),
    ],
)
def test_on_kubernetes_pods_stand_for_replicas(service: dict[str, Any], pods: list[dict[str, Any]], word: str, said: str) -> None:
    assert fleet_state(of_release(ray_service(service), [pod(p) for p in pods])) == (word, said)


def test_a_pod_that_stops_answers_no_more() -> None:
    leaving = raw_pod("b")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    report = of_release(ray_service(rayservice()), [pod(p) for p in (ENTRY, raw_pod("a"), leaving)])
    assert fleet_state(report) == ("serving", "1 of 1 model pod ready, 1 stopping")
