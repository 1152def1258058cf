from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.v1.engine import FinishReason

from serve_app.core.events import (
    AttemptUnsendable,
    Event,
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    RequestArrived,
    RequestsAborted,
    StartMeasured,
    Ticked,
)
from serve_app.core.fleet_report import describe, num_on_draining, outstanding_tokens
from serve_app.core.instructions import AbortAttempts, CloseLink, DeliverOutputs, FailRequest, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.request import Resume
from serve_app.core.tally import Tally
from serve_app.errors import NoFreePlace, NoReplica, QueueFull, RequestTooLarge
from tests.core.helpers import Output, arrived, fleet_of, heartbeat, outputs, run, same, start


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


def in_background(request_id: str) -> RequestArrived:
    return replace(arrived(request_id), background=True)


def test_a_batchs_request_starts_where_there_is_room_and_never_waits_behind_or_before_others() -> None:
    fleet = fleet_of("a", credit=2)
    assert run(fleet, in_background("b0")) == [start("b0", 0, "a")]
    assert run(fleet, arrived("r0")) == [start("r0", 0, "a")]
    (refusal,) = run(fleet, in_background("b1"))
    assert isinstance(refusal, FailRequest)
    assert same(refusal.error, NoFreePlace(waiting=0, retry_after_s=1.0))
    run(fleet, arrived("r1"), outputs("a", Output("b0@0", [5], finish_reason="stop")), arrived("r2"))
    (refusal,) = run(fleet, in_background("b2"))
    assert isinstance(refusal, FailRequest)
    assert same(refusal.error, NoFreePlace(waiting=1, retry_after_s=1.0))
    assert (fleet.outcomes["held_back"], fleet.outcomes["rejected"]) == (2, 0)
    assert fleet.tally == Tally(
        requests=3,
        prompt_tokens=6,
        prefilled_tokens=2,
        output_tokens=1,
        lines=1,
        line_prompt_tokens=2,
        line_output_tokens=1,
        lines_finished=1,
        line_finished_tokens=1,
    )


def test_a_batchs_request_does_not_join_the_queue_of_an_engine() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, heartbeat("a", waiting=1), heartbeat("b"))
    assert run(fleet, in_background("b0")) == [start("b0", 0, "b")]
    (refusal,) = run(fleet, heartbeat("b", waiting=1), in_background("b1"))
    assert isinstance(refusal, FailRequest)
    assert isinstance(refusal.error, NoFreePlace)


def test_where_engines_yield_a_batchs_request_joins_the_queue_of_an_engine_in_which_no_chat_waits() -> None:
    fleet = fleet_of("a", engines_yield=True)
    run(fleet, in_background("b0"), in_background("b1"), heartbeat("a", waiting=1))
    assert run(fleet, in_background("b2")) == [start("b2", 0, "a")]
    run(fleet, outputs("a", *(Output(f"b{number}@0", [5]) for number in range(3))))
    assert run(fleet, in_background("b3")) == [start("b3", 0, "a")], "the queue held lines at that time"
    run(fleet, outputs("a", Output("b3@0", [5])), arrived("r0"), heartbeat("a", waiting=1))
    (refusal,) = run(fleet, in_background("b4"))
    assert isinstance(refusal, FailRequest)
    assert isinstance(refusal.error, NoFreePlace)


def test_of_a_model_without_a_replica_one_request_of_a_batch_waits_and_wakes_it() -> None:
    fleet = fleet_of()
    assert run(fleet, in_background("b0")) == []
    assert list(fleet.waiting) == ["b0"]
    (refusal,) = run(fleet, in_background("b1"))
    assert isinstance(refusal, FailRequest)


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


def test_outputs_of_an_attempt_that_was_moved_or_aborted_are_dropped() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r"), arrived("gone"), LinkLost("a", LinkEnd.BROKE_OFF), LinkOpened("a", 8), RequestsAborted(["gone"]))
    late = [Output("r@0", [7]), Output("gone@0", [7]), Output("r@1", [7])]
    assert run(fleet, outputs("a", *late)) == []
    assert run(fleet, outputs("unknown", Output("r@1", [7]))) == []


