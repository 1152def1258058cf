"""The fleet against simulated engines whose next token is a function of the sequence so far, in any order of events."""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.affinity import PrefixAffinity
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
    TrialBegan,
)
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
from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import Choice, Reason, ReplicaState, RoutingPolicy
from serve_app.errors import NoFreePlace, NoReplica, QueueFull, ReplicaLost, RequestQuarantined, RequestTooLarge, ResumeDiverged
from tests.core.helpers import Compared, Output, outputs

MAX_WAITING = 4
MAX_DEATHS = 3
TIMEOUT_S = 5.0
NO_REPLICA_S = 12.0
STANDSTILL_S = 20.0
QUARANTINE_S = 15.0
BLAMED = (LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD, LinkEnd.BROKE_OFF)
REPLICAS = ("a", "b", "c")


def next_token(sequence: tuple[int, ...]) -> int:
    return zlib.crc32(repr(sequence).encode()) % 50


@dataclass
class Request:
    """What the client of one request is owed and has got."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    resume: Resume
    sendable: bool
    fingerprint: str
    arrived_at: float
    delivered: list[int] = field(default_factory=list)
    losses: int = 0
    deaths: int = 0
    broken_off: set[str] = field(default_factory=set)
    """Replicas that may have died."""
    lost_at: float | None = None
    """When the client's present wait for a replica to go on began."""
    suspect_of: str = ""
    """The replica that it may have brought down since its latest token."""
    trial: Literal["", "in line", "begun"] = ""
    weights: str = ""
    """That gave its first token."""
    moves: int = 0
    """Times it came back from an engine's queue."""
    outcomes: list[str] = field(default_factory=list)


@dataclass
class Link:
    """The engine behind one link, and the frames that are on their way from it."""

    credit: int
    heard_at: float
    draining: bool = False
    weights: str = ""
    waiting: int = 0
    """In the engine's queue, by the last heartbeat; so many of them are this ingress's as of all that the engine then had."""
    beat_running: int = 0
    moves_from: float | None = None
    """When requests may begin to move away; None while no drain's end was told."""
    running: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Attempt id -> prompt and output so far, by start."""
    held: dict[str, str] = field(default_factory=dict)
    """Request id -> attempt id as the ingress sees it, by start."""
    line: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Suspects that wait for ``on_trial``, as ``running``."""
    on_trial: str = ""
    frames: list[list[Output] | TrialBegan] = field(default_factory=list)


