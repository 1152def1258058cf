"""Suspects are tried alone, and requests present at two crashes are refused; in the fleet as a whole, because only it starts requests."""

import pytest

from serve_app.core.events import (
    BlocksReported,
    Event,
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    RequestsAborted,
    Ticked,
    TrialBegan,
)
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import describe
from serve_app.core.instructions import AbortAttempts, DeliverOutputs, FailRequest, Instruction, PassTrial
from serve_app.core.load import EngineLoad
from serve_app.core.quarantine import MAX_OWN, Quarantine
from serve_app.core.request import Resume
from serve_app.errors import RequestQuarantined
from tests.core.helpers import Output, arrived, fleet_of, outputs, run, same, start

BLAMED = [LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD, LinkEnd.BROKE_OFF]


def after_a_crash(*arrivals: Event, credit: int = 8, end: LinkEnd = LinkEnd.ENGINE_DIED) -> FleetState:
    """Return a fleet of b and c that has lost a, with the requests that had arrived."""
    fleet = fleet_of("a", quarantine_s=600.0)
    run(fleet, *arrivals, LinkLost("a", end), LinkOpened("b", credit))
    return fleet


def refused(instruction: Instruction, request_id: str, blocked_s: float) -> bool:
    assert isinstance(instruction, FailRequest)
    return instruction.request_id == request_id and same(instruction.error, RequestQuarantined(blocked_s=blocked_s))


@pytest.mark.parametrize("end", BLAMED)
def test_a_suspect_whose_trial_ends_with_its_replica_is_quarantined_and_its_like_refused_for_the_stated_time(
    end: LinkEnd,
) -> None:
    fleet = after_a_crash(arrived("r"), end=end)
    run(fleet, TrialBegan("r@1"))
    (failure,) = run(fleet, LinkLost("b", end), now=10.0)
    assert refused(failure, "r", 600.0)
    run(fleet, LinkOpened("c", 8), now=10.0)
    (refusal,) = run(fleet, arrived("again", like="r"), now=110.0)
    assert refused(refusal, "again", 500.0)
    assert run(fleet, arrived("other"), now=110.0) == [start("other", 0, "c")]
    assert (fleet.outcomes, describe(fleet)["blocked"], fleet.tally.requests) == ({"quarantined": 1, "blocked": 1}, 1, 2)
    run(fleet, HeartbeatArrived("c", EngineLoad(1, 0, 0, 0.0), draining=False), Ticked(), now=610.0)
    assert describe(fleet)["blocked"] == 0
    assert run(fleet, arrived("later", like="r"), now=610.0) == [start("later", 0, "c")]


def test_a_suspect_that_only_stood_in_line_is_tried_again() -> None:
    fleet = after_a_crash(arrived("guilty"), arrived("innocent"))
    run(fleet, LinkOpened("c", 8), TrialBegan("guilty@1"))
    failure, again = run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED))
    assert refused(failure, "guilty", 600.0)
    assert again == start("innocent", 2, "c", suspect=True)
    assert fleet.requests["innocent"].deaths == 1


@pytest.mark.parametrize("resume", [Resume.CONTINUE, Resume.REPLAY])
def test_a_trial_ends_with_the_first_new_token_and_then_the_request_is_no_suspect(resume: Resume) -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r", resume), outputs("a", Output("r@0", [7])), LinkLost("a", LinkEnd.ENGINE_DIED), LinkOpened("b", 8))
    run(fleet, TrialBegan("r@1"))
    if resume is Resume.REPLAY:
        assert run(fleet, outputs("b", Output("r@1", [7]))) == [], "repeated tokens did not end the first engine either"
    new = Output("r@1", [8])
    assert run(fleet, outputs("b", new)) == [DeliverOutputs([new]), PassTrial("b", "r@1")]
    assert run(fleet, LinkOpened("c", 8), LinkLost("b", LinkEnd.SAID_GOODBYE))[0].suspect is False  # type: ignore[union-attr]


def test_a_suspect_that_ends_with_its_first_output_needs_no_word() -> None:
    fleet = after_a_crash(arrived("r", Resume.RESTART), arrived("s"))
    run(fleet, TrialBegan("r@1"))
    done, last = Output("r@1", [], finish_reason="stop"), Output("s@1", [7], finish_reason="stop")
    assert run(fleet, outputs("b", done)) == [DeliverOutputs([done])]
    assert run(fleet, TrialBegan("s@1"), outputs("b", last)) == [DeliverOutputs([last])]
    assert fleet.outcomes == {"complete": 2}


@pytest.mark.parametrize("end", [e for e in LinkEnd if e not in BLAMED])
def test_a_request_whose_replica_went_for_a_reason_of_its_own_is_no_suspect(end: LinkEnd) -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), LinkLost("a", end))
    assert run(fleet, LinkOpened("b", 8)) == [start("r", 1, "b")]


