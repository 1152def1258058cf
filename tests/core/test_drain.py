"""A draining replica's requests move away in time: pure plans, and the fleet that follows them."""

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.drain import MAX_UNANSWERED, MAX_UNANSWERED_LATE, MAX_WINDOW_S, Drain
from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.instructions import AbortAttempts, DeliverOutputs, FailRequest, Instruction, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.request import Resume
from tests.core.helpers import Output, arrived, fleet_of, heartbeat, outputs, run, start

TICK_S = 0.25


def draining(replica_id: str, left_s: float) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1), draining=True, drain_left_s=left_s)


def queueing(replica_id: str, waiting: int) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1, running=8, waiting=waiting, kv_usage=0.9), draining=False)


def streaming(resume: Resume = Resume.CONTINUE) -> FleetState:
    """Return a fleet whose replica a drains for 8 s from 0 on and streams "r", of which one token came; b has room."""
    fleet = fleet_of("a", heartbeat_timeout_s=1000.0)
    run(fleet, arrived("r", resume, max_tokens=9), outputs("a", Output("r@0", [7])), LinkOpened("b", 8), draining("a", 8.0))
    return fleet


def test_a_stream_that_is_left_late_in_the_budget_continues_elsewhere_after_what_was_emitted() -> None:
    fleet = streaming()
    assert run(fleet, Ticked(), now=6.9) == []
    assert run(fleet, Ticked(), now=7.0) == [AbortAttempts("a", ("r@0",)), start("r", 1, "b", prefix=(7,), emitted=1)]
    assert run(fleet, outputs("a", Output("r@0", [8])), now=7.1) == []
    assert run(fleet, outputs("b", late := Output("r@1", [8])), now=7.2) == [DeliverOutputs([late])]
    assert fleet.requests["r"].emitted_ids == [7, 8]
    assert (fleet.drains.num_moved, fleet.failover.resumptions) == (1, 0)


def test_a_request_that_cannot_resume_stays_to_the_very_end() -> None:
    fleet = streaming(Resume.NEVER)
    assert run(fleet, Ticked(), now=7.99) == []
    (failed,) = run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), now=8.0)
    assert isinstance(failed, FailRequest)


def test_a_request_without_a_token_moves_whatever_it_is_and_before_the_others() -> None:
    fleet = fleet_of("a", heartbeat_timeout_s=1000.0)
    run(fleet, arrived("old", max_tokens=9), arrived("new", Resume.NEVER), outputs("a", Output("old@0", [7])))
    run(fleet, LinkOpened("b", 8), draining("a", 8.0))
    assert run(fleet, Ticked(), now=5.5) == [AbortAttempts("a", ("new@0",)), start("new", 1, "b")]
    assert run(fleet, Ticked(), now=7.0) == [AbortAttempts("a", ("old@0",)), start("old", 1, "b", prefix=(7,), emitted=1)]


def test_replays_move_last_and_long_answers_first() -> None:
    fleet = fleet_of("a", heartbeat_timeout_s=1000.0)
    for request_id, resume, max_tokens in (
        ("replay", Resume.REPLAY, 90),
        ("short", Resume.CONTINUE, 5),
        ("long", Resume.CONTINUE, 50),
    ):
        run(fleet, arrived(request_id, resume, max_tokens=max_tokens), outputs("a", Output(f"{request_id}@0", [7])))
    run(fleet, LinkOpened("b", 8), draining("a", 8.0))
    moves = run(fleet, Ticked(), now=7.0)
    assert [m.request_id for m in moves if isinstance(m, StartAttempt)] == ["long", "short", "replay"]


def test_without_another_replica_or_with_full_ones_a_stream_stays_where_it_is() -> None:
    alone = fleet_of("a", heartbeat_timeout_s=1000.0)
    run(alone, arrived("r"), outputs("a", Output("r@0", [7])), draining("a", 8.0))
    assert run(alone, Ticked(), now=7.9) == []
    assert run(alone, outputs("a", more := Output("r@0", [8])), now=7.9) == [DeliverOutputs([more])]

    full = streaming()
    assert run(full, queueing("b", 3), Ticked(), now=7.5) == []
    assert len(run(full, queueing("b", 0), Ticked(), now=7.6)) == 2


