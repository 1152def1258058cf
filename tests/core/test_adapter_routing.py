"""During a roll-out some replicas have a LoRA adapter and others do not; requests for it go to those that have it."""

import dataclasses

from serve_app.core.events import LinkOpened, RequestsAborted
from tests.core.helpers import arrived, fleet_of, run, start

OLD = LinkOpened("old", 8, weights="old")
NEW = LinkOpened("new", 8, weights="new", adapters=frozenset({70_000}))
PIRATE = dataclasses.replace(arrived("pirate"), adapter=70_000)


def test_a_request_for_an_adapter_goes_only_where_it_was_loaded() -> None:
    fleet = fleet_of()
    run(fleet, OLD, NEW)
    run(fleet, *(dataclasses.replace(arrived(f"r{number}"), adapter=70_000) for number in range(3)))
    assert len(fleet.replicas["new"].held) == 3  # although the other replica is idle
    assert run(fleet, arrived("plain")) == [start("plain", 0, "old")]


def test_a_request_that_waits_for_its_adapter_keeps_no_other_waiting() -> None:
    fleet = fleet_of()
    run(fleet, OLD)
    assert run(fleet, PIRATE) == []
    assert run(fleet, arrived("plain")) == [start("plain", 0, "old")]
    assert run(fleet, NEW) == [start("pirate", 0, "new")]


def test_one_that_waits_for_room_is_served_in_its_turn() -> None:
    fleet = fleet_of()
    run(fleet, dataclasses.replace(NEW, credit=1), arrived("first"))
    assert run(fleet, PIRATE) == []
    assert run(fleet, arrived("later")) == []
    assert run(fleet, RequestsAborted(["first"]))[-1] == start("pirate", 0, "new")