@pytest.mark.parametrize("end", BLAMED)
def test_a_request_that_was_never_sent_to_its_replica_is_no_suspect(end: LinkEnd) -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("sent"), arrived("unsent"), LinkLost("a", end, frozenset({"unsent@0"})))
    assert run(fleet, LinkOpened("b", 8)) == [start("sent", 1, "b", suspect=True), start("unsent", 1, "b")]
    assert (fleet.requests["sent"].trail.ends, fleet.requests["unsent"].trail.ends) == ([end.name.lower()], ["moved"])


def test_a_replica_that_goes_by_itself_in_a_trial_says_nothing_of_the_suspect() -> None:
    fleet = after_a_crash(arrived("r"))
    run(fleet, TrialBegan("r@1"))
    assert run(fleet, LinkOpened("c", 8), LinkLost("b", LinkEnd.SAID_GOODBYE)) == [start("r", 2, "c", suspect=True)]


def test_a_replica_that_is_linked_again_was_brought_down_by_no_request() -> None:
    fleet = after_a_crash(arrived("r"), end=LinkEnd.BROKE_OFF)
    run(fleet, TrialBegan("r@1"), LinkOpened("a", 8))
    assert run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED)) == [start("r", 2, "a", suspect=True)]


def test_suspects_are_spread_and_those_that_are_alike_are_tried_on_one_replica() -> None:
    fleet = fleet_of("a", quarantine_s=600.0)
    run(fleet, *(arrived(i, like="poison") for i in ("r0", "r1", "r2")), arrived("s"), LinkLost("a", LinkEnd.ENGINE_DIED))
    run(fleet, LinkOpened("c", 8), LinkOpened("b", 2))  # c first: it takes them all until b is there
    run(fleet, LinkLost("c", LinkEnd.SAID_GOODBYE))
    held = [*fleet.replicas["b"].held]
    assert (held, [*fleet.waiting]) == (["r0", "r1"], ["r2", "s"])
    assert run(fleet, LinkOpened("d", 8)) == [start("s", 2, "d", suspect=True)], (
        "r2 waits for the request like it, and for no other"
    )
    run(fleet, TrialBegan("r0@2"))
    failures = run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED))
    assert [refused(f, i, 600.0) for f, i in zip(failures, ("r0", "r1", "r2"), strict=True)] == [True] * 3
    assert fleet.outcomes == {"quarantined": 3}


def test_one_that_waits_for_its_like_goes_anywhere_once_that_has_passed() -> None:
    fleet = after_a_crash(arrived("r0", like="r"), arrived("r1", like="r"), credit=1)
    assert run(fleet, LinkOpened("c", 8)) == []
    new = Output("r0@1", [7])
    passed = [DeliverOutputs([new]), PassTrial("b", "r0@1"), start("r1", 1, "c", suspect=True)]
    assert run(fleet, TrialBegan("r0@1"), outputs("b", new)) == passed


def test_the_abort_of_a_suspect_frees_its_like() -> None:
    fleet = after_a_crash(arrived("r0", like="r"), arrived("r1", like="r"), credit=1)
    run(fleet, LinkOpened("c", 8))
    aborted = [AbortAttempts("b", ("r0@1",)), start("r1", 1, "b", suspect=True)]
    assert run(fleet, RequestsAborted(["r0"])) == aborted


def test_a_suspect_is_not_taken_from_the_queue_of_an_engine() -> None:
    fleet = after_a_crash(arrived("r"))
    assert run(fleet, HeartbeatArrived("b", EngineLoad(9, 0, 1, 0.9), draining=False), LinkOpened("c", 8)) == []


def test_what_another_ingress_has_quarantined_is_refused_here_and_its_time_is_not_passed_on() -> None:
    fleet = fleet_of("a", credit=1, quarantine_s=600.0)
    run(fleet, arrived("first"), arrived("waits", like="poison"), arrived("r", like="poison"))
    failures = run(fleet, BlocksReported([("poison", 300.0)]), now=1.0)
    assert [refused(f, i, 300.0) for f, i in zip(failures, ("waits", "r"), strict=True)] == [True, True]
    run(fleet, BlocksReported([("poison", 600.0)]), now=2.0)
    (refusal,) = run(fleet, arrived("next", like="poison"), now=2.0)
    assert refused(refusal, "next", 299.0), "a known block keeps its end"
    assert fleet.quarantine.own(now=2.0) == []


def test_own_blocks_are_reported_with_the_time_that_is_left_and_only_the_latest() -> None:
    quarantine = Quarantine(600.0)
    for number in range(MAX_OWN + 1):
        quarantine.block(f"f{number}", now=float(number))
    own = quarantine.own(now=100.0)
    assert (len(own), own[0], own[-1]) == (MAX_OWN, ("f1", 501.0), ("f100", 600.0))
    assert len(quarantine) == MAX_OWN + 1, "the oldest is still refused here until its reported end"