def test_a_request_for_which_there_is_no_place_keeps_no_other_waiting() -> None:
    fleet = fleet_of(heartbeat_timeout_s=1000.0)
    run(fleet, LinkOpened("a", 8, adapters=frozenset({70_000})), dataclasses.replace(arrived("r", max_tokens=90), adapter=70_000))
    run(fleet, arrived("plain", max_tokens=9), outputs("a", Output("r@0", [7]), Output("plain@0", [7])))
    run(fleet, LinkOpened("c", 8), arrived("late"))  # at c, which has less to do
    run(fleet, LinkOpened("b", 8), draining("a", 8.0), draining("c", 8.0))
    moved = [i.request_id for i in run(fleet, Ticked(), now=7.9) if isinstance(i, StartAttempt)]
    assert moved == ["plain", "late"]


def test_a_stream_moves_to_a_free_replica_though_one_with_less_to_do_has_a_queue() -> None:
    fleet = streaming()
    run(fleet, LinkOpened("c", 8), queueing("b", 3), arrived("other"))
    assert fleet.requests["other"].replica_id == "c", "so that b has less of this ingress's to do"
    assert run(fleet, Ticked(), now=7.0) == [AbortAttempts("a", ("r@0",)), start("r", 1, "c", prefix=(7,), emitted=1)]


def test_a_replica_that_drains_too_is_no_place_to_move_to() -> None:
    fleet = streaming()
    assert run(fleet, heartbeat("b", draining=True), Ticked(), now=7.5) == []


def test_the_plan_is_that_of_the_first_word_and_gone_with_the_drain() -> None:
    fleet = streaming()
    assert run(fleet, draining("a", 8.0), Ticked(), now=7.0) != []
    again = streaming()
    assert run(again, heartbeat("a"), Ticked(), now=7.5) == []


@pytest.mark.parametrize(("left_s", "begins_at", "late_at"), [(600.0, 540.0, 585.0), (8.0, 4.0, 7.0), (0.0, 0.0, 0.0)])
def test_moves_begin_in_the_second_half_and_at_most_a_minute_before_the_end(
    left_s: float, begins_at: float, late_at: float
) -> None:
    assert MAX_WINDOW_S == 60.0
    assert Drain.noticed(left_s, now=0.0) == Drain(paced_at=begins_at, late_at=late_at)


def test_a_replica_that_has_not_answered_four_moves_gets_no_fifth_until_late() -> None:
    fleet = fleet_of("a", credit=40, heartbeat_timeout_s=1000.0)
    for number in range(40):
        run(fleet, arrived(f"r{number}", max_tokens=90), outputs("a", Output(f"r{number}@0", [7])))
    run(fleet, LinkOpened("b", 40), draining("a", 8.0))
    assert num_starts(run(fleet, Ticked(), now=6.9)) == MAX_UNANSWERED == 4
    assert num_starts(run(fleet, Ticked(), now=6.95)) == 0
    (first, *_) = fleet.replicas["b"].held.values()
    assert num_starts(run(fleet, outputs("b", Output(first.attempt_id, [8])), Ticked(), now=6.99)) == 1
    assert num_starts(run(fleet, Ticked(), now=7.0)) == MAX_UNANSWERED_LATE - 4 == 28


def num_starts(instructions: list[Instruction]) -> int:
    return sum(isinstance(i, StartAttempt) for i in instructions)