def test_outputs_of_the_attempt_before_a_partition_are_dropped_when_its_replica_is_linked_again() -> None:
    fleet = fleet_of("a")
    run(fleet, arrived("r"), LinkLost("a", LinkEnd.UNRESPONSIVE), LinkOpened("a", 8))
    assert run(fleet, outputs("a", Output("r@0", [7]))) == []
    assert run(fleet, outputs("a", first := Output("r@1", [8]))) == [DeliverOutputs([first])]


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
    assert num_on_draining(fleet) == 1
    last = Output("r0@0", [7], finish_reason="stop")
    assert run(fleet, outputs("a", last)) == [DeliverOutputs([last])]
    assert num_on_draining(fleet) == 0
    assert run(fleet, heartbeat("a")) == [start("r1", 0, "a")]
    assert num_on_draining(fleet) == 0


def test_a_replica_that_drains_when_its_link_opens_gets_nothing_and_others_keep_their_queues() -> None:
    fleet = fleet_of("a", credit=2)
    run(fleet, arrived("r0"), arrived("r1"), arrived("r2"), HeartbeatArrived("a", EngineLoad(9, 1, 1, 0.9), draining=False))
    assert run(fleet, LinkOpened("b", 8, draining=True)) == []
    assert run(fleet, heartbeat("b")) == [start("r2", 0, "b")]


def test_an_attempt_that_cannot_be_sent_ends_only_its_own_request() -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, arrived("big"), arrived("r"))
    error = RequestTooLarge(size_bytes=2, limit_bytes=1)
    assert run(fleet, AttemptUnsendable("big", error)) == [FailRequest("big", error), start("r", 0, "a")]
    assert run(fleet, AttemptUnsendable("big", error)) == []


def test_a_silent_replica_is_closed_and_its_requests_continue_elsewhere() -> None:
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
    assert run(fleet, LinkOpened("c", 8), now=6.0) == [start("r0", 1, "c"), start("r1", 1, "c")]


def test_outputs_are_a_sign_of_life() -> None:
    fleet = fleet_of("a", heartbeat_timeout_s=5.0)
    run(fleet, arrived("r"))
    run(fleet, outputs("a", Output("r@0", [7])), now=4.0)
    assert run(fleet, Ticked(), now=9.0) == []


def test_a_request_that_waits_too_long_learns_when_to_come_again() -> None:
    fleet = fleet_of(no_replica_s=30.0)
    run(fleet, arrived("r"))
    assert run(fleet, Ticked(), now=30.0) == []
    (failure,) = run(fleet, Ticked(), now=31.0)
    assert isinstance(failure, FailRequest)
    assert same(failure.error, NoReplica(model="tiny", waited_s=31.0, retry_after_s=5.0))
    assert fleet.outcomes == {"rejected": 1}


def test_a_batchs_request_that_waited_in_vain_is_none_of_the_refused_ones_that_the_autoscaler_reads() -> None:
    fleet = fleet_of(no_replica_s=30.0)
    run(fleet, in_background("b0"))
    (failure,) = run(fleet, Ticked(), now=31.0)
    assert isinstance(failure, FailRequest)
    assert (fleet.outcomes, fleet.tally.requests, fleet.tally.rejected) == ({"rejected": 1}, 0, 0)


def test_a_request_that_found_no_room_gets_the_figures_and_the_way_out() -> None:
    fleet = fleet_of("a", "b", credit=1, no_replica_s=30.0, heartbeat_timeout_s=100.0)
    run(fleet, arrived("r0"), arrived("r1"), HeartbeatArrived("b", EngineLoad(1, 0, 0, 0.0), draining=True), arrived("r2"))
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
def test_a_request_refused_without_a_replica_learns_how_long_one_takes_to_start(
    events: list[Event], retry_after_s: float
) -> None:
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
        seen.append(outstanding_tokens(fleet))
    # 10 prompt + 4 output; then only output; lost: 10 + the 2 emitted + 2 left, again; then the rest of its output.
    assert seen == [14, 3, 2, 14, 14, 3 if resume is Resume.REPLAY else 1]


