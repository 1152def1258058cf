"""`CheckedFleet` runs the fleet beside its model: it checks each instruction when it carries it out, and the invariants."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis.stateful import invariant

from serve_app.core.events import AttemptUnsendable, Event
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import (
    AbortAttempts,
    CloseLink,
    DeliverOutputs,
    FailRequest,
    Instruction,
    PassTrial,
    StartAttempt,
)
from serve_app.core.request import Resume
from serve_app.core.routing import RoutingPolicy
from serve_app.errors import (
    CannotStartInTime,
    NoFreePlace,
    NoReplica,
    QueueFull,
    ReplicaLost,
    RequestQuarantined,
    RequestTooLarge,
    ResumeDiverged,
)
from tests.core.expected_fleet import (
    MAX_DEATHS,
    MAX_WAITING,
    NO_REPLICA_S,
    QUARANTINE_S,
    STANDSTILL_S,
    TIMEOUT_S,
    ExpectedFleet,
    Link,
)
from tests.core.helpers import Compared, Output


class CheckedFleet(ExpectedFleet):
    """``handle`` gives the fleet an event, as its adapter does, and carries out the instructions."""

    routing: Callable[[], RoutingPolicy] = Compared
    engines_preempt = False

    def __init__(self) -> None:
        super().__init__()
        limits: dict[str, Any] = {"max_waiting_requests": MAX_WAITING, "max_deaths": MAX_DEATHS, "max_standstill_s": STANDSTILL_S}
        limits |= {"quarantine_s": QUARANTINE_S, "engines_preempt": self.engines_preempt}
        of_fleet = FleetSettings(model="m", no_replica_s=NO_REPLICA_S, heartbeat_timeout_s=TIMEOUT_S, **limits)
        self.fleet = FleetState(of_fleet, self.routing())
        self.ticks = False
        """Whether the event is the clock's: no other moves requests."""
        self.ending = set[str]()
        """The requests that an event ends by an error."""

    def handle(self, event: Event) -> list[Instruction]:
        first = self._handle_one(event)
        todo = [first]
        while todo:
            instructions = todo.pop(0)
            self.ending = {each.request_id for each in instructions if isinstance(each, FailRequest)}
            for instruction in instructions:
                if (unsendable := self._carry_out(instruction)) is not None:
                    todo.append(self._handle_one(unsendable))
        return first

    def _handle_one(self, event: Event) -> list[Instruction]:
        return self.fleet.handle(event, now=self.now)

    def _carry_out(self, instruction: Instruction) -> Event | None:
        match instruction:
            case StartAttempt():
                return self._start(instruction)
            case AbortAttempts(replica_id, attempt_ids):
                for attempt_id in attempt_ids:
                    link = self.links[replica_id]
                    link.running.pop(attempt_id, None)
                    link.line.pop(attempt_id, None)
                    link.next_trial(attempt_id)
                    if self.ticks and attempt_id.split("@")[0] not in self.ending:
                        self._move(attempt_id, link)
            case PassTrial(replica_id, attempt_id):
                assert attempt_id in self.links[replica_id].held.values()
                self.links[replica_id].next_trial(attempt_id)
            case DeliverOutputs(delivered):
                for output in delivered:
                    assert isinstance(output, Output)
                    self._deliver(output)
            case FailRequest(request_id, error):
                self._fail(request_id, error)
            case CloseLink(replica_id):
                assert replica_id not in self.links
        return None

    def _move(self, attempt_id: str, link: Link) -> None:
        """Take the request off a link that drains, to be the next to start."""
        request_id = attempt_id.split("@")[0]
        request = self.requests[request_id]
        assert link.held[request_id] == attempt_id
        assert link.moves_from is not None
        assert self.now >= link.moves_from
        assert any(not k.draining and not k.waiting and len(k.held) < k.credit for k in self.links.values())
        assert not self.is_stuck(request)
        assert all(self.waits_for_its_like(i) or self.waits_for_its_weights(i) for i in self.queue)
        del link.held[request_id]
        request.moves += 1
        request.lost_at = self.now if request.lost_at is None else request.lost_at
        self.queue.append(request_id)
        self.waiting_since[request_id] = self.now

    def in_order(self) -> list[str]:
        """Return the ids of the requests that wait, in the order of service."""
        return self.queue

    def _start(self, start: StartAttempt) -> Event | None:
        request, link = self.requests[start.request_id], self.links[start.replica_id]
        assert start.request_id == next(
            i for i in self.in_order() if not self.waits_for_its_like(i) and not self.waits_for_its_weights(i)
        )
        assert request.weights in ("", link.weights)
        self.queue.remove(start.request_id)
        assert not self.is_blocked(start.request_id)
        assert start.suspect == bool(request.suspect_of)
        assert self.tried_alike(start.request_id) in (None, start.replica_id)
        assert not link.draining
        assert start.attempt_id == f"{start.request_id}@{request.losses + request.moves}"
        assert start.emitted == len(request.delivered)
        continues = request.resume in (Resume.CONTINUE, Resume.NEVER)
        assert list(start.continue_from) == (request.delivered if continues else [])
        if not request.sendable:
            return AttemptUnsendable(start.request_id, RequestTooLarge(size_bytes=2, limit_bytes=1))
        link.held[start.request_id] = start.attempt_id
        if start.suspect:
            request.trial = "in line"
            link.line[start.attempt_id] = request.prompt + start.continue_from
            link.next_trial()
        else:
            link.running[start.attempt_id] = request.prompt + start.continue_from
        return None

    def _deliver(self, output: Output) -> None:
        request = self.requests[output.request_id]
        if output.new_token_ids and not request.delivered:
            (request.weights,) = {k.weights for k in self.links.values() if output.request_id in k.held}
        request.delivered += output.new_token_ids
        if output.new_token_ids:
            request.lost_at = None
            request.suspect_of = request.trial = ""
        if output.finish_reason is not None:
            self.end(output.request_id, "finish")

    def _fail(self, request_id: str, error: Exception) -> None:
        request = self.requests[request_id]
        if isinstance(error, CannotStartInTime) and error.expected_s:
            assert max(1.0, 0.9 * error.expected_s) <= error.retry_after_s <= max(1.0, 1.1 * error.expected_s)
        elif isinstance(error, NoReplica | CannotStartInTime):
            must_start = self.start_s and all(k.draining for k in self.links.values())
            assert error.retry_after_s == (max(self.start_s.values()) if must_start else 5.0)
        if isinstance(error, ReplicaLost):
            is_alone = request.weights and self.links and all(k.weights != request.weights for k in self.links.values())
            has_waited = is_alone and self.now - self.waiting_since[request_id] > NO_REPLICA_S
            assert self.is_deadly(request) or self.is_stuck(request) or self.stands_still(request_id) or has_waited
        elif isinstance(error, ResumeDiverged):
            assert request.resume is Resume.REPLAY
            assert 0 <= error.position < len(request.delivered)
        elif isinstance(error, NoReplica):
            assert self.now - self.waiting_since[request_id] > NO_REPLICA_S
        elif isinstance(error, CannotStartInTime):
            assert not request.delivered
            assert request.start_by is not None
            assert error.waited_s == self.now - request.arrived_at
            assert self.now >= request.start_by or error.expected_s > 0.9 * (request.start_by - self.now)
        elif isinstance(error, RequestTooLarge):
            assert not request.sendable
        elif isinstance(error, RequestQuarantined):
            assert error.blocked_s == self.blocked[request.fingerprint] - self.now > 0
        elif isinstance(error, QueueFull):
            assert request_id == [i for i in self.in_order() if self.never_started(i)][-1], "the last one makes room"
        else:
            assert isinstance(error, NoFreePlace)
        self.end(request_id, type(error).__name__)

    # What always holds.

    @invariant()
    def fleet_is_valid(self) -> None:
        self.fleet.validate()

    @invariant()
    def every_request_is_live_or_has_exactly_one_outcome(self) -> None:
        assert set(self.fleet.requests) == set(self.live())
        assert all(len(r.outcomes) <= 1 for r in self.requests.values())

    @invariant()
    def what_was_delivered_is_the_beginning_of_the_answer_and_all_of_it_at_the_end(self) -> None:
        for request in self.requests.values():
            assert tuple(request.delivered) == request.answer[: len(request.delivered)]
            assert request.outcomes != ["finish"] or tuple(request.delivered) == request.answer

    @invariant()
    def no_engine_has_more_attempts_than_its_credit(self) -> None:
        assert all(len(k.running) <= k.credit and len(k.held) <= k.credit for k in self.links.values())

    @invariant()
    def the_queue_is_first_come_first_served(self) -> None:
        assert list(self.fleet.waiting) == self.in_order()

    @invariant()
    def outcomes_are_counted(self) -> None:
        ended = Counter(o for r in self.requests.values() for o in r.outcomes)
        counted = self.fleet.outcomes
        assert (counted["complete"], counted["aborted"]) == (ended["finish"], ended["abort"])
        assert counted["blocked"] + counted["quarantined"] == ended["RequestQuarantined"]
        assert counted["held_back"] == ended["NoFreePlace"]
        others = ended["finish"] + ended["abort"] + ended["RequestQuarantined"] + ended["NoFreePlace"]
        assert counted["rejected"] + counted["failed"] == ended.total() - others
