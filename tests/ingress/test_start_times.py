"""Start times that leases report become events of the fleet."""

import logging
from typing import Any

import pytest

from serve_app.config import ModelSettings
from serve_app.core.events import StartMeasured
from serve_app.ingress.fleet.start_times import StartTimes
from serve_app.membership import Lease
from tests.doubles.fleet import MODEL, settings


def lease(replica_id: str, **load: Any) -> Lease:
    return Lease(replica_id, "replica", "tiny", "127.0.0.1", 1, epoch=1, pid=0, load=load)


def model(least: int) -> ModelSettings:
    tiny = settings().models[MODEL]
    return tiny.model_copy(update={"replicas": tiny.replicas.model_copy(update={"min": least})})


def test_leases_without_a_measured_start_say_nothing_of_one() -> None:
    leases = [lease("a", start_s=9), lease("b"), lease("c", start_s=None), lease("d", start_s=-1.0), lease("e", start_s=1e400)]
    assert list(StartTimes(model(1), no_replica_s=30.0).events(leases)) == [StartMeasured("a", 9.0)]


def test_a_start_that_the_first_request_cannot_outwait_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    times = StartTimes(model(0), no_replica_s=30.0)
    for start_s in (30.0, 50.0, 80.0):
        list(times.events([lease("a", start_s=start_s)]))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "a replica of tiny took 50.0 s to start and timeouts.no_replica_s is 30: with replicas.min 0 the requests that start "
        "the first one are refused before it is there; set timeouts.no_replica_s to 60 or more, or replicas.min to 1"
    )


def test_a_model_that_always_has_a_replica_may_start_slowly(caplog: pytest.LogCaptureFixture) -> None:
    list(StartTimes(model(1), no_replica_s=30.0).events([lease("a", start_s=500.0)]))
    assert caplog.records == []