class FleetMachine(RuleBasedStateMachine):
    routing: Callable[[], RoutingPolicy] = Compared

    def __init__(self) -> None:
        super().__init__()
        limits: dict[str, Any] = {"max_waiting_requests": MAX_WAITING, "max_deaths": MAX_DEATHS, "max_standstill_s": STANDSTILL_S}
        limits["quarantine_s"] = QUARANTINE_S
        of_fleet = FleetSettings(model="m", no_replica_s=NO_REPLICA_S, heartbeat_timeout_s=TIMEOUT_S, **limits)
        self.fleet = FleetState(of_fleet, self.routing())
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.links: dict[str, Link] = {}
        self.queue: list[str] = []
        self.waiting_since: dict[str, float] = {}
        self.stale: list[tuple[str, Output]] = []
        self.start_s: dict[str, float] = {}
        self.ticks = False
        self.blocked: dict[str, float] = {}

    def prefix(self, number: int) -> Prefix:
        return NO_PREFIX

    def live(self) -> list[str]:
        return [i for i, r in self.requests.items() if not r.outcomes]

    # What happens.

    @rule(
        resume=st.sampled_from(Resume),
        max_tokens=st.sampled_from([9, 9, 1]),
        length=st.integers(2, 9),
        sendable=st.sampled_from([True] * 7 + [False]),
        like=st.sampled_from([None, None, "f0", "f1"]),
        background=st.sampled_from([False, False, True]),
    )
    def arrive(
        self, resume: Resume, max_tokens: int, length: int, sendable: bool, like: str | None, background: bool = False
    ) -> None:
        request_id = f"r{len(self.requests)}"
        prompt: tuple[int, ...] = (len(self.requests),)
        answer = prompt
        for _ in range(0 if resume is Resume.RESTART else min(length, max_tokens)):
            answer += (next_token(answer),)
        fingerprint = like or request_id
        self.requests[request_id] = Request(prompt, answer[len(prompt) :], resume, sendable, fingerprint, self.now)
        prefix = self.prefix(len(self.requests))
        arrived = RequestArrived(request_id, 1, max_tokens, resume, fingerprint, prefix, background)
        if self.is_blocked(request_id):
            self.handle(arrived)
            assert self.requests[request_id].outcomes == ["RequestQuarantined"]
            return
        free = any(len(k.held) < k.credit and not k.draining and not k.waiting for k in self.links.values())
        if background and (self.queue or not (free or not self.links)):
            self.handle(arrived)
            assert self.requests[request_id].outcomes == ["NoFreePlace"]
            return
        room = any(len(k.held) < k.credit and not k.draining for k in self.links.values())
        if len(self.queue) >= MAX_WAITING and not room:
            self.handle(arrived)
            assert self.requests[request_id].outcomes == ["QueueFull"]
            return
        self.queue.append(request_id)
        self.waiting_since[request_id] = self.now
        self.handle(arrived)

    @rule(
        replica_id=st.sampled_from(REPLICAS),
        credit=st.integers(1, 3),
        draining=st.sampled_from([False] * 5 + [True]),
        weights=st.sampled_from(["new", "new", "old"]),
    )
    def open_link(self, replica_id: str, credit: int, draining: bool, weights: str = "new") -> None:
        """Of a replica that has one, it replaces the first."""
        is_new = replica_id not in self.links
        self.forget(replica_id, LinkEnd.ENDED_HERE)
        for request in self.requests.values():
            if replica_id in request.broken_off and request.suspect_of == replica_id:
                request.suspect_of = ""
            request.broken_off.discard(replica_id)
        self.links[replica_id] = Link(credit, self.now, draining, weights)
        if is_new and not draining:
            self.take_back(credit)
        self.handle(LinkOpened(replica_id, credit, draining, weights))

    @precondition(lambda self: self.links)
    @rule(replica_id=st.sampled_from(REPLICAS), end=st.sampled_from(LinkEnd))
    def lose_link(self, replica_id: str, end: LinkEnd) -> None:
        self.forget(replica_id, end)
        self.handle(LinkLost(replica_id, end))

    @precondition(lambda self: self.links)
    @rule(
        data=st.data(),
        draining=st.booleans(),
        waiting=st.sampled_from([0, 0, 1, 2]),
        left_s=st.sampled_from([0.0, 2.0, 8.0, 600.0]),
    )
    def heartbeat(self, data: st.DataObject, draining: bool, waiting: int, left_s: float) -> None:
        self.beat(data.draw(st.sampled_from(sorted(self.links))), draining, waiting, left_s)

    @precondition(lambda self: any(k.held for k in self.links.values()))
    @rule(data=st.data(), credit=st.integers(1, 3), left_s=st.sampled_from([0.0, 2.0, 8.0]))
    def drain_beside_room(self, data: st.DataObject, credit: int, left_s: float) -> None:
        """Rare by chance alone: a replica that holds something drains until the end of its budget, and another is new."""
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.held)))
        self.beat(replica_id, True, 0, left_s)
        self.open_link(next(i for i in REPLICAS if i != replica_id), credit, False)
        self.pass_time(left_s / 2 + 1.0)

    def beat(self, replica_id: str, draining: bool, waiting: int, left_s: float) -> None:
        link = self.links[replica_id]
        link.heard_at, link.draining, link.waiting, link.beat_running = self.now, draining, waiting, len(link.running)
        if not draining:
            link.moves_from = None
        elif link.moves_from is None:
            link.moves_from = self.now + left_s / 2 if left_s < 120 else self.now + left_s - 60
        self.handle(HeartbeatArrived(replica_id, 1, len(link.running), waiting, 0.5, draining, left_s))

    @precondition(lambda self: any(k.running for k in self.links.values()))
    @rule(data=st.data(), wrong=st.sampled_from([False, False, False, True]), late=st.booleans())
    def step(self, data: st.DataObject, wrong: bool, late: bool) -> None:
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.running)))
        link = self.links[replica_id]
        counts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        link.frames.append([self.compute(link, i, n, wrong=wrong) for i, n in zip(list(link.running), counts, strict=False)])
        while link.frames and not late:
            self.receive_frame(replica_id)

    @precondition(lambda self: any(k.frames for k in self.links.values()))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.frames)))
        self.receive_frame(replica_id)

    def receive_frame(self, replica_id: str) -> None:
        link = self.links[replica_id]
        match link.frames.pop(0):
            case TrialBegan() as word:
                request = self.requests[word.attempt_id.split("@")[0]]
                if link.held.get(word.attempt_id.split("@")[0]) == word.attempt_id and request.trial == "in line":
                    request.trial = "begun"
                assert self.handle(word) == []
            case frame:
                link.heard_at = self.now
                self.handle(outputs(replica_id, *frame))

    @precondition(lambda self: self.stale)
    @rule(replica_id=st.sampled_from(REPLICAS))
    def receive_of_a_former_link(self, replica_id: str) -> None:
        _, output = self.stale.pop()
        if replica_id in self.links:
            self.links[replica_id].heard_at = self.now
        assert self.fleet.handle(outputs(replica_id, output), now=self.now) == []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.requests)), unique=True, max_size=3))
        for request_id in set(chosen) & set(self.live()):
            self.end(request_id, "abort")
        self.handle(RequestsAborted(chosen))

    @rule(replica_id=st.sampled_from(REPLICAS), start_s=st.sampled_from([20.0, 40.0, 60.0]))
    def measure_start(self, replica_id: str, start_s: float) -> None:
        self.start_s.setdefault(replica_id, start_s)
        assert self.handle(StartMeasured(replica_id, start_s)) == []

    @rule(seconds=st.sampled_from([1.0, 4.0, 7.0, 13.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        silent = [i for i, k in self.links.items() if self.now - k.heard_at > TIMEOUT_S]
        for replica_id in silent:
            self.forget(replica_id, LinkEnd.UNRESPONSIVE)
        self.ticks = True  # nothing else moves requests
        instructions = self.handle(Ticked())
        self.ticks = False
        assert [i.replica_id for i in instructions if isinstance(i, CloseLink)] == silent
        assert all(self.now - self.waiting_since[i] <= NO_REPLICA_S and not self.stands_still(i) for i in self.queue)

    # The engines.

    def compute(self, link: Link, attempt_id: str, count: int, *, wrong: bool) -> Output:
        """Add up to ``count`` tokens. ``wrong``: a replay does not repeat itself."""
        request = self.requests[attempt_id.split("@")[0]]
        if request.resume is Resume.RESTART:
            del link.running[attempt_id]
            self.next_trial(link, attempt_id)
            return Output(attempt_id, [], finish_reason="stop")
        sequence = link.running[attempt_id]
        whole = request.prompt + request.answer
        replays = request.resume is Resume.REPLAY and len(sequence) - 1 < len(request.delivered)
        new = [next_token(sequence) + 50] if wrong and replays and count else []
        while not new or (not wrong and len(new) < count and len(sequence) + len(new) < len(whole)):
            if len(new) == count:
                break
            new.append(next_token(sequence + tuple(new)))
        link.running[attempt_id] = sequence + tuple(new)
        finished = len(link.running[attempt_id]) >= len(whole)
        if finished:
            del link.running[attempt_id]
            self.next_trial(link, attempt_id)
        return Output(attempt_id, new, finish_reason="stop" if finished else None)

    def next_trial(self, link: Link, former: str = "") -> None:
        """The next suspect in line goes to the engine, if ``former`` was the one on trial, or none was."""
        if link.on_trial == former:
            link.on_trial = next(iter(link.line), "")
            if link.on_trial:
                link.running[link.on_trial] = link.line.pop(link.on_trial)
                link.frames.append(TrialBegan(link.on_trial))

    def is_blocked(self, request_id: str) -> bool:
        return self.blocked.get(self.requests[request_id].fingerprint, self.now) > self.now

    def stands_still(self, request_id: str) -> bool:
        lost_at = self.requests[request_id].lost_at
        return lost_at is not None and self.now - lost_at > STANDSTILL_S

    def forget(self, replica_id: str, end: LinkEnd) -> None:
        """The link is gone: what it held waits first, oldest first, or ends."""
        if (link := self.links.pop(replica_id, None)) is None:
            return
        self.stale = [(replica_id, output) for frame in link.frames if isinstance(frame, list) for output in frame]
        back = []
        for request_id in link.held:
            request = self.requests[request_id]
            request.losses += 1
            trial, request.trial = request.trial, ""
            if end in BLAMED and trial == "begun" and request.suspect_of:
                self.blocked[request.fingerprint] = self.now + QUARANTINE_S
                continue
            if end in BLAMED and trial != "in line":
                request.suspect_of = replica_id
                request.deaths += end is not LinkEnd.BROKE_OFF
                request.broken_off |= {replica_id} if end is LinkEnd.BROKE_OFF else set()
            if not (self.is_deadly(request) or self.stands_still(request_id) or self.is_stuck(request)):
                back.append(request_id)
                self.waiting_since[request_id] = self.now
                request.lost_at = self.now if request.lost_at is None else request.lost_at
        self.queue[:0] = back

    def is_deadly(self, request: Request) -> bool:
        return request.deaths + len(request.broken_off) == MAX_DEATHS

    def is_stuck(self, request: Request) -> bool:
        return bool(request.resume is Resume.NEVER and request.delivered)

    def take_back(self, limit: int) -> None:
        """What only waits in engines comes to the front of the queue, in the order of arrival."""
        back: list[str] = []
        for link in self.links.values():
            unstarted = [i for i in link.held if not self.requests[i].delivered and not self.requests[i].trial]
            total = link.waiting + link.beat_running
            part = min(len(unstarted), round(link.waiting * len(link.held) / total)) if total else 0
            taken = unstarted[-part:][: limit - len(back)] if part and not link.draining else []
            link.waiting = max(0, link.waiting - len(taken))
            back += taken
            for request_id in taken:
                del link.held[request_id]
        back.sort(key=lambda request_id: self.requests[request_id].arrived_at)
        for request_id in back:
            self.requests[request_id].moves += 1
            self.waiting_since[request_id] = self.now
        self.queue[:0] = back

    # The adapter.

    def handle(self, event: Event) -> list[Instruction]:
        first = instructions = self.fleet.handle(event, now=self.now)
        todo = [first]
        while todo:
            instructions = todo.pop(0)
            for instruction in instructions:
                if (unsendable := self.carry_out(instruction)) is not None:
                    todo.append(self.fleet.handle(unsendable, now=self.now))
        return first

    def carry_out(self, instruction: Instruction) -> Event | None:
        match instruction:
            case StartAttempt():
                return self.start(instruction)
            case AbortAttempts(replica_id, attempt_ids):
                for attempt_id in attempt_ids:
                    link = self.links[replica_id]
                    link.running.pop(attempt_id, None)
                    link.line.pop(attempt_id, None)
                    self.next_trial(link, attempt_id)
                    if self.ticks:
                        self.move(attempt_id, link)
            case PassTrial(replica_id, attempt_id):
                assert attempt_id in self.links[replica_id].held.values()
                self.next_trial(self.links[replica_id], attempt_id)
            case DeliverOutputs(delivered):
                for output in delivered:
                    assert isinstance(output, Output)
                    self.deliver(output)
            case FailRequest(request_id, error):
                self.fail(request_id, error)
            case CloseLink(replica_id):
                assert replica_id not in self.links
        return None

    def move(self, attempt_id: str, link: Link) -> None:
        """The request leaves a link that drains, and is the next to start."""
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

    def start(self, start: StartAttempt) -> Event | None:
        request, link = self.requests[start.request_id], self.links[start.replica_id]
        assert start.request_id == next(
            i for i in self.queue if not self.waits_for_its_like(i) and not self.waits_for_its_weights(i)
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
            self.next_trial(link)
        else:
            link.running[start.attempt_id] = request.prompt + start.continue_from
        return None

    def tried_alike(self, request_id: str) -> str | None:
        """Return the replica where a request like this suspect is on trial or in line."""
        request = self.requests[request_id]
        tried = [
            replica_id
            for replica_id, link in self.links.items()
            for i in link.held
            if self.requests[i].trial and self.requests[i].fingerprint == request.fingerprint
        ]
        assert len(set(tried)) <= 1
        return tried[0] if tried and request.suspect_of else None

    def waits_for_its_like(self, request_id: str) -> bool:
        if (only := self.tried_alike(request_id)) is None:
            return False
        link, weights = self.links[only], self.requests[request_id].weights
        return link.draining or len(link.held) >= link.credit or weights not in ("", link.weights)

    def waits_for_its_weights(self, request_id: str) -> bool:
        weights = self.requests[request_id].weights
        links = [k for k in self.links.values() if not k.draining and len(k.held) < k.credit]
        return bool(weights) and all(k.weights != weights for k in links)

    def deliver(self, output: Output) -> None:
        request = self.requests[output.request_id]
        if output.new_token_ids and not request.delivered:
            (request.weights,) = {k.weights for k in self.links.values() if output.request_id in k.held}
        request.delivered += output.new_token_ids
        if output.new_token_ids:
            request.lost_at = None
            request.suspect_of = request.trial = ""
        if output.finish_reason is not None:
            self.end(output.request_id, "finish")

    def fail(self, request_id: str, error: Exception) -> None:
        request = self.requests[request_id]
        if isinstance(error, NoReplica | QueueFull):
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
        elif isinstance(error, RequestTooLarge):
            assert not request.sendable
        elif isinstance(error, RequestQuarantined):
            assert error.blocked_s == self.blocked[request.fingerprint] - self.now > 0
        else:
            assert isinstance(error, QueueFull | NoFreePlace)
        self.end(request_id, type(error).__name__)

    def end(self, request_id: str, outcome: str) -> None:
        self.requests[request_id].outcomes.append(outcome)
        self.requests[request_id].trial = ""
        if request_id in self.queue:
            self.queue.remove(request_id)
        for link in self.links.values():
            link.held.pop(request_id, None)

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
        assert list(self.fleet.waiting) == self.queue

    @invariant()
    def outcomes_are_counted(self) -> None:
        ended = Counter(o for r in self.requests.values() for o in r.outcomes)
        counted = self.fleet.outcomes
        assert (counted["complete"], counted["aborted"]) == (ended["finish"], ended["abort"])
        assert counted["blocked"] + counted["quarantined"] == ended["RequestQuarantined"]
        assert counted["held_back"] == ended["NoFreePlace"]
        others = ended["finish"] + ended["abort"] + ended["RequestQuarantined"] + ended["NoFreePlace"]
        assert counted["rejected"] + counted["failed"] == ended.total() - others

    def teardown(self) -> None:
        """With a good replica for each version of the weights every request that is left comes to its end."""
        for replica_id in list(self.links):
            self.lose_link(replica_id, LinkEnd.SAID_GOODBYE)
        for weights in ("old", "new"):
            self.open_link(weights, 100, False, weights)
        for _ in range(20 + 10 * len(self.live())):
            for replica_id, link in self.links.items():
                link.frames.append([self.compute(link, i, 1, wrong=False) for i in list(link.running)])
                while link.frames:
                    self.receive_frame(replica_id)
        self.every_request_is_live_or_has_exactly_one_outcome()
        self.what_was_delivered_is_the_beginning_of_the_answer_and_all_of_it_at_the_end()
        assert self.live() == []


FleetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestFleet = FleetMachine.TestCase


MAX_LOAD = 1.2


class Bounded(PrefixAffinity):
    """Looks at each pick: it takes the request, and one by affinity is within the bound."""

    def __init__(self) -> None:
        super().__init__(MAX_LOAD)

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        choice = super().pick(request, replicas)
        assert (choice is None) == (not any(r.takes(request) for r in replicas.values()))
        if choice is not None:
            loads = [r.outstanding_tokens for r in replicas.values() if not r.draining]
            assert choice.replica.takes(request)
            bound = MAX_LOAD * (sum(loads) / len(loads) + request.tokens_left())
            assert choice.reason in (Reason.LOAD, Reason.SPREAD) or choice.replica.outstanding_tokens <= bound
        return choice

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        """All: which of them do is tested by itself."""
        left = super().leaving(queued, replicas)
        assert [r for r in queued if r in left] == list(left)
        return queued


class PrefixMachine(FleetMachine):
    """The same fleet, routed by what replicas have cached: prompts are beginnings of a few conversations, some with a session."""

    routing = Bounded

    def prefix(self, number: int) -> Prefix:
        rng = random.Random(number)
        start, length = rng.randrange(3), rng.randrange(5)
        return Prefix([hash((start, n)) for n in range(length)], 1, rng.choice([None, None, 1, 2]))


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPrefixFleet = PrefixMachine.TestCase
