"""An ingress asks Serve's controller for the targets of its models, and does without when Serve does not answer."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from serve_app.ingress import serve_targets
from serve_app.ingress.serve_targets import ServeTargets
from tests.doubles.fleet import MODEL, in_loop, settings

REPLICAS = [
    SimpleNamespace(replica_id="a", state="RUNNING", start_time_s=90.0, node_ip="10.0.0.1"),
    SimpleNamespace(replica_id="b", state="STARTING", start_time_s=95.0, node_ip="10.0.0.2"),
    SimpleNamespace(replica_id="c", state="STARTING", start_time_s=99.0, node_ip=None),
    SimpleNamespace(replica_id="d", state="STOPPING", start_time_s=50.0, node_ip="10.0.0.1"),
]


class Controller:
    """Serve's controller; its first answers raise the ``failures``, in their order."""

    def __init__(self, failures: list[Exception]) -> None:
        self.get_deployment_details = SimpleNamespace(remote=self._details)
        self._failures = failures

    async def _details(self, application: str, deployment: str) -> Any:
        if self._failures:
            raise self._failures.pop()
        assert (application, deployment) == ("app", "replica-tiny")
        return SimpleNamespace(target_num_replicas=3, replicas=REPLICAS)


ANSWER = {
    MODEL: {
        "target": 3,
        "starting": [
            {"replica_id": "b", "since": 95.0, "host": "10.0.0.2"},
            {"replica_id": "c", "since": 99.0, "host": ""},
        ],
    }
}


@pytest.mark.parametrize(
    "failures",
    [
        [],
        [ray.exceptions.RaySystemError("away")],
        [ValueError("no such actor")],
        [KeyError("replica-tiny")],
        [TimeoutError()],
        [AttributeError("get_deployment_details")],
    ],
    ids=repr,
)
@in_loop
async def test_targets_come_from_serve_and_no_failure_of_serve_hides_the_fleet(
    failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = list(failures)
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: Controller(failing))
    targets = ServeTargets("app", settings().models.values())
    assert [await targets.ask() for _ in failures] == [{} for _ in failures]
    assert await targets.ask() == ANSWER


@in_loop
async def test_a_failed_look_for_the_controller_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ray.exceptions.GetTimeoutError("Ray's control store does not answer")]

    def get_actor(*_: object, **__: object) -> Controller:
        if failures:
            raise failures.pop()
        return Controller([])

    monkeypatch.setattr(ray, "get_actor", get_actor)
    targets = ServeTargets("app", settings().models.values())
    assert [await targets.ask(), await targets.ask()] == [{}, ANSWER]


@in_loop
async def test_while_ray_does_not_find_the_controller_one_thread_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looks = threading.Event(), list[int]()

    def get_actor(*_: object, **__: object) -> Controller:
        looks.append(1)
        found.wait()
        return Controller([])

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(serve_targets, "LIMIT_S", 0.01)
    targets = ServeTargets("app", settings().models.values())
    assert [await targets.ask() for _ in range(3)] == [{}, {}, {}]
    found.set()
    monkeypatch.setattr(serve_targets, "LIMIT_S", 60.0)
    assert await targets.ask() == ANSWER
    assert len(looks) == 1
