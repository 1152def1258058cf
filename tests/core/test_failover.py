"""Requests of a lost replica continue or end, in the fleet as a whole, because only the fleet starts and ends them."""

from types import SimpleNamespace

import pytest

from serve_app.core.events import LinkEnd, LinkLost, LinkOpened, Ticked, TrialBegan
from serve_app.core.instructions import AbortAttempts, DeliverOutputs, FailRequest, PassTrial
from serve_app.core.request import Resume
from serve_app.errors import ReplicaLost, ResumeDiverged
from tests.core.helpers import Output, arrived, fleet_of, outputs, run, same, start

QUEUED = SimpleNamespace(type=1, timestamp=0.5)
CACHED = SimpleNamespace(num_cached_tokens=16)


def test_a_lost_link_resumes_after_the_last_emitted_token() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), outputs("a", Output("r@0", [7, 8])), LinkOpened("b", 8))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", (7, 8), emitted=2, suspect=True)]
    assert (fleet.outcomes, fleet.failover.resumptions) == ({}, 1)


def test_a_replay_starts_from_the_prompt_and_swallows_what_was_sent() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r", Resume.REPLAY), outputs("a", Output("r@0", [7, 8, 9])), LinkOpened("b", 8))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", emitted=3, suspect=True)]
    assert run(fleet, outputs("b", Output("r@1", [7, 8], events=[QUEUED]))) == []
    seam = Output("r@1", [9, 10])
    assert run(fleet, outputs("b", seam)) == [DeliverOutputs([seam], ((0, 1),)), PassTrial("b", "r@1")]
    assert seam == Output("r", [10])
    after = Output("r@1", [11], finish_reason="length")
    assert run(fleet, outputs("b", after)) == [DeliverOutputs([after])]
    assert (fleet.outcomes, fleet.failover.resumptions) == ({"complete": 1}, 1)


def test_swallowed_is_reported_by_the_index_among_the_delivered_outputs() -> None:
    fleet = fleet_of("a")
    run(fleet, *(arrived(i, Resume.REPLAY) for i in ("r0", "r1", "r2")))
    run(fleet, outputs("a", *(Output(f"r{i}@0", [1, 2]) for i in range(3))), LinkOpened("b", 8), LinkLost("a", LinkEnd.BROKE_OFF))
    whole, gone, seam = Output("new@0", [5]), Output("r0@1", [1, 2]), Output("r1@1", [1, 2, 3])
    run(fleet, arrived("new"))
    assert run(fleet, outputs("b", whole, gone, seam)) == [DeliverOutputs([whole, seam], ((1, 2),)), PassTrial("b", "r1@1")]


@pytest.mark.parametrize(
    ("ids", "finish", "position"),
    [([6], None, 0), ([7, 9], None, 1), ([7], "stop", 1), ([7, 8], "stop", 2), ([7, 9, 9], "length", 1)],
)
def test_a_replay_that_goes_another_way_ends_with_one_error(ids: list[int], finish: str | None, position: int) -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, arrived("r", Resume.REPLAY), outputs("a", Output("r@0", [7, 8])), LinkLost("a", LinkEnd.BROKE_OFF))
    run(fleet, LinkOpened("a", 1), arrived("next"))
    abort, failure, begun = run(fleet, outputs("a", Output("r@1", ids, finish)))
    assert (abort, begun) == (AbortAttempts("a", ("r@1",)), start("next", 0, "a"))
    assert isinstance(failure, FailRequest)
    assert same(failure.error, ResumeDiverged(position=position))


def test_an_engine_error_during_a_replay_reaches_the_front_end_as_it_is() -> None:
    fleet = fleet_of("a")
    run(
        fleet,
        arrived("r", Resume.REPLAY),
        outputs("a", Output("r@0", [7, 8])),
        LinkLost("a", LinkEnd.BROKE_OFF),
        LinkOpened("a", 8),
    )
    failed = Output("r@1", [], finish_reason="error")
    assert run(fleet, outputs("a", failed)) == [DeliverOutputs([failed])]
    assert fleet.requests == {}


