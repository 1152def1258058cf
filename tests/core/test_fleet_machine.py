"""This machine runs the fleet against simulated engines whose next token is a function of the sequence so far, in any order of events."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.events import (
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
from serve_app.core.instructions import (
    CloseLink,
)
from serve_app.core.least_loaded import rank_of
from serve_app.core.load import EngineLoad
from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import Choice, Reason, ReplicaState
from tests.core.checked_fleet import CheckedFleet
from tests.core.expected_fleet import MAX_WAITING, NO_REPLICA_S, REPLICAS, TIMEOUT_S, Link, Request, next_token
from tests.core.helpers import outputs


class FleetMachine(CheckedFleet, RuleBasedStateMachine):
    """What happens to the fleet."""

    def _prefix(self, number: int) -> Prefix:
        return NO_PREFIX

    def _whose(self, number: int) -> dict[str, Any]:
        """Return tenant, weight and priority of a request."""
        return {}

    @rule(
        resume=st.sampled_from(Resume),
        max_tokens=st.sampled_from([9, 9, 1]),
        length=st.integers(2, 9),
        sendable=st.sampled_from([True] * 7 + [False]),
        like=st.sampled_from([None, None, "f0", "f1"]),
        background=st.sampled_from([False, False, True]),
        within_s=st.sampled_from([None, None, None, 3.0, 8.0, 30.0]),
    )
    def arrive(
        self,
        resume: Resume,
        max_tokens: int,
        length: int,
        sendable: bool,
        like: str | None,
        background: bool = False,
        within_s: float | None = None,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        prompt: tuple[int, ...] = (len(self.requests),)
        answer = prompt
        for _ in range(0 if resume is Resume.RESTART else min(length, max_tokens)):
            answer += (next_token(answer),)
        fingerprint = like or request_id
        start_by = None if within_s is None else self.now + within_s
        self.requests[request_id] = Request(prompt, answer[len(prompt) :], resume, sendable, fingerprint, self.now, start_by)
        prefix = self._prefix(len(self.requests))
        whose = self._whose(len(self.requests))
        arrived = RequestArrived(request_id, 1, max_tokens, resume, fingerprint, prefix, background, start_by=start_by, **whose)
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
        is_full = len(self.queue) >= MAX_WAITING and not room
        num_refused = self._num_refused()
        self.queue.append(request_id)
        self.waiting_since[request_id] = self.now
        self.handle(arrived)
        assert self._num_refused() == num_refused + (is_full and self.requests[request_id].outcomes != ["CannotStartInTime"])

    def _num_refused(self) -> int:
        return sum(request.outcomes == ["QueueFull"] for request in self.requests.values())

    @rule(
        replica_id=st.sampled_from(REPLICAS),
        credit=st.integers(1, 3),
        draining=st.sampled_from([False] * 5 + [True]),
        weights=st.sampled_from(["new", "new", "old"]),
    )
    def open_link(self, replica_id: str, credit: int, draining: bool, weights: str = "new") -> None:
        """Open a link; it replaces the link that the replica has, if any."""
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
        self._beat(data.draw(st.sampled_from(sorted(self.links))), draining, waiting, left_s)

    @precondition(lambda self: any(k.held for k in self.links.values()))
    @rule(data=st.data(), credit=st.integers(1, 3), left_s=st.sampled_from([0.0, 2.0, 8.0]))
    def drain_beside_room(self, data: st.DataObject, credit: int, left_s: float) -> None:
        """Let a replica with requests drain until the end of its budget beside a new replica, which chance alone rarely does."""
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.held)))
        self._beat(replica_id, True, 0, left_s)
        self.open_link(next(i for i in REPLICAS if i != replica_id), credit, False)
        self.pass_time(left_s / 2 + 1.0)

    @precondition(lambda self: self.queue and self.links)
    @rule(within_s=st.sampled_from([3.0, 30.0]))
    def arrive_at_a_queue_that_has_waited_for_long(self, within_s: float) -> None:
        """Let the queue wait until its rate is known, which chance alone rarely does, and let a request with a deadline come."""
        for _ in range(3):
            for replica_id, link in list(self.links.items()):
                self._beat(replica_id, link.draining, link.waiting, 600.0)
            self.pass_time(4.0)
        self.arrive(Resume.CONTINUE, 9, 3, True, None, within_s=within_s)

    def _beat(self, replica_id: str, draining: bool, waiting: int, left_s: float) -> None:
        link = self.links[replica_id]
        link.heard_at, link.draining, link.waiting, link.beat_running = self.now, draining, waiting, len(link.running)
        if not draining:
            link.moves_from = None
        elif link.moves_from is None:
            link.moves_from = self.now + left_s / 2 if left_s < 120 else self.now + left_s - 60
        self.handle(HeartbeatArrived(replica_id, EngineLoad(1, len(link.running), waiting, 0.5), draining, left_s))

    @precondition(lambda self: any(k.running for k in self.links.values()))
    @rule(data=st.data(), wrong=st.sampled_from([False, False, False, True]), late=st.booleans())
    def step(self, data: st.DataObject, wrong: bool, late: bool) -> None:
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.running)))
        link = self.links[replica_id]
        counts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        link.frames.append(
            [link.compute(i, self.request_of(i), n, wrong=wrong) for i, n in zip(list(link.running), counts, strict=False)]
        )
        while link.frames and not late:
            self._receive_frame(replica_id)

    @precondition(lambda self: any(k.frames for k in self.links.values()))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        replica_id = data.draw(st.sampled_from(sorted(i for i, k in self.links.items() if k.frames)))
        self._receive_frame(replica_id)

    def _receive_frame(self, replica_id: str) -> None:
        link = self.links[replica_id]
        match link.frames.pop(0):
            case TrialBegan() as word:
                request = self.request_of(word.attempt_id)
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
        self.ticks = True
        instructions = self.handle(Ticked())
        self.ticks = False
        assert [i.replica_id for i in instructions if isinstance(i, CloseLink)] == silent
        assert all(self.now - self.waiting_since[i] <= NO_REPLICA_S and not self.stands_still(i) for i in self.queue)
        assert all(r.delivered or r.outcomes or r.start_by is None or self.now < r.start_by for r in self.requests.values())

    def teardown(self) -> None:
        """Check that with a good replica for each version of the weights every remaining request ends."""
        for replica_id in list(self.links):
            self.lose_link(replica_id, LinkEnd.SAID_GOODBYE)
        for weights in ("old", "new"):
            self.open_link(weights, 100, False, weights)
        for _ in range(20 + 10 * len(self.live())):
            for replica_id, link in self.links.items():
                link.frames.append([link.compute(i, self.request_of(i), 1, wrong=False) for i in list(link.running)])
                while link.frames:
                    self._receive_frame(replica_id)
        self.every_request_is_live_or_has_exactly_one_outcome()
        self.what_was_delivered_is_the_beginning_of_the_answer_and_all_of_it_at_the_end()
        assert self.live() == []


FleetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestFleet = FleetMachine.TestCase


MAX_LOAD = 1.2


class Bounded(PrefixAffinity):
    """Checks each pick: the replica takes the request, and a pick by affinity is within the bound or the one by load, too."""

    def __init__(self) -> None:
        super().__init__(MAX_LOAD)

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        choice = super().pick(request, replicas)
        assert (choice is None) == (not any(r.takes(request) for r in replicas.values()))
        if choice is not None:
            loads = [r.outstanding_tokens for r in replicas.values() if not r.draining]
            assert choice.replica.takes(request)
            bound = MAX_LOAD * (sum(loads) / len(loads) + request.tokens_left())
            least = min((r for r in replicas.values() if r.takes(request)), key=lambda r: rank_of(r, request))
            by_load = choice.reason in (Reason.LOAD, Reason.SPREAD) or choice.replica is least
            assert by_load or choice.replica.outstanding_tokens <= bound
        return choice

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        """Let all of them leave: other tests check which ones should."""
        left = super().leaving(queued, replicas)
        assert [r for r in queued if r in left] == list(left)
        return queued


class PrefixMachine(FleetMachine):
    """The same fleet, routed by what replicas have cached: prompts are beginnings of a few conversations, some with a session."""

    routing = Bounded

    def _prefix(self, number: int) -> Prefix:
        rng = random.Random(number)
        start, length = rng.randrange(3), rng.randrange(5)
        return Prefix([hash((start, n)) for n in range(length)], 1, rng.choice([None, None, 1, 2]))


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPrefixFleet = PrefixMachine.TestCase


class TenantMachine(FleetMachine):
    """The same fleet with tenants of several weights and priorities. Their tags are taken from the fleet; what follows from them is not."""

    engines_preempt = True

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        place = self.fleet.order.place

        def noting(request: RequestState, *args: Any) -> None:
            place(request, *args)
            self.tags[request.request_id] = request.priority

        self.fleet.order.place = noting  # type: ignore[method-assign, assignment]

    def _whose(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)
        tenant, weight = rng.choice([("", 1.0), ("red", 1.0), ("blue", 4.0)])
        return {"tenant": tenant, "weight": weight, "priority": rng.choice(["interactive", "interactive", "batch", "background"])}

    def in_order(self) -> list[str]:
        arrivals = [*self.requests]

        def rank(request_id: str) -> tuple[bool, int, int]:
            begun = bool(self.requests[request_id].delivered)
            return not begun, 0 if begun else self.tags[request_id], arrivals.index(request_id)

        return sorted(self.queue, key=rank)


TenantMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestTenantFleet = TenantMachine.TestCase
