import pytest
from vllm.v1.engine import FinishReason

from serve_app.core.events import (
    AttemptUnsendable,
    Event,
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    RequestsAborted,
    StartMeasured,
    Ticked,
)
from serve_app.core.instructions import AbortAttempts, CloseLink, DeliverOutputs, FailRequest, StartAttempt
from serve_app.core.request import Resume
from serve_app.core.signals import Tally
from serve_app.errors import NoReplica, QueueFull, ReplicaLost, RequestTooLarge, ResumeDiverged, ServingError
from tests.core.helpers import Output, arrived, fleet_of, outputs, run, start


def same(error: ServingError, expected: ServingError) -> bool:
    """Errors compare by identity; here by everything they say."""
    return repr(error) == repr(expected) and type(error) is type(expected)


def heartbeat(replica_id: str, *, draining: bool = False) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, step=1, running=0, waiting=0, kv_usage=0.0, draining=draining)


def test_a_request_starts_at_once_where_there_is_room() -> None:
    assert run(fleet_of("a"), arrived("r")) == [start("r", 0, "a")]


def test_a_request_without_a_replica_waits_for_the_first_link() -> None:
    fleet = fleet_of()
    assert run(fleet, arrived("r")) == []
    assert run(fleet, LinkOpened("a", 1)) == [start("r", 0, "a")]


def test_requests_beyond_the_credit_wait_and_start_in_their_order_when_it_comes_back() -> None:
    fleet = fleet_of("a", credit=1)
    assert run(fleet, arrived("r0")) == [start("r0", 0, "a")]
    assert run(fleet, arrived("r1"), arrived("r2")) == []
    last = Output("r0@0", [5], finish_reason="stop")
    assert run(fleet, outputs("a", last)) == [DeliverOutputs([last]), start("r1", 0, "a")]
    assert last.request_id == "r0"


def test_the_replica_with_the_fewest_outstanding_tokens_gets_the_next_request() -> None:
    fleet = fleet_of("a", "b")
    assert run(fleet, arrived("big", prompt_tokens=100)) == [start("big", 0, "a")]
    assert run(fleet, arrived("r1")) == [start("r1", 0, "b")]
    assert run(fleet, arrived("r2")) == [start("r2", 0, "b")]


def test_a_request_is_refused_when_as_many_wait_as_may() -> None:
    fleet = fleet_of(max_waiting_requests=1)
    (refusal,) = run(fleet, arrived("r0"), arrived("r1"))
    assert isinstance(refusal, FailRequest)
    assert refusal.request_id == "r1"
    assert same(refusal.error, QueueFull(waiting=1, limit=1, retry_after_s=5.0))
    assert fleet.outcomes == {"rejected": 1}


def test_a_queue_of_no_length_still_lets_through_what_can_start_at_once() -> None:
    fleet = fleet_of("a", credit=1, max_waiting_requests=0)
    assert run(fleet, arrived("r0")) == [start("r0", 0, "a")]
    (refusal,) = run(fleet, arrived("r1"))
    assert isinstance(refusal, FailRequest)
    assert same(refusal.error, QueueFull(waiting=0, limit=0, retry_after_s=5.0))


def test_an_id_in_use_is_the_callers_fault() -> None:
    fleet = fleet_of("a")
    with pytest.raises(ValueError, match="request id 'r' is in use"):
        run(fleet, arrived("r"), arrived("r"))


def test_a_lost_link_resumes_after_the_last_emitted_token() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), outputs("a", Output("r@0", [7, 8])), LinkOpened("b", 8))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", (7, 8), emitted=2)]
    assert (fleet.outcomes, fleet.failover.resumptions) == ({}, 1)


def test_a_replay_starts_from_the_prompt_and_swallows_what_was_sent() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r", Resume.REPLAY), outputs("a", Output("r@0", [7, 8, 9])), LinkOpened("b", 8))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b", emitted=3)]
    assert run(fleet, outputs("b", Output("r@1", [7, 8], events=["queued"]))) == []
    seam = Output("r@1", [9, 10])
    assert run(fleet, outputs("b", seam)) == [DeliverOutputs([seam], ((0, 1),))]
    assert seam == Output("r", [10])
    after = Output("r@1", [11], finish_reason="length")
    assert run(fleet, outputs("b", after)) == [DeliverOutputs([after])]
    assert (fleet.outcomes, fleet.failover.resumptions) == ({"complete": 1}, 1)