def test_events_of_a_first_token_are_kept_whichever_attempt_gives_it() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r"), LinkLost("a", LinkEnd.BROKE_OFF))
    first = Output("r@1", [7], events=[QUEUED], prefill_stats=CACHED)
    run(fleet, outputs("b", first), LinkOpened("c", 8), LinkLost("b", LinkEnd.BROKE_OFF))
    second = Output("r@2", [8], events=[QUEUED], prefill_stats=CACHED)
    run(fleet, outputs("c", second))
    assert first == Output("r", [7], events=[QUEUED], prefill_stats=CACHED)
    assert second == Output("r", [8])


def test_a_pooling_request_starts_again() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r", Resume.RESTART, max_tokens=0))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", suspect=True)]


def test_a_request_that_cannot_resume_starts_again_as_long_as_nothing_was_sent() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r", Resume.NEVER))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", suspect=True)]
    run(fleet, outputs("b", Output("r@1", [7])), LinkOpened("a", 8))
    (failure,) = run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED))
    assert isinstance(failure, FailRequest)
    assert same(
        failure.error, ReplicaLost(request="r", reason="its engine died; an answer like this one cannot be continued elsewhere")
    )


@pytest.mark.parametrize("end", [LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD])
def test_a_request_under_which_as_many_engines_died_as_may_ends_though_it_passed_its_trials(end: LinkEnd) -> None:
    fleet = fleet_of("a", max_deaths=2)
    assert run(fleet, arrived("r"), LinkLost("a", end), LinkOpened("a", 8)) == [start("r", 1, "a", suspect=True)]
    run(fleet, TrialBegan("r@1"), outputs("a", Output("r@1", [7])))
    (failure,) = run(fleet, LinkLost("a", end))
    assert isinstance(failure, FailRequest)
    reason = f"{end.value}; 2 replicas died, or seemed to, while they held the request"
    assert same(failure.error, ReplicaLost(request="r", reason=reason))
    assert (fleet.outcomes, fleet.failover.resumptions) == ({"failed": 1}, 1)


@pytest.mark.parametrize("end", [LinkEnd.UNRESPONSIVE, LinkEnd.SAID_GOODBYE, LinkEnd.ENDED_HERE, LinkEnd.ENGINE_STOPPED])
def test_a_request_whose_replicas_went_for_other_reasons_continues_however_often(end: LinkEnd) -> None:
    fleet = fleet_of(max_deaths=1)
    run(fleet, arrived("r"))
    for attempt in range(9):
        assert run(fleet, LinkOpened(f"{attempt}", 8)) == [start("r", attempt, f"{attempt}")]
        assert run(fleet, LinkLost(f"{attempt}", end)) == []
    assert (fleet.outcomes, fleet.failover.resumptions) == ({}, 9)


def test_silence_costs_a_request_nothing_but_time() -> None:
    fleet = fleet_of("a", max_deaths=1, heartbeat_timeout_s=5.0)
    run(fleet, arrived("r"))
    run(fleet, Ticked(), now=6.0)
    assert run(fleet, LinkOpened("a", 8), now=6.0) == [start("r", 1, "a")]


def test_a_connection_that_broke_off_counts_as_a_death_until_its_replica_is_linked_again() -> None:
    fleet = fleet_of("a", "b", max_deaths=2)
    run(fleet, arrived("r"))
    for attempt in range(1, 9):
        lost, other = ("a", "b") if attempt % 2 else ("b", "a")
        assert run(fleet, LinkLost(lost, LinkEnd.BROKE_OFF)) == [start("r", attempt, other, suspect=True)]
        assert run(fleet, LinkOpened(lost, 8), TrialBegan(f"r@{attempt}")) == []
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF), TrialBegan("r@9"), outputs("b", Output("r@9", [7])))
    (failure,) = run(fleet, LinkLost("b", LinkEnd.BROKE_OFF))
    assert isinstance(failure, FailRequest)
    assert isinstance(failure.error, ReplicaLost)


