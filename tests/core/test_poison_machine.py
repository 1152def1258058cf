"""One poisonous request runs among innocent ones: two ingresses, replicas whose engines it ends, and messages under way in any order.

An engine is in the middle of a step between two calls of `step`: what is added or aborted meanwhile counts from the next step on. The
poison ends the step that computes its token number ``fatal``.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.events import LinkEnd, LinkLost, LinkOpened, OutputsArrived, RequestArrived, RequestsAborted, TrialBegan
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import AbortAttempts, DeliverOutputs, FailRequest, Instruction, PassTrial, StartAttempt
from serve_app.core.request import Resume
from serve_app.errors import RequestQuarantined
from serve_app.links.protocol.messages import AddSuspect, TrialBegins, TrialPassed
from serve_app.replica.trials import Trials
from tests.core.helpers import Output

INGRESSES = (0, 1)
TOKENS = 4
CREDIT = 3
POISON = "poison"
FOREVER_S = 1e9

ToReplica = StartAttempt | AbortAttempts | TrialPassed
ToIngress = TrialBegins | list[Output] | LinkEnd


@dataclass
class Attempt:
    """An attempt of a request in an engine. ``done``: output tokens so far, those of former attempts included."""

    ingress: int
    attempt_id: str
    done: int

    @property
    def request_id(self) -> str:
        return self.attempt_id.split("@")[0]


@dataclass
class Replica:
    """A replica: ``inbox`` has the messages that the engine takes in before its next step, ``step`` the attempts that it computes now."""

    trials: Trials[int]
    placed: dict[str, Attempt] = field(default_factory=dict)
    inbox: list[Attempt | list[str] | None] = field(default_factory=list)
    running: dict[str, Attempt] = field(default_factory=dict)
    step: list[Attempt] = field(default_factory=list)


class PoisonMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        limits = FleetSettings("m", no_replica_s=FOREVER_S, heartbeat_timeout_s=FOREVER_S, max_standstill_s=FOREVER_S)
        self.fleets = [FleetState(limits) for _ in INGRESSES]
        self.replicas: dict[str, Replica] = {}
        self.down: dict[tuple[int, str], deque[ToReplica]] = {}
        self.up: dict[tuple[int, str], deque[ToIngress]] = {}
        self.num_replicas = self.num_requests = self.deaths = 0
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.owner: dict[str, int] = {}

    @initialize(
        num_replicas=st.integers(1, 4),
        fatal=st.integers(0, TOKENS - 1),
        resume=st.sampled_from([Resume.CONTINUE, Resume.REPLAY]),
        before=st.integers(0, 4),
    )
    def begin(self, num_replicas: int, fatal: int, resume: Resume, before: int) -> None:
        self.fatal, self.resume = fatal, resume
        for _ in range(num_replicas):
            self.open_replica()
        for number in range(before):
            self.arrive(number % 2)
        self.add(POISON, 0)

    # What happens.

    @rule(ingress=st.sampled_from(INGRESSES))
    def arrive(self, ingress: int) -> None:
        self.num_requests += 1
        self.add(f"r{self.num_requests}", ingress)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Let a client leave."""
        if live := sorted(self.delivered.keys() - self.ended):
            request_id = data.draw(st.sampled_from(live))
            self.ended[request_id] = "aborted"
            fleet = self.fleets[self.owner[request_id]]
            self.carry_out(self.owner[request_id], fleet.handle(RequestsAborted([request_id]), now=0.0))

    @precondition(lambda self: any(self.down.values()))
    @rule(data=st.data())
    def to_replica(self, data: st.DataObject) -> None:
        ingress, replica_id = data.draw(st.sampled_from(sorted(k for k, q in self.down.items() if q)))
        self.receive_at_replica(ingress, replica_id)

    @precondition(lambda self: any(self.up.values()))
    @rule(data=st.data())
    def to_ingress(self, data: st.DataObject) -> None:
        ingress, replica_id = data.draw(st.sampled_from(sorted(k for k, q in self.up.items() if q)))
        self.receive_at_ingress(ingress, replica_id)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.step_of(data.draw(st.sampled_from(sorted(self.replicas))))

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Let a replica go by its own decision."""
        self.close(data.draw(st.sampled_from(sorted(self.replicas))), LinkEnd.SAID_GOODBYE)
        self.open_replica()

    # The ingresses.

    def add(self, request_id: str, ingress: int) -> None:
        self.delivered[request_id], self.owner[request_id] = [], ingress
        arrived = RequestArrived(request_id, 1, TOKENS, self.resume, request_id)
        self.carry_out(ingress, self.fleets[ingress].handle(arrived, now=0.0))

    def receive_at_ingress(self, ingress: int, replica_id: str) -> None:
        fleet = self.fleets[ingress]
        match self.up[ingress, replica_id].popleft():
            case TrialBegins(attempt_id):
                instructions = fleet.handle(TrialBegan(attempt_id), now=0.0)
            case LinkEnd() as end:
                instructions = fleet.handle(LinkLost(replica_id, end), now=0.0)
                del self.up[ingress, replica_id], self.down[ingress, replica_id]
            case frame:
                instructions = fleet.handle(OutputsArrived(replica_id, frame), now=0.0)
        self.carry_out(ingress, instructions)

    def carry_out(self, ingress: int, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartAttempt() | AbortAttempts():
                    self.down[ingress, instruction.replica_id].append(instruction)
                case PassTrial(replica_id, attempt_id):
                    self.down[ingress, replica_id].append(TrialPassed(attempt_id))
                case DeliverOutputs(outputs):
                    for output in outputs:
                        self.delivered[output.request_id] += output.new_token_ids
                        if output.finish_reason is not None:
                            self.end(output.request_id, "complete")
                case FailRequest(request_id, error):
                    assert isinstance(error, RequestQuarantined)
                    self.end(request_id, "quarantined")

    def end(self, request_id: str, outcome: str) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = outcome

    # The replicas.

    def open_replica(self) -> None:
        replica_id = f"replica-{self.num_replicas}"
        self.num_replicas += 1
        self.replicas[replica_id] = replica = Replica(
            Trials(partial(self.begin_trial, replica_id), lambda: replica.inbox.append(None))
        )
        for ingress, fleet in enumerate(self.fleets):
            self.down[ingress, replica_id], self.up[ingress, replica_id] = deque(), deque()
            self.carry_out(ingress, fleet.handle(LinkOpened(replica_id, CREDIT), now=0.0))

    def receive_at_replica(self, ingress: int, replica_id: str) -> None:
        message = self.down[ingress, replica_id].popleft()
        if (replica := self.replicas.get(replica_id)) is None:
            return
        match message:
            case StartAttempt():
                done = message.emitted if message.continue_from else 0
                replica.placed[message.attempt_id] = attempt = Attempt(ingress, message.attempt_id, done)
                if message.suspect:
                    replica.trials.add(ingress, AddSuspect(message.attempt_id, [b""], 0, b""))
                else:
                    replica.inbox.append(attempt)
            case AbortAttempts(_, attempt_ids):
                replica.inbox.append(list(attempt_ids))
                replica.trials.withdraw(attempt_ids)
            case TrialPassed(attempt_id):
                replica.trials.let_go([attempt_id])

    def begin_trial(self, replica_id: str, ingress: int, suspect: AddSuspect) -> None:
        self.up[ingress, replica_id].append(TrialBegins(suspect.attempt_id))
        replica = self.replicas[replica_id]
        replica.inbox.append(replica.placed[suspect.attempt_id])

    def step_of(self, replica_id: str) -> None:
        """End the present step and begin the next."""
        replica = self.replicas[replica_id]
        if any(a.request_id == POISON and a.done == self.fatal for a in replica.step):
            self.deaths += 1
            self.close(replica_id, LinkEnd.ENGINE_DIED)
            self.open_replica()
            return
        finished = self.put_out(replica_id, replica)
        inbox, replica.inbox = replica.inbox, []
        for item in inbox:
            match item:
                case Attempt():
                    replica.running[item.attempt_id] = item
                case None:
                    replica.trials.answered()
                case attempt_ids:
                    for attempt_id in attempt_ids:
                        replica.running.pop(attempt_id, None)
        replica.step = list(replica.running.values())
        replica.trials.let_go(finished)

    def put_out(self, replica_id: str, replica: Replica) -> list[str]:
        finished: list[str] = []
        frames: dict[int, list[Output]] = {}
        for attempt in replica.step:
            attempt.done += 1
            ended = attempt.done == TOKENS
            if ended:
                finished.append(attempt.attempt_id)
                replica.running.pop(attempt.attempt_id, None)
            output = Output(attempt.attempt_id, [attempt.done], "length" if ended else None)
            frames.setdefault(attempt.ingress, []).append(output)
        for ingress, frame in frames.items():
            self.up[ingress, replica_id].append(frame)
        return finished

    def close(self, replica_id: str, end: LinkEnd) -> None:
        del self.replicas[replica_id]
        for ingress in INGRESSES:
            self.up[ingress, replica_id].append(end)

    # What always holds.

    @invariant()
    def fleets_are_valid(self) -> None:
        for fleet in self.fleets:
            fleet.validate()

    @invariant()
    def two_replicas_die_at_most(self) -> None:
        assert self.deaths <= 2

    @invariant()
    def no_innocent_request_is_refused(self) -> None:
        assert all(outcome != "quarantined" or request_id == POISON for request_id, outcome in self.ended.items())

    def teardown(self) -> None:
        """Check that every innocent answer ends once all messages have arrived."""
        for _ in range(50 * (self.num_requests + 2)):
            if self.delivered.keys() == self.ended.keys():
                break
            for key in list(self.down):
                while self.down.get(key):
                    self.receive_at_replica(*key)
            for replica_id in list(self.replicas):
                self.step_of(replica_id)
            for key in list(self.up):
                while self.up.get(key):
                    self.receive_at_ingress(*key)
            self.two_replicas_die_at_most()
        assert self.delivered.keys() == self.ended.keys()
        self.no_innocent_request_is_refused()
        assert self.ended.get(POISON) != "complete"
        whole = [i for i, outcome in self.ended.items() if outcome == "complete"]
        assert all(self.delivered[i] == [1, 2, 3, 4] for i in whole)


PoisonMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPoison = PoisonMachine.TestCase
