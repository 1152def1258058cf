"""The clock of batches follows time, and no step of a machine's clock that is taken back. Times are numbers."""

from types import SimpleNamespace

import pytest

from serve_app.batch.clock import SETTLE_S, BatchClock

DAY_S = 86_400.0


@pytest.fixture
def machine() -> SimpleNamespace:
    """Return a machine that started at 0 of its monotonic clock, when it was 1,000 by the time of day."""
    made = SimpleNamespace(at=0.0, wrong_by=0.0)
    made.clock = BatchClock(lambda: 1000.0 + made.at + made.wrong_by, lambda: made.at)
    return made


def test_it_is_the_time_of_day(machine: SimpleNamespace) -> None:
    machine.at = 5.0
    assert machine.clock.time() == 1005.0


def test_it_follows_a_time_service_that_moves_the_clock_little_by_little(machine: SimpleNamespace) -> None:
    for second in range(200):
        machine.at, machine.wrong_by = float(second), second * 0.5
        assert machine.clock.time() == 1000.0 + second * 1.5


@pytest.mark.parametrize("wrong_by", [25 * 3600.0, 40 * DAY_S, -DAY_S])
def test_a_step_that_is_taken_back_never_counts(machine: SimpleNamespace, wrong_by: float) -> None:
    for second in range(0, 500, 10):
        machine.at, machine.wrong_by = float(second), wrong_by
        assert machine.clock.time() == 1000.0 + second
    machine.at, machine.wrong_by = 500.0, 0.0
    assert machine.clock.time() == 1500.0
    machine.at, machine.wrong_by = 500.0 + SETTLE_S, wrong_by  # another step, long after the first
    assert machine.clock.time() == 1500.0 + SETTLE_S


def test_a_step_that_stays_is_believed_after_ten_minutes(machine: SimpleNamespace) -> None:
    machine.wrong_by = DAY_S
    assert machine.clock.time() == 1000.0
    machine.at = SETTLE_S
    assert machine.clock.time() == 1000.0 + DAY_S + SETTLE_S


def test_with_a_database_only_its_clock_counts(machine: SimpleNamespace) -> None:
    assert not machine.clock.is_settled()
    machine.wrong_by = 40 * DAY_S
    machine.clock.follow(2000.0)
    machine.at = 10 * SETTLE_S
    assert machine.clock.time() == 2000.0 + 10 * SETTLE_S
    assert machine.clock.is_settled()


def test_a_clock_is_settled_ten_minutes_after_its_process_began(machine: SimpleNamespace) -> None:
    machine.at = SETTLE_S - 1
    assert not machine.clock.is_settled()
    machine.at = SETTLE_S
    assert machine.clock.is_settled()


@pytest.mark.parametrize(("since", "passed"), [(999, False), (1000, True)])
def test_a_moment_of_an_earlier_process_has_passed_only_by_a_settled_clock(
    machine: SimpleNamespace, since: int, passed: bool
) -> None:
    machine.at = 10.0
    assert machine.clock.has_passed(1005.0, since=since) == passed
    assert not machine.clock.has_passed(1011.0, since=since)
    machine.at = SETTLE_S
    assert machine.clock.has_passed(1005.0, since=since)


def test_a_clock_that_began_wrong_and_is_mended_is_not_settled_until_the_step_is_believed(machine: SimpleNamespace) -> None:
    machine.at, machine.wrong_by = SETTLE_S - 1, -40 * DAY_S
    assert not machine.clock.is_settled()
    machine.at = SETTLE_S
    assert not machine.clock.has_passed(1005.0, since=999)
    machine.at = 2 * SETTLE_S
    assert machine.clock.is_settled()
    assert not machine.clock.has_passed(1005.0, since=999)