def test_the_time_that_a_request_stands_still_has_a_limit_however_many_replicas_it_loses_meanwhile() -> None:
    fleet = fleet_of("a", no_replica_s=30.0, max_standstill_s=60.0, heartbeat_timeout_s=1000.0)
    run(fleet, arrived("r"), outputs("a", Output("r@0", [7])))
    for now in (100.0, 120.0, 140.0, 159.0):
        run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), LinkOpened("a", 8), now=now)
    assert run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), now=159.0) == []
    assert run(fleet, Ticked(), now=160.0) == []
    (failure,) = run(fleet, Ticked(), now=161.0)
    assert isinstance(failure, FailRequest)
    assert same(failure.error, ReplicaLost(request="r", reason="no replica could continue it for 61.0 s, limit 60 s"))
    assert fleet.outcomes == {"failed": 1}


@pytest.mark.parametrize("resume", [Resume.CONTINUE, Resume.REPLAY])
def test_a_new_token_ends_a_standstill_and_one_that_was_sent_before_does_not(resume: Resume) -> None:
    fleet = fleet_of("a", max_standstill_s=60.0, heartbeat_timeout_s=1000.0)
    run(fleet, arrived("r", resume), outputs("a", Output("r@0", [7])))
    run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), LinkOpened("a", 8), now=100.0)
    new = [7, 8] if resume is Resume.REPLAY else [8]
    run(fleet, outputs("a", Output("r@1", new)), now=150.0)
    run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), LinkOpened("a", 8), now=200.0)
    assert fleet.requests.keys() == {"r"}
    if resume is Resume.REPLAY:
        run(fleet, outputs("a", Output("r@2", [7])), now=250.0)
    (failure,) = run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), now=261.0)
    assert isinstance(failure, FailRequest)
    reason = "it closed its link; no replica could continue it for 61.0 s, limit 60 s"
    assert same(failure.error, ReplicaLost(request="r", reason=reason))


def test_resumed_requests_go_before_waiting_ones_oldest_first() -> None:
    fleet = fleet_of("a", credit=2)
    run(fleet, arrived("r0"), arrived("r1"), arrived("r2"), LinkLost("a", LinkEnd.BROKE_OFF))
    assert run(fleet, LinkOpened("b", 8)) == [
        start("r0", 1, "b", suspect=True),
        start("r1", 1, "b", suspect=True),
        start("r2", 0, "b"),
    ]


def test_a_second_link_to_a_replica_replaces_the_first_and_what_it_held_may_go_there() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), outputs("a", Output("r@0", [7])))
    assert run(fleet, LinkOpened("a", 8)) == [start("r", 1, "a", (7,), emitted=1)]


@pytest.mark.parametrize("way", [Resume.CONTINUE, Resume.REPLAY])
def test_a_gap_lasts_from_the_first_loss_to_the_next_new_token(way: Resume) -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r", way), outputs("a", Output("r@0", [7])))
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF), now=10.0)
    run(fleet, LinkOpened("b", 8), now=10.2)
    run(fleet, LinkLost("b", LinkEnd.BROKE_OFF), LinkOpened("c", 8), now=11.0)
    if way is Resume.REPLAY:
        run(fleet, outputs("c", Output("r@2", [7])), now=11.5)  # repeats what was sent
    assert fleet.failover.gaps.counts == {}
    run(fleet, outputs("c", Output("r@2", [8])), now=13.0)
    run(fleet, outputs("c", Output("r@2", [9])), now=20.0)
    assert fleet.failover.gaps.sums_s == {way.value: 3.0}
    assert fleet.failover.gaps.counts == {way.value: [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]}


def test_a_request_without_a_token_yet_starts_anew_after_its_gap() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r", Resume.REPLAY), LinkLost("a", LinkEnd.BROKE_OFF), LinkOpened("b", 8), now=1.0)
    run(fleet, outputs("b", Output("r@1", [7])), now=101.0)
    assert fleet.failover.gaps.counts == {"restart": [0] * 10 + [1]}
