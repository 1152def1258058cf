from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, RequestsAborted, StartMeasured, Ticked
from serve_app.core.fleet import WAKE_EVERY_S
from serve_app.core.instructions import FailRequest, WakeReplica
from serve_app.core.load import EngineLoad
from tests.core.helpers import Output, arrived, fleet_of, heartbeat, outputs, run, start


def asleep(replica_id: str) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1), draining=True, sleeping=True)


def test_a_request_wakes_a_sleeping_replica_and_starts_when_it_is_awake() -> None:
    fleet = fleet_of("a")
    assert run(fleet, asleep("a")) == []
    assert run(fleet, arrived("r"), now=1.0) == [WakeReplica("a")]
    assert run(fleet, heartbeat("a"), now=2.0) == [start("r", 0, "a")]


def test_the_wish_is_repeated_while_the_request_waits_and_no_longer() -> None:
    fleet = fleet_of("a")
    run(fleet, asleep("a"), arrived("r"), now=1.0)
    assert run(fleet, arrived("s"), now=1.5) == []
    assert run(fleet, Ticked(), now=1.0 + WAKE_EVERY_S) == [WakeReplica("a")]
    run(fleet, RequestsAborted(["r", "s"]), now=2.5)
    assert run(fleet, Ticked(), asleep("a"), now=9.0) == []


def test_no_replica_is_woken_while_another_takes_requests() -> None:
    fleet = fleet_of("a", "b", credit=1)
    assert run(fleet, asleep("a"), arrived("r"), arrived("s"), now=1.0) == []


def test_a_replica_that_ends_is_not_woken() -> None:
    fleet = fleet_of("a")
    assert run(fleet, heartbeat("a", draining=True), arrived("r"), now=1.0) == []


def test_a_new_ingress_wakes_the_replica_for_what_waits_there_already() -> None:
    fleet = fleet_of()
    run(fleet, arrived("r"), LinkOpened("a", 8, draining=True))
    assert run(fleet, asleep("a"), now=1.0) == [WakeReplica("a")]


def test_a_wake_that_takes_too_long_ends_the_request_as_a_start_does() -> None:
    fleet = fleet_of("a", no_replica_s=10.0)
    run(fleet, asleep("a"), arrived("r"))
    (failed, *_) = run(fleet, asleep("a"), Ticked(), now=11.0)
    assert isinstance(failed, FailRequest)
    assert failed.error.code == "no_replica"
    assert "no engine of 'tiny' is awake" in str(failed.error)


def test_a_request_that_a_sleeping_engine_refuses_comes_back_sooner_than_after_a_start() -> None:
    fleet = fleet_of("a", no_replica_s=10.0, retry_after_s=2.0)
    run(fleet, StartMeasured("a", 90.0), asleep("a"))
    assert fleet.refusals.retry_after_s() == 2.0
    run(fleet, heartbeat("a", draining=True))
    assert fleet.refusals.retry_after_s() == 90.0


def test_a_sleeping_replica_is_woken_for_an_answer_that_no_other_replica_can_continue() -> None:
    """During an update, the old replica sleeps while the new one takes requests."""
    fleet = fleet_of()
    run(
        fleet,
        LinkOpened("old", 8, weights="old"),
        arrived("r"),
        outputs("old", Output("r@0", [7])),
        LinkLost("old", LinkEnd.SAID_GOODBYE),
    )
    run(fleet, LinkOpened("new", 8, weights="new"), LinkOpened("old", 8, draining=True, weights="old"))
    assert run(fleet, asleep("old"), now=1.0) == [WakeReplica("old")]
    assert run(fleet, arrived("s"), now=1.5) == [start("s", 0, "new")]