def test_swallowed_is_told_by_the_index_among_the_delivered_outputs() -> None:
    fleet = fleet_of("a")
    run(fleet, *(arrived(i, Resume.REPLAY) for i in ("r0", "r1", "r2")))
    run(fleet, outputs("a", *(Output(f"r{i}@0", [1, 2]) for i in range(3))), LinkOpened("b", 8), LinkLost("a", LinkEnd.BROKE_OFF))
    whole, gone, seam = Output("new@0", [5]), Output("r0@1", [1, 2]), Output("r1@1", [1, 2, 3])
    run(fleet, arrived("new"))
    assert run(fleet, outputs("b", whole, gone, seam)) == [DeliverOutputs([whole, seam], ((1, 2),))]


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
    first = Output("r@1", [7], events=["queued"], prefill_stats="cached")
    run(fleet, outputs("b", first), LinkOpened("c", 8), LinkLost("b", LinkEnd.BROKE_OFF))
    second = Output("r@2", [8], events=["queued"], prefill_stats="cached")
    run(fleet, outputs("c", second))
    assert first == Output("r", [7], events=["queued"], prefill_stats="cached")
    assert second == Output("r", [8])


def test_a_pooling_request_starts_again() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r", Resume.RESTART, max_tokens=0))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b")]


def test_a_request_that_cannot_resume_starts_again_as_long_as_nothing_was_sent() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r", Resume.NEVER))
    assert run(fleet, LinkLost("a", LinkEnd.BROKE_OFF)) == [start("r", 1, "b")]
    run(fleet, outputs("b", Output("r@1", [7])), LinkOpened("a", 8))
    (failure,) = run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED))
    assert isinstance(failure, FailRequest)
    assert same(
        failure.error, ReplicaLost(request="r", reason="its engine died; an answer like this one cannot be continued elsewhere")
    )


@pytest.mark.parametrize("end", [LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD])
def test_a_request_under_which_as_many_engines_died_as_may_ends(end: LinkEnd) -> None:
    fleet = fleet_of("a", max_deaths=2)
    assert run(fleet, arrived("r"), LinkLost("a", end), LinkOpened("a", 8)) == [start("r", 1, "a")]
    (failure,) = run(fleet, LinkLost("a", end))
    assert isinstance(failure, FailRequest)
    reason = f"{end.value}; 2 replicas died, or seemed to, while they held the request"
    assert same(failure.error, ReplicaLost(request="r", reason=reason))
    assert (fleet.outcomes, fleet.failover.resumptions) == ({"failed": 1}, 1)


@pytest.mark.parametrize("end", [LinkEnd.UNRESPONSIVE, LinkEnd.SAID_GOODBYE, LinkEnd.ENDED_HERE])
def test_a_request_whose_replicas_went_for_other_reasons_goes_on_however_often(end: LinkEnd) -> None:
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
        assert run(fleet, LinkLost(lost, LinkEnd.BROKE_OFF)) == [start("r", attempt, other)]
        assert run(fleet, LinkOpened(lost, 8)) == []
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF))
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
    assert same(failure.error, ReplicaLost(request="r", reason="no replica could go on with it for 61.0 s, limit 60 s"))
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
    reason = "it stopped serving; no replica could go on with it for 61.0 s, limit 60 s"
    assert same(failure.error, ReplicaLost(request="r", reason=reason))


def test_resumed_requests_go_before_waiting_ones_oldest_first() -> None:
    fleet = fleet_of("a", credit=2)
    run(fleet, arrived("r0"), arrived("r1"), arrived("r2"), LinkLost("a", LinkEnd.BROKE_OFF))
    assert run(fleet, LinkOpened("b", 8)) == [start("r0", 1, "b"), start("r1", 1, "b"), start("r2", 0, "b")]


def test_a_second_link_to_a_replica_replaces_the_first_and_what_it_held_may_go_there() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), outputs("a", Output("r@0", [7])))
    assert run(fleet, LinkOpened("a", 8)) == [start("r", 1, "a", (7,), emitted=1)]