def test_a_new_replica_gets_its_part_of_what_waits_in_an_engine() -> None:
    fleet = fleet_of("a")
    run(fleet, *(arrived(f"r{i}") for i in range(4)), HeartbeatArrived("a", EngineLoad(9, 1, 3, 0.9), draining=False))
    run(fleet, outputs("a", Output("r0@0", [7])))
    assert run(fleet, LinkOpened("b", 8), now=1.0) == [
        AbortAttempts("a", ("r1@0", "r2@0", "r3@0")),
        start("r1", 1, "b"),
        start("r2", 1, "a"),
        start("r3", 1, "b"),
    ]
    assert run(fleet, LinkOpened("c", 8), now=2.0) == [], "an engine's queue is taken back once, until it reports a new one"


def test_of_a_queue_that_has_grown_since_its_heartbeat_more_may_be_taken_than_it_reported() -> None:
    fleet = fleet_of("a", credit=16)
    run(fleet, *(arrived(f"r{i}") for i in range(9)), HeartbeatArrived("a", EngineLoad(9, 2, 1, 0.9), draining=False))
    assert run(fleet, LinkOpened("b", 8))[0] == AbortAttempts("a", ("r6@0", "r7@0", "r8@0"))
    assert run(fleet, LinkOpened("c", 8)) == []


def test_what_was_moved_from_queue_to_queue_has_lost_no_replica() -> None:
    fleet = fleet_of("a", max_deaths=2)
    run(fleet, arrived("r"))
    for name in "bcd":
        beats = [HeartbeatArrived(r, EngineLoad(9, 0, 1, 0.9), draining=False) for r in fleet.replicas]
        run(fleet, *beats, LinkOpened(name, 8))
    (holder,) = (r.replica_id for r in fleet.replicas.values() if r.held)
    ((again,),) = ([i for i in run(fleet, LinkLost(holder, LinkEnd.ENGINE_DIED)) if isinstance(i, StartAttempt)],)
    assert again.request_id == "r"


def test_the_tally_counts_demand_work_and_first_tokens() -> None:
    fleet = fleet_of("a", ttft_s=2.0, max_waiting_requests=0)
    run(fleet, arrived("r0", prompt_tokens=10), arrived("r1", prompt_tokens=30), arrived("r2", Resume.RESTART, prompt_tokens=5))
    run(fleet, outputs("a", Output("r0@0", [1])), now=1.0)
    cached = SimpleNamespace(num_cached_tokens=16)
    run(fleet, outputs("a", Output("r0@0", [2], finish_reason="stop"), Output("r1@0", [1, 2], prefill_stats=cached)), now=2.5)
    run(fleet, outputs("a", Output("r2@0", [], finish_reason="stop")), LinkLost("a", LinkEnd.BROKE_OFF), now=3.0)
    run(fleet, arrived("r3", prompt_tokens=100))
    assert fleet.tally == Tally(
        requests=4,
        prompt_tokens=145,
        rejected=1,
        prefilled_tokens=29,
        cached_tokens=16,
        output_tokens=4,
        finished=2,
        finished_tokens=2,
        finished_tokens_squared=4,
        first_tokens=2,
        late_first_tokens=1,
    )


def test_describe_is_plain_data() -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, arrived("r0"), arrived("r1"), HeartbeatArrived("a", EngineLoad(9, 3, 2, 0.5), draining=False))
    assert describe(fleet) == {
        "requests": 2,
        "waiting": 1,
        "outstanding_tokens": 12,
        "outcomes": {},
        "resumptions": 0,
        "moved": 0,
        "hand_overs": {},
        "hand_overs_asked": {},
        "kv_read_tokens": 0,
        "kv_read_bytes": 0,
        "routed": {"load": 1},
        "expected_hit_tokens": 0,
        "blocked": 0,
        "cold_start_s": None,
        "replicas": {"a": {"held": 1, "outstanding_tokens": 6, "running": 3, "waiting": 2, "kv_usage": 0.5, "draining": False}},
    }


def test_a_thousand_waiting_requests_abort_in_any_order() -> None:
    fleet = fleet_of()
    run(fleet, *(arrived(f"r{i}") for i in range(1000)))
    assert run(fleet, RequestsAborted([f"r{i}" for i in range(999, 0, -1)])) == []
    assert run(fleet, LinkOpened("a", 8)) == [StartAttempt("r0", "r0@0", "a", (), 0)]
