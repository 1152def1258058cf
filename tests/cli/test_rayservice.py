"""`judge` reads a RayService's status as the result of a rollout."""

import traceback
from typing import Any

import pytest

from serve_app.cli.rayservice import RolloutResult, judge, pod, ray_service
from serve_app.errors import EngineStartFailed
from tests.cli.helpers import cluster, rayservice, unschedulable
from tests.cli.helpers import pod as raw_pod


def judged(service: dict[str, Any], *pods: dict[str, Any]) -> RolloutResult:
    return judge(ray_service(service), [pod(p) for p in pods])


def test_a_service_that_is_ready_and_runs_its_newest_generation_is_done() -> None:
    assert judged(rayservice(), raw_pod("a")) == RolloutResult("done", "cluster demo-old is ready")


@pytest.mark.parametrize(
    "service",
    [
        rayservice(generation=2),
        rayservice(active={}),
        rayservice(conditions={"Ready": "False"}),
        rayservice(conditions={"UpgradeInProgress": "True"}),
        rayservice(active=cluster("demo-old", application="DEPLOYING")),
        rayservice(active=cluster("demo-old", deployment="UPDATING")),
        rayservice(active=cluster("demo-old", deployment="UNHEALTHY")),
        rayservice(active={"rayClusterName": "demo-old"}),
        rayservice(pending=cluster("demo-new")),
    ],
)
def test_anything_less_goes_on(service: dict[str, Any]) -> None:
    assert judged(service).kind == "progressing"


def test_a_line_says_what_is_waited_for() -> None:
    service = rayservice(pending=cluster("demo-new", application="DEPLOYING", deployment="UPDATING"))
    pods = [raw_pod("a", "demo-new"), unschedulable("b", "demo-new"), raw_pod("old")]
    said = (
        "new cluster demo-new: 1 of 2 pods ready; demo DEPLOYING; replica-tiny UPDATING; pod b Unschedulable: 0/1 nodes: no GPU"
    )
    assert judged(service, *pods) == RolloutResult("progressing", said)


NO_MEMORY = "".join(["Traceback\n", *traceback.format_exception_only(EngineStartFailed("tiny", "no memory")), "more"])


def test_what_serve_tries_again_is_told_before_it_gives_up() -> None:
    service = rayservice(pending=cluster("demo-new", application="DEPLOYING", deployment="UPDATING", message=NO_MEMORY))
    said = "replica-tiny UPDATING: the engine core of 'tiny' did not start: no memory"
    assert judged(service).kind == "progressing"
    assert said in judged(service).line.split("; ")


def test_what_serve_gave_up_has_failed_with_our_own_words() -> None:
    service = rayservice(pending=cluster("demo-new", application="DEPLOY_FAILED", deployment="DEPLOY_FAILED", message=NO_MEMORY))
    said = "replica-tiny: the engine core of 'tiny' did not start: no memory"
    assert judged(service) == RolloutResult("failed", said)


def test_a_pod_that_cannot_start_has_failed_and_one_of_the_old_cluster_does_not_count() -> None:
    service = rayservice(pending=cluster("demo-new", application="DEPLOYING"))
    crashed: dict[str, Any] = {"reason": "CrashLoopBackOff", "message": "back-off 40s"}
    assert judged(service, raw_pod("a", "demo-old", **crashed)).kind == "progressing"
    said = "pod a: CrashLoopBackOff: back-off 40s, exit status 137"
    assert judged(service, raw_pod("a", "demo-new", **crashed)) == RolloutResult("failed", said)
    assert judged(service, raw_pod("a", "demo-new", reason="ContainerCreating")).kind == "progressing"
    leaving = raw_pod("a", "demo-new", **crashed)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    assert judged(service, leaving).kind == "progressing"


def test_kuberay_rolling_back_is_a_failure() -> None:
    service = rayservice(pending=cluster("demo-new"), conditions={"RollbackInProgress": "True"})
    assert judged(service) == RolloutResult("failed", "KubeRay rolls back: Because: it is so")


def not_ready(**status: Any) -> tuple[str, str]:
    value = raw_pod("a", ready=False)
    value["status"] |= status
    read = pod(value)
    return read.reason, read.message


def test_an_init_container_that_still_runs_is_named() -> None:
    waiting = {"name": "ray-worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    inits = [{"name": "done", "state": {"terminated": {"exitCode": 0}}}, {"name": "wait-gcs-ready", "state": {"running": {}}}]
    told = not_ready(initContainerStatuses=inits, containerStatuses=[waiting])
    assert told == ("Init", "wait-gcs-ready has not ended yet")


def test_a_container_that_ended_is_named_with_the_last_line_that_it_wrote() -> None:
    ended = {"name": "ray-head", "state": {"terminated": {"exitCode": 1, "message": "first\nRedis is away\n"}}}
    told = not_ready(containerStatuses=[{"name": "autoscaler", "ready": True, "state": {"running": {}}}, ended])
    assert told == ("Ended", "ray-head: exit status 1, after: Redis is away")


def test_a_pod_whose_containers_run_names_those_that_are_not_ready() -> None:
    running: list[dict[str, Any]] = [{"name": name, "ready": name == "a", "state": {"running": {}}} for name in ("a", "b")]
    assert not_ready(containerStatuses=running) == ("NotReady", "b not ready")


def test_a_ready_pod_has_no_reason() -> None:
    assert (pod(raw_pod("a")).reason, pod(raw_pod("a")).message) == ("", "")
