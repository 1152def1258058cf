"""A fleet's description says for each tenant how long its oldest request waits for a first token."""

from dataclasses import replace

from serve_app.core.events import LinkEnd, LinkLost, RequestArrived, RequestsAborted
from serve_app.core.fleet_report import LongestWait, longest_waits, low_priority_waiting
from serve_app.core.tenants import PRIORITIES
from tests.core.helpers import Output, arrived, fleet_of, outputs, run


def asked(request_id: str, tenant: str, *, start_by: float | None = None, max_wait_s: float | None = None) -> RequestArrived:
    return replace(arrived(request_id), tenant=tenant, start_by=start_by, max_wait_s=max_wait_s)


def test_each_tenant_waits_as_long_as_its_oldest_request_without_a_first_token() -> None:
    fleet = fleet_of("a", credit=2)
    run(fleet, asked("r1", "red"), now=1.0)
    run(fleet, asked("r2", "red"), asked("b1", "blue"), now=3.0)
    run(fleet, asked("b2", "blue"), now=6.0)
    assert longest_waits(fleet, 10.0) == {"red": LongestWait(9.0, None), "blue": LongestWait(7.0, None)}
    run(fleet, outputs("a", Output("r1@0", [7])), now=10.0)
    assert longest_waits(fleet, 10.0) == {"red": LongestWait(7.0, None), "blue": LongestWait(7.0, None)}
    run(fleet, RequestsAborted(["b1", "b2"]), now=10.0)
    assert longest_waits(fleet, 11.0) == {"red": LongestWait(8.0, None)}


def test_a_request_that_lost_its_replica_waits_only_if_it_had_no_token() -> None:
    fleet = fleet_of("a")
    run(fleet, asked("r1", "red"), asked("b1", "blue"), outputs("a", Output("b1@0", [7])), now=1.0)
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF), now=5.0)
    assert longest_waits(fleet, 9.0) == {"red": LongestWait(8.0, None)}


def test_a_batch_and_a_request_without_a_tenant_do_not_wait() -> None:
    fleet = fleet_of("a")
    run(fleet, replace(asked("l1", "red"), background=True, priority="background"), asked("r1", ""), now=1.0)
    assert longest_waits(fleet, 9.0) == {}


def test_the_limit_is_the_longest_of_those_of_the_tenants_waiting_requests() -> None:
    """The tenant's own limit is above the model's for red, and below for blue. Further prompts of an HTTP request have none."""
    fleet = fleet_of("a")
    run(fleet, asked("r0", "red"), now=1.0)
    run(fleet, asked("r1", "red", start_by=92.0, max_wait_s=30.0), now=2.0)
    run(fleet, asked("r2", "red", start_by=92.0, max_wait_s=30.0), now=4.0)  # its head came at 2.0
    run(fleet, asked("b1", "blue", start_by=14.0, max_wait_s=30.0), now=4.0)
    assert longest_waits(fleet, 9.0) == {"red": LongestWait(8.0, 90.0), "blue": LongestWait(5.0, 30.0)}


def test_tenants_of_lower_priorities_may_wait() -> None:
    fleet = fleet_of("a")
    run(fleet, replace(asked("r1", "red"), priority="batch"), replace(asked("b1", "blue"), priority="background"), now=1.0)
    assert longest_waits(fleet, 9.0) == {}


def test_requests_of_lower_priorities_wait_until_their_first_token_here_or_at_a_replica() -> None:
    fleet = fleet_of("a", credit=3)
    run(fleet, asked("i1", "red"), replace(asked("b1", "red"), priority="batch"), now=1.0)
    run(fleet, replace(asked("l1", "red"), background=True, priority="background"), now=1.0)
    run(fleet, asked("i2", "red"), replace(asked("b2", "red"), priority="background"), now=2.0)
    assert low_priority_waiting(fleet) == (1, 2)
    run(fleet, outputs("a", Output("b1@0", [7])), now=3.0)
    assert low_priority_waiting(fleet) == (1, 1)


def test_a_first_token_of_a_lower_priority_is_not_late() -> None:
    fleet = fleet_of("a", ttft_s=2.0)
    run(fleet, *(replace(arrived(priority), tenant="red", priority=priority) for priority in PRIORITIES))
    run(fleet, outputs("a", *(Output(f"{priority}@0", [1]) for priority in PRIORITIES)), now=9.0)
    assert (fleet.tally.first_tokens, fleet.tally.late_first_tokens) == (1, 1)
