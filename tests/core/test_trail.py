"""The fleet records the attempts, first token and gaps of each request, for the ledger and for traces."""

from types import SimpleNamespace

from serve_app.core.events import LinkEnd, LinkLost, LinkOpened, RequestsAborted
from serve_app.core.fleet import FleetState
from serve_app.core.load import EngineLoad
from serve_app.core.request import Resume
from serve_app.core.trail import TAKEN_BACK, WITHOUT_KV, Route, Trail
from tests.core.helpers import Output, arrived, fleet_of, outputs, run


def trail_of(fleet: FleetState) -> Trail:
    """Return the trail of the only request."""
    (request,) = fleet.requests.values()
    return request.trail


def test_a_request_that_waits_and_is_answered_was_started_once() -> None:
    fleet = fleet_of()
    run(fleet, arrived("r"), now=1.0)
    trail = trail_of(fleet)
    run(fleet, LinkOpened("a", 8), now=3.0)
    run(fleet, outputs("a", Output("r@0", [7])), now=4.0)
    run(fleet, outputs("a", Output("r@0", [8], finish_reason="stop")), now=5.0)
    assert (trail.replicas, trail.ends, trail.end) == (["a"], ["stop"], "stop")
    assert (trail.started_at, trail.first_token_at, trail.gaps_s) == (3.0, 4.0, [])


def test_what_the_engine_reports_with_the_first_token_is_kept() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), now=1.0)
    trail = trail_of(fleet)
    events = [SimpleNamespace(type=kind, timestamp=at) for kind, at in ((1, 1.5), (2, 2.5), (3, 3.0), (2, 3.5))]
    first = Output("r@0", [7], events=events, prefill_stats=SimpleNamespace(num_cached_tokens=16))
    run(fleet, outputs("a", first), now=4.0)
    run(fleet, outputs("a", Output("r@0", [8], events=[SimpleNamespace(type=2, timestamp=4.5)])), now=5.0)
    assert (trail.starts, trail.scheduled_at, trail.cached_tokens) == ([1.0], 2.5, 16)


def test_a_gap_lasts_from_the_last_token_before_a_loss_to_the_first_new_one_after_it() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r", Resume.REPLAY))
    trail = trail_of(fleet)
    (first,) = trail.replicas
    other = {"a": "b", "b": "a"}[first]
    run(fleet, outputs(first, Output("r@0", [7])), now=1.0)
    run(fleet, outputs(first, Output("r@0", [8])), now=2.0)
    run(fleet, LinkLost(first, LinkEnd.UNRESPONSIVE), now=9.0)
    run(fleet, outputs(other, Output("r@1", [7, 8])), now=10.0)  # repeated: the client gets nothing
    assert trail.gaps_s == []
    run(fleet, outputs(other, Output("r@1", [9])), now=12.0)
    run(fleet, outputs(other, Output("r@1", [10], finish_reason="length")), now=13.0)
    assert (trail.replicas, trail.ends, trail.gaps_s) == ([first, other], ["unresponsive", "length"], [10.0])


def test_a_loss_before_the_first_token_leaves_no_gap() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"))
    trail = trail_of(fleet)
    run(fleet, LinkLost("a", LinkEnd.ENGINE_DIED), LinkOpened("b", 8), now=5.0)
    run(fleet, outputs("b", Output("r@1", [7])), now=6.0)
    run(fleet, outputs("b", Output("r@1", [8])), now=7.0)
    assert (trail.ends, trail.first_token_at, trail.gaps_s) == (["engine_died"], 6.0, [])


def test_an_attempt_that_this_ingress_took_back_was_moved() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r0"), outputs("a", Output("r0@0", [1])), arrived("r1"))
    waits = fleet.requests["r1"]
    fleet.replicas["a"].load = EngineLoad(waiting=1)
    run(fleet, LinkOpened("b", 8))
    assert (waits.trail.replicas, waits.trail.ends) == (["a", "b"], ["moved"])
    assert [(move.attempt, move.cause, move.result) for move in waits.trail.moves] == [(0, TAKEN_BACK, WITHOUT_KV)]


def test_each_attempt_has_the_numbers_behind_the_choice_of_its_replica() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r0", prompt_tokens=5, max_tokens=7), arrived("r1"))
    assert [request.trail.routes for request in fleet.requests.values()] == [[Route(0, 0, 0.0)], [Route(0, 12, 0.0)]]


def test_an_end_that_the_front_end_made_is_named_by_its_outcome() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"))
    trail = trail_of(fleet)
    run(fleet, RequestsAborted(["r"], "complete"))
    assert (trail.replicas, trail.ends, trail.end) == (["a"], [], "complete")