@dataclass
class World:
    """One draining replica with streams, others beside it; engines answer a moved request after ``prefill_s``."""

    fleet: FleetState
    budget_s: float
    prefill_s: float
    now: float = 0.0
    moved_at: list[float] = field(default_factory=list)
    answers: list[tuple[float, str, str]] = field(default_factory=list)
    """When an engine has a moved attempt's first token: time, replica, attempt."""
    emitted: dict[str, int] = field(default_factory=dict)

    def tick(self) -> None:
        self.now += TICK_S
        for at, replica_id, attempt_id in [a for a in self.answers if a[0] <= self.now]:
            self.answers.remove((at, replica_id, attempt_id))
            self.deliver(run(self.fleet, outputs(replica_id, Output(attempt_id, [5])), now=self.now))
        self.take(run(self.fleet, Ticked(), now=self.now))

    def take(self, instructions: list[Instruction]) -> None:
        aborted = [i for i in instructions if isinstance(i, AbortAttempts)]
        started = [i for i in instructions if isinstance(i, StartAttempt)]
        assert len(aborted) + len(started) == len(instructions)
        assert [a for i in aborted for a in i.attempt_ids] == [f"{s.request_id}@0" for s in started]
        assert all(s.attempt_id == f"{s.request_id}@1" and len(s.continue_from) == s.emitted for s in started)
        for s in started:
            self.moved_at.append(self.now)
            self.answers.append((self.now + self.prefill_s, s.replica_id, s.attempt_id))
            late = [Output(f"{s.request_id}@0", [5])]  # an output of the old attempt, sent before its abort arrived
            assert run(self.fleet, outputs("old", *late), now=self.now) == []
        limit = MAX_UNANSWERED_LATE if self.now >= self.late_at() else MAX_UNANSWERED
        for replica_id in {r for _, r, _ in self.answers}:
            assert sum(r == replica_id for _, r, _ in self.answers) <= limit

    def late_at(self) -> float:
        return Drain.noticed(self.budget_s, now=0.0).late_at

    def deliver(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, DeliverOutputs):
                for output in instruction.outputs:
                    self.emitted[output.request_id] = self.emitted.get(output.request_id, 0) + len(output.new_token_ids)


@given(
    budget_s=st.sampled_from([0.0, 2.0, 10.0, 600.0]),
    resumes=st.lists(st.sampled_from([Resume.CONTINUE] * 4 + [Resume.NEVER]), max_size=60),
    credits=st.lists(st.integers(1, 40), max_size=3),
    prefill_s=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_each_stream_moves_at_most_once_never_beyond_room_and_none_that_must_stay(
    budget_s: float, resumes: list[Resume], credits: list[int], prefill_s: float
) -> None:
    fleet = fleet_of("old", credit=100, heartbeat_timeout_s=10_000.0, no_replica_s=10_000.0)
    for number, resume in enumerate(resumes):
        run(fleet, arrived(f"r{number}", resume, max_tokens=100), outputs("old", Output(f"r{number}@0", [7])))
    run(fleet, *(LinkOpened(f"new{number}", credit) for number, credit in enumerate(credits)), draining("old", budget_s))
    world = World(fleet, budget_s, prefill_s)
    while world.now < budget_s:
        world.tick()  # `run` validates: never more than the credit
    plan = Drain.noticed(budget_s, now=0.0)
    assert all(at >= plan.paced_at for at in world.moved_at)
    stay = sum(r is Resume.NEVER for r in resumes)
    assert len(world.moved_at) <= min(len(resumes) - stay, sum(credits))
    if prefill_s == 0.0 and budget_s >= 10.0:  # requests with a free place elsewhere move in time
        assert len(world.moved_at) == min(len(resumes) - stay, sum(credits))
        at_once = max((world.moved_at.count(at) for at in world.moved_at), default=0)
        assert at_once <= len(resumes) * 2 * TICK_S / (plan.late_at - plan.paced_at) + 2
    assert all(count <= 1 for count in world.emitted.values())
    ended = run(fleet, LinkLost("old", LinkEnd.SAID_GOODBYE), now=budget_s)
    assert sum(isinstance(i, FailRequest) for i in ended) == stay
    assert len(fleet.requests) == len(resumes) - stay
