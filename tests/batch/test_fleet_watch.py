"""`FleetWatch` decides when the fleet of a machine is restarted, ended or given up. Seconds are numbers here."""

import pytest

from serve_app.batch.fleet_watch import STEADY_S, FleetWatch, Keep, Look

KEEP = Keep(stuck_s=10.0, start_s=100.0, starts=3, linger_s=5.0)
STARTING = Look(answers=False, ready=False)
DEAD = Look(ended="no memory", answers=False, ready=False)


@pytest.fixture
def watch() -> FleetWatch:
    return FleetWatch(KEEP, started_at=0.0)


def test_a_fleet_that_starts_is_waited_for_however_long_its_url_is_silent(watch: FleetWatch) -> None:
    assert [watch.handle(STARTING, now=now) for now in (1.0, 50.0, 100.0)] == ["wait"] * 3
    assert watch.handle(STARTING, now=101.0) == "restart"
    assert watch.why == "the fleet was not ready for 101 s"


def test_one_that_was_ready_and_is_silent_is_stuck(watch: FleetWatch) -> None:
    assert watch.handle(Look(), now=20.0) == "wait"
    assert watch.handle(STARTING, now=30.0) == "wait"
    assert watch.handle(STARTING, now=31.0) == "restart"
    assert watch.why == "the fleet was stuck: its URL has not answered for 11 s"
    watch.started(31.0)
    assert watch.handle(STARTING, now=60.0) == "wait"


def test_one_that_answers_but_has_no_replica_has_as_long_as_a_start(watch: FleetWatch) -> None:
    watch.handle(Look(), now=20.0)
    assert watch.handle(Look(ready=False), now=120.0) == "wait"
    assert watch.handle(Look(ready=False), now=121.0) == "restart"


def test_starts_that_fail_in_a_row_give_it_up_with_the_last_reason(watch: FleetWatch) -> None:
    assert [watch.handle(DEAD, now=now) for now in (1.0, 2.0, 3.0)] == ["restart", "restart", "give up"]
    assert watch.why == "no memory"


def test_a_fleet_that_served_for_long_may_fail_again_and_again(watch: FleetWatch) -> None:
    for begin in (0.0, 1000.0, 2000.0, 3000.0):
        watch.started(begin)
        assert watch.handle(Look(), now=begin + 1.0) == "wait"
        assert watch.handle(Look(), now=begin + 1.0 + STEADY_S) == "wait"
        assert watch.handle(DEAD, now=begin + 100.0) == "restart"


def test_it_ends_when_nobody_has_used_it_for_long_also_while_it_starts_or_is_dead(watch: FleetWatch) -> None:
    for look in (Look(has_users=False), Look(answers=False, ready=False, has_users=False)):
        assert watch.handle(Look(), now=1.0) == "wait"
        assert watch.handle(look, now=6.0) == "wait"
        assert watch.handle(look, now=6.1) == "end"


def test_limits_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Keep.stuck_s is 0; it must be above 0"):
        Keep(stuck_s=0)