def test_outputs_of_an_attempt_that_was_moved_or_aborted_are_dropped() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r"), arrived("gone"), LinkLost("a", LinkEnd.BROKE_OFF), LinkOpened("a", 8), RequestsAborted(["gone"]))
    late = [Output("r@0", [7]), Output("gone@0", [7]), Output("r@1", [7])]
    assert run(fleet, outputs("a", *late)) == []
    assert run(fleet, outputs("unknown", Output("r@1", [7]))) == []


def test_aborts_go_to_the_replicas_that_hold_the_attempts_and_unknown_ids_mean_nothing() -> None:
    fleet = fleet_of("a", "b", credit=1)
    run(fleet, *(arrived(f"r{i}") for i in range(4)))
    assert run(fleet, RequestsAborted(["r0", "r1", "r2", "never"])) == [
        AbortAttempts("a", ("r0@0",)),
        AbortAttempts("b", ("r1@0",)),
        start("r3", 0, "a"),
    ]
    assert run(fleet, RequestsAborted(["r0"])) == []
    assert fleet.outcomes == {"aborted": 3}


def test_aborted_requests_are_counted_by_the_reason_that_the_front_end_gives() -> None:
    fleet = fleet_of("a")
    run(fleet, *(arrived(f"r{i}") for i in range(3)), outputs("a", *(Output(f"r{i}@0", [7]) for i in range(3))))
    run(fleet, RequestsAborted(["r0"]), RequestsAborted(["r1"], "complete"), RequestsAborted(["r2"], "failed"))
    assert fleet.outcomes == {"aborted": 1, "complete": 1, "failed": 1}
    assert (fleet.tally.finished, fleet.tally.finished_tokens) == (2, 2)


def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r0"))
    assert run(fleet, heartbeat("a", draining=True), arrived("r1")) == []
    assert fleet.num_on_draining() == 1
    last = Output("r0@0", [7], finish_reason="stop")
    assert run(fleet, outputs("a", last)) == [DeliverOutputs([last])]
    assert fleet.num_on_draining() == 0
    assert run(fleet, heartbeat("a")) == [start("r1", 0, "a")]
    assert fleet.num_on_draining() == 0


def test_a_replica_that_drains_when_its_link_opens_gets_nothing_and_others_keep_their_queues() -> None:
    fleet = fleet_of("a", credit=2)
    run(fleet, arrived("r0"), arrived("r1"), arrived("r2"), HeartbeatArrived("a", 9, 1, 1, 0.9, draining=False))
    assert run(fleet, LinkOpened("b", 8, draining=True)) == []
    assert run(fleet, heartbeat("b")) == [start("r2", 0, "b")]


def test_an_attempt_that_cannot_be_sent_ends_only_its_own_request() -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, arrived("big"), arrived("r"))
    error = RequestTooLarge(size_bytes=2, limit_bytes=1)
    assert run(fleet, AttemptUnsendable("big", error)) == [FailRequest("big", error), start("r", 0, "a")]
    assert run(fleet, AttemptUnsendable("big", error)) == []


def test_a_silent_replica_is_closed_and_its_requests_go_on_elsewhere() -> None:
    fleet = fleet_of("a", "b", heartbeat_timeout_s=5.0)
    run(fleet, arrived("r"))
    run(fleet, heartbeat("b"), now=4.0)
    assert run(fleet, Ticked(), now=5.0) == []
    assert run(fleet, Ticked(), now=5.5) == [
        CloseLink("a", "silent for 5.5 s, limit 5 s"),
        start("r", 1, "b"),
    ]


def test_replicas_that_fall_silent_together_do_not_get_each_others_requests() -> None:
    fleet = fleet_of("a", "b", heartbeat_timeout_s=5.0)
    run(fleet, arrived("r0"), arrived("r1"))
    reason = "silent for 6.0 s, limit 5 s"
    assert run(fleet, Ticked(), now=6.0) == [CloseLink("a", reason), CloseLink("b", reason)]
    assert run(fleet, LinkOpened("c", 8), now=6.0) == [start("r1", 1, "c"), start("r0", 1, "c")]


def test_outputs_are_a_sign_of_life() -> None:
    fleet = fleet_of("a", heartbeat_timeout_s=5.0)
    run(fleet, arrived("r"))
    run(fleet, outputs("a", Output("r@0", [7])), now=4.0)
    assert run(fleet, Ticked(), now=9.0) == []


def test_a_request_that_waits_too_long_is_told_when_to_come_again() -> None:
    fleet = fleet_of(no_replica_s=30.0)
    run(fleet, arrived("r"))
    assert run(fleet, Ticked(), now=30.0) == []
    (failure,) = run(fleet, Ticked(), now=31.0)
    assert isinstance(failure, FailRequest)
    assert same(failure.error, NoReplica(model="tiny", waited_s=31.0, retry_after_s=5.0))
    assert fleet.outcomes == {"rejected": 1}


def test_a_request_that_found_no_room_is_told_what_there_was_and_the_way_out() -> None:
    fleet = fleet_of("a", "b", credit=1, no_replica_s=30.0, heartbeat_timeout_s=100.0)
    run(fleet, arrived("r0"), arrived("r1"), HeartbeatArrived("b", 1, 0, 0, 0.0, draining=True), arrived("r2"))
    (failure,) = run(fleet, Ticked(), now=31.0)
    assert isinstance(failure, FailRequest)
    assert str(failure.error) == (
        "no room on the replicas of 'tiny' (2 linked, 1 of them draining, 2 of 2 places taken) after 31.0 s; retry in 5.0 s,"
        " or raise replicas.max or protocol.credit"
    )


@pytest.mark.parametrize(
    ("events", "retry_after_s"),
    [
        ([], 5.0),
        ([StartMeasured("a", 41.5)], 41.5),
        ([StartMeasured("a", 41.5), StartMeasured("a", 9.0), StartMeasured("b", 30.0)], 41.5),
        ([StartMeasured("a", 41.5), LinkOpened("a", 1), heartbeat("a", draining=True)], 41.5),
        ([StartMeasured("a", 41.5), LinkOpened("a", 1), arrived("busy")], 5.0),
    ],
    ids=["nothing-measured", "measured", "slowest-of-few", "all-drain", "replica-is-busy"],
)
def test_who_is_refused_without_a_replica_is_told_how_long_one_takes_to_start(events: list[Event], retry_after_s: float) -> None:
    fleet = fleet_of(max_waiting_requests=1, heartbeat_timeout_s=100.0)
    (full,) = run(fleet, *events, arrived("r0"), arrived("r1"))
    (late,) = run(fleet, Ticked(), now=31.0)
    assert isinstance(full, FailRequest)
    assert isinstance(late, FailRequest)
    assert (type(full.error), full.error.retry_after_s) == (QueueFull, retry_after_s)
    assert (type(late.error), late.error.retry_after_s) == (NoReplica, retry_after_s)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.STOP, "complete"),
        (FinishReason.LENGTH, "complete"),
        (FinishReason.REPETITION, "complete"),
        (FinishReason.ABORT, "aborted"),
        (FinishReason.ERROR, "failed"),
    ],
)
def test_an_answer_that_the_engine_gave_up_is_not_counted_as_complete(reason: FinishReason, outcome: str) -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), outputs("a", Output("r@0", [], finish_reason=reason)))
    assert fleet.outcomes == {outcome: 1}


def test_the_wait_of_a_resumed_request_counts_from_the_loss() -> None:
    fleet = fleet_of("a", no_replica_s=30.0, heartbeat_timeout_s=100.0)
    run(fleet, arrived("r"))
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF), now=40.0)
    assert run(fleet, Ticked(), now=70.0) == []
    assert len(run(fleet, Ticked(), now=71.0)) == 1
    assert (fleet.outcomes, fleet.failover.resumptions) == ({"failed": 1}, 1)


@pytest.mark.parametrize("resume", [Resume.CONTINUE, Resume.REPLAY])
def test_outstanding_tokens_follow_a_request_through_prefill_decode_loss_and_resumption(resume: Resume) -> None:
    fleet = fleet_of("a")
    seen = []
    for event in (
        arrived("r", resume, prompt_tokens=10, max_tokens=4),
        outputs("a", Output("r@0", [7])),
        outputs("a", Output("r@0", [8])),
        LinkLost("a", LinkEnd.BROKE_OFF),
        LinkOpened("a", 8),
        outputs("a", Output("r@1", [7] if resume is Resume.REPLAY else [9])),
    ):
        run(fleet, event)
        seen.append(fleet.outstanding_tokens())
    # 10 prompt + 4 output; then only output; lost: 10 + the 2 emitted + 2 left, again; then the rest of its output.
    assert seen == [14, 3, 2, 14, 14, 3 if resume is Resume.REPLAY else 1]


def test_a_new_replica_gets_its_part_of_what_waits_in_an_engine() -> None:
    fleet = fleet_of("a")
    run(fleet, *(arrived(f"r{i}") for i in range(4)), HeartbeatArrived("a", 9, 1, 3, 0.9, draining=False))
    run(fleet, outputs("a", Output("r0@0", [7])))
    assert run(fleet, LinkOpened("b", 8), now=1.0) == [
        AbortAttempts("a", ("r1@0", "r2@0", "r3@0")),
        start("r1", 1, "b"),
        start("r2", 1, "a"),
        start("r3", 1, "b"),
    ]
    assert run(fleet, LinkOpened("c", 8), now=2.0) == [], "an engine's queue is taken once, until it tells of a new one"


def test_of_a_queue_that_has_grown_since_its_heartbeat_more_may_be_taken_than_that_told_of() -> None:
    fleet = fleet_of("a", credit=16)
    run(fleet, *(arrived(f"r{i}") for i in range(9)), HeartbeatArrived("a", 9, 2, 1, 0.9, draining=False))
    assert run(fleet, LinkOpened("b", 8))[0] == AbortAttempts("a", ("r6@0", "r7@0", "r8@0"))
    assert run(fleet, LinkOpened("c", 8)) == []


def test_what_was_moved_from_queue_to_queue_has_lost_no_replica() -> None:
    fleet = fleet_of("a", max_deaths=2)
    run(fleet, arrived("r"))
    for name in "bcd":
        beats = [HeartbeatArrived(r, 9, 0, 1, 0.9, draining=False) for r in fleet.replicas]
        run(fleet, *beats, LinkOpened(name, 8))
    (holder,) = (r.replica_id for r in fleet.replicas.values() if r.held)
    ((again,),) = ([i for i in run(fleet, LinkLost(holder, LinkEnd.ENGINE_DIED)) if isinstance(i, StartAttempt)],)
    assert again.request_id == "r"


def test_the_tally_counts_demand_work_and_first_tokens() -> None:
    fleet = fleet_of("a", ttft_s=2.0, max_waiting_requests=0)
    run(fleet, arrived("r0", prompt_tokens=10), arrived("r1", prompt_tokens=30), arrived("r2", Resume.RESTART, prompt_tokens=5))
    run(fleet, outputs("a", Output("r0@0", [1])), now=1.0)
    run(fleet, outputs("a", Output("r0@0", [2], finish_reason="stop"), Output("r1@0", [1, 2])), now=2.5)
    run(fleet, outputs("a", Output("r2@0", [], finish_reason="stop")), LinkLost("a", LinkEnd.BROKE_OFF), now=3.0)
    run(fleet, arrived("r3", prompt_tokens=100))
    assert fleet.tally == Tally(
        requests=4,
        prompt_tokens=145,
        rejected=1,
        prefilled_tokens=45,
        output_tokens=4,
        finished=2,
        finished_tokens=2,
        first_tokens=2,
        late_first_tokens=1,
    )


def test_describe_is_plain_data() -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, arrived("r0"), arrived("r1"), HeartbeatArrived("a", 9, 3, 2, 0.5, draining=False))
    assert fleet.describe() == {
        "requests": 2,
        "waiting": 1,
        "outstanding_tokens": 12,
        "outcomes": {},
        "resumptions": 0,
        "cold_start_s": None,
        "replicas": {"a": {"held": 1, "outstanding_tokens": 6, "running": 3, "waiting": 2, "kv_usage": 0.5, "draining": False}},
    }


def test_a_thousand_waiting_requests_abort_in_any_order() -> None:
    fleet = fleet_of()
    run(fleet, *(arrived(f"r{i}") for i in range(1000)))
    assert run(fleet, RequestsAborted([f"r{i}" for i in range(999, 0, -1)])) == []
    assert run(fleet, LinkOpened("a", 8)) == [StartAttempt("r0", "r0@0", "a", (), 0)]
