"""`World` has two ingresses and four replicas over a network that delays, cuts, freezes and reorders.

A connection keeps its order, as TCP does. Frames of a connection that has ended may still arrive after the frames of its successor, at
either end, and twice.
"""

import random
import zlib
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

from serve_app.core.events import (
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    RequestArrived,
    RequestsAborted,
    StepCostsMeasured,
    Ticked,
    TrialBegan,
)
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.instructions import (
    AbortAttempts,
    CloseLink,
    DeliverOutputs,
    FailRequest,
    FreeKeptKv,
    HandOverAttempt,
    Instruction,
    PassTrial,
    StartAttempt,
)
from serve_app.core.load import EngineLoad
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.read_costs import MIN_TOKENS
from serve_app.core.request import Resume
from serve_app.errors import ServingError
from serve_app.links.protocol.messages import AddSuspect
from tests.core.apart_fleet import COSTS, LONG
from tests.core.helpers import Output, outputs
from tests.core.network_parts import Client, Connection, Ingress, Kept, Replica

CREDIT = 4
SILENCE_S = 5.0
LEASE_S = 30.0
MAX_LIVE = 24  # requests of an ingress at once
GOODBYES = (LinkEnd.SAID_GOODBYE, LinkEnd.BROKE_OFF, LinkEnd.ENGINE_DIED)


def next_token(sequence: tuple[int, ...]) -> int:
    return zlib.crc32(repr(sequence).encode()) % 50


class World:
    """Everything that happens is drawn from ``rng``; time is a number."""

    def __init__(
        self,
        rng: random.Random,
        *,
        drains: float = 0.0,
        apart: bool = False,
        pools: PoolSizes | None = None,
        deaths: float = 0.0,
    ) -> None:
        """``drains``: how often a step begins a drain. If any does, time is slower and there are fewer and longer answers, so that streams
        move. ``apart``: many prompts are long, and answers make way for them. ``pools``: replicas have roles. ``deaths``: how often an
        ingress dies."""
        self.rng, self.now, self.drains, self.apart = rng, 0.0, drains, apart or pools is not None
        self.replicas: list[Replica] = [Replica(f"a{n}") for n in range(4)]
        self.num_replicas = len(self.replicas)
        self.deaths, self.gone = deaths, list[Ingress]()
        self.limits = limits = FleetSettings(
            model="m",
            max_waiting_requests=8,
            no_replica_s=20.0,
            heartbeat_timeout_s=SILENCE_S,
            max_standstill_s=40.0,
            apart=apart,
            pools=pools,
        )
        self.ingresses = [Ingress(FleetState(limits)) for _ in range(2)]
        for ingress in self.ingresses:
            self.handle(ingress, StepCostsMeasured(COSTS))
        self.all_clients: dict[tuple[int, int], Client] = {}
        """Request id (ingress and number) -> the request. Engines know only the id."""
        self.late: deque[tuple[Connection, list[Output]]] = deque(maxlen=50)
        """Outputs on connections that have ended."""
        self.ended: dict[str, int] = {}
        """Outcome -> requests."""
        self.freed = Counter[str]()
        """Requests' KV that replicas kept, by what ended it: the ``reader``, the ``ingress``, or the end of its ``lease``."""

    # What the network and the replicas do.

    def dial(self, ingress: Ingress, replica: Replica) -> None:
        connection = Connection(ingress, replica)
        replica.links.append(connection)
        if (old := ingress.links.pop(replica.replica_id, None)) is not None:
            self.bury(old)
        ingress.links[replica.replica_id] = connection
        self.handle(ingress, LinkOpened(replica.replica_id, CREDIT, replica.draining, kv_transfer=replica.kv_transfer))

    def bury(self, connection: Connection) -> None:
        """End the ingress's side. The replica learns of it now or, on a frozen connection, after the frames that were sent before."""
        self.late.extend((connection, message) for message in connection.down if isinstance(message, list))
        connection.down.clear()
        if not connection.frozen:
            connection.replica.end(connection)

    def lose(self, ingress: Ingress) -> None:
        """End an ingress with all its clients and links; another one, which knows nothing, takes its place."""
        links = list(ingress.links.values())
        ingress.links.clear()
        for connection in links:
            self.bury(connection)
        for request_id in ingress.live():
            self.end(ingress, request_id, "ingress_lost")
        self.gone.append(ingress)
        new = Ingress(FleetState(self.limits), num_clients=ingress.num_clients)
        self.ingresses[self.ingresses.index(ingress)] = new
        self.handle(new, StepCostsMeasured(COSTS))

    def compute(self, replica: Replica) -> None:
        """Run one engine step: each running attempt gets no token, one, or more."""
        for connection in replica.links:
            if frame := [self.advance(connection, attempt_id) for attempt_id in list(connection.running)]:
                connection.down.append(frame)

    def advance(self, connection: Connection, attempt_id: str) -> Output:
        sequence, client = connection.running[attempt_id], self.client_of(connection, attempt_id)
        if attempt_id in connection.leaving and self.rng.random() < 0.5:
            return self.hand_over(connection, attempt_id)
        whole = client.prompt + client.answer
        new = list(whole[len(sequence) : len(sequence) + self.rng.choice((0, 1, 1, 2))])
        connection.running[attempt_id] = sequence + tuple(new)
        ended = len(connection.running[attempt_id]) == len(whole)
        if ended:
            del connection.running[attempt_id]
            connection.replica.trials.let_go([attempt_id])
        stats = None
        if new and (kept := connection.reading.pop(attempt_id, None)) is not None:
            has_read = kept in kept.of.replica.kept and self.rng.random() < 0.5
            if has_read:
                self.free(kept, "reader")
            stats = SimpleNamespace(num_external_cached_tokens=len(sequence) if has_read else 0)
        return Output(attempt_id, new, finish_reason="stop" if ended else None, prefill_stats=stats)

    def hand_over(self, connection: Connection, attempt_id: str) -> Output:
        """End an attempt; in one of four cases its KV is not whole."""
        sequence = connection.running.pop(attempt_id)
        connection.leaving.discard(attempt_id)
        connection.replica.trials.let_go([attempt_id])
        kv = None
        if self.rng.random() < 0.75:
            kv = Kept(connection, attempt_id, len(sequence), self.now + LEASE_S)
            connection.replica.kept.append(kv)
        return Output(attempt_id, [], "length", stop_reason=HANDED_OVER, kv_transfer_params=kv)

    def free(self, kept: Kept, cause: str) -> None:
        kept.of.replica.kept.remove(kept)
        self.freed[cause] += 1

    def end_leases(self) -> None:
        for replica in self.replicas:
            for kept in [each for each in replica.kept if each.until <= self.now]:
                self.free(kept, "lease")

    def client_of(self, connection: Connection, attempt_id: str) -> Client:
        prompt = int(attempt_id.partition("@")[0].removeprefix("r"))
        return self.all_clients[id(connection.ingress), prompt]

    def carry_up(self, connection: Connection) -> None:
        """Deliver one message of the ingress to the replica."""
        ingress = connection.ingress
        match connection.up.popleft():
            case StartAttempt() as start if connection in connection.replica.links:
                sequence = self.client_of(connection, start.attempt_id).prompt + start.continue_from
                if start.suspect:
                    connection.in_line[start.attempt_id] = sequence
                    connection.replica.trials.add(connection, AddSuspect(start.attempt_id, [b""], 0, b""))
                else:
                    connection.running[start.attempt_id] = sequence
                assert len(connection.running) + len(connection.in_line) <= CREDIT
                if isinstance(start.kv, Kept):
                    assert start.kv.num_tokens == len(sequence), "the KV is not that of the prompt and the answer so far"
                    connection.reading[start.attempt_id] = start.kv
            case FreeKeptKv(_, attempt_id):
                for kept in [
                    each for each in connection.replica.kept if (each.of.ingress, each.attempt_id) == (ingress, attempt_id)
                ]:
                    reading = [each for replica in self.replicas for c in replica.links for each in c.reading.values()]
                    assert kept not in reading, "blocks of the KV go to another request while a replica reads it"
                    self.free(kept, "ingress")
            case HandOverAttempt(_, attempt_id):
                connection.leaving |= {attempt_id} & connection.running.keys()
            case PassTrial(_, attempt_id):
                connection.replica.trials.let_go([attempt_id])
            case AbortAttempts(_, attempt_ids):
                for attempt_id in attempt_ids:
                    connection.running.pop(attempt_id, None)
                    # As vLLM does: the engine tells the source that it does not read any more.
                    if (
                        given_up := connection.reading.pop(attempt_id, None)
                    ) is not None and given_up in given_up.of.replica.kept:
                        self.free(given_up, "reader")
                connection.replica.trials.withdraw(attempt_ids)
                for attempt_id in attempt_ids:
                    connection.in_line.pop(attempt_id, None)

    def carry_down(self, connection: Connection) -> None:
        """Deliver one message of the replica to the ingress."""
        ingress, replica_id = connection.ingress, connection.replica.replica_id
        if ingress in self.gone:
            connection.down.clear()
            return
        match connection.down.popleft():
            case list() as frame:
                self.handle(ingress, outputs(replica_id, *frame))
            case HeartbeatArrived() | TrialBegan() as said:
                self.handle(ingress, said)
            case LinkEnd() as end:
                if ingress.links.get(replica_id) is connection:
                    del ingress.links[replica_id]
                    self.bury(connection)
                    self.handle(ingress, LinkLost(replica_id, end))

    def carry_late(self) -> None:
        """Deliver outputs of a connection that has ended; they stay, to arrive once more."""
        connection, frame = self.rng.choice(self.late)
        if connection.ingress in self.gone:
            return
        copies = [replace(o, new_token_ids=list(o.new_token_ids)) for o in frame]
        instructions = self.handle(connection.ingress, outputs(connection.replica.replica_id, *copies))
        assert not any(isinstance(i, DeliverOutputs) for i in instructions)

    # What an ingress does.

    def ask(self, ingress: Ingress) -> None:
        # Replicas know attempts by id alone: no two ingresses give the same.
        number = ingress.num_clients * len(self.ingresses) + self.ingresses.index(ingress)
        request_id = f"r{number}"
        ingress.num_clients += 1
        answer: tuple[int, ...] = (number,)
        for _ in range(self.rng.randint(1, 60 if self.drains else 12)):
            answer += (next_token(answer),)
        client = Client(answer[:1], answer[1:], self.rng.choice((Resume.CONTINUE, Resume.CONTINUE, Resume.REPLAY)))
        ingress.clients[request_id] = self.all_clients[id(ingress), number] = client
        num_tokens = MIN_TOKENS if self.drains else self.rng.choice((1, MIN_TOKENS))
        if self.apart and self.rng.random() < 0.3:
            num_tokens = LONG
        fingerprint = f"{id(ingress)} {request_id}"
        self.handle(ingress, RequestArrived(request_id, num_tokens, len(client.answer), client.resume, fingerprint))

    def handle(self, ingress: Ingress, event: object) -> list[Instruction]:
        instructions = ingress.fleet.handle(event, now=self.now)  # type: ignore[arg-type]
        for instruction in instructions:
            match instruction:
                case (
                    StartAttempt(replica_id=replica_id)
                    | AbortAttempts(replica_id=replica_id)
                    | HandOverAttempt(replica_id=replica_id)
                    | FreeKeptKv(replica_id=replica_id)
                    | PassTrial(replica_id=replica_id)
                ):
                    ingress.links[replica_id].up.append(instruction)
                    if isinstance(instruction, StartAttempt) and isinstance(instruction.kv, Kept):
                        instruction.kv.reader = ingress.links[replica_id]
                case DeliverOutputs(delivered):
                    for output in delivered:
                        self.deliver(ingress, output.request_id, output.new_token_ids, output.finish_reason is not None)
                case FailRequest(request_id, error):
                    self.end(ingress, request_id, error.code if isinstance(error, ServingError) else "?")
                case CloseLink(replica_id):
                    self.bury(ingress.links.pop(replica_id))
        return instructions

    def deliver(self, ingress: Ingress, request_id: str, token_ids: list[int], ended: bool) -> None:
        client = ingress.clients[request_id]
        client.delivered += token_ids
        assert tuple(client.delivered) == client.answer[: len(client.delivered)], "a token twice, missing or wrong"
        if ended:
            assert tuple(client.delivered) == client.answer
            self.end(ingress, request_id, "complete")

    def end(self, ingress: Ingress, request_id: str, outcome: str) -> None:
        client = ingress.clients.pop(request_id)
        client.outcomes.append(outcome)
        assert len(client.outcomes) == 1
        self.ended[outcome] = self.ended.get(outcome, 0) + 1

    # One step of everything.

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.01, 0.05, 0.2)) * (0.07 if self.drains else 1.0)
        self.end_leases()
        ingress, replica = rng.choice(self.ingresses), rng.choice(self.replicas)
        connection = rng.choice(replica.links) if replica.links else None
        if self.deaths and rng.random() < self.deaths:
            self.lose(ingress)
            return
        if rng.random() < self.drains and not replica.draining:
            replica.drain_ends_at = self.now + rng.choice((0.5, 1.0, 2.0))
        dice = rng.random()
        if dice < 0.30:
            self.compute(replica)
        elif dice < 0.70 and connection is not None:
            if connection.up and not connection.frozen:
                self.carry_up(connection)
            if connection.down and not connection.frozen:
                self.carry_down(connection)
        elif dice < 0.74:
            if len(ingress.clients) < (MAX_LIVE // 4 if self.drains else MAX_LIVE):
                self.ask(ingress)
        elif dice < 0.78:
            self.handle(ingress, Ticked())
        elif dice < 0.92 and connection is not None:
            load = EngineLoad(1, len(connection.running), rng.choice((0, 0, 2)), 0.5)
            left_s = max(0.0, (replica.drain_ends_at or 0.0) - self.now)
            connection.down.append(HeartbeatArrived(replica.replica_id, load, replica.draining, left_s))
        else:
            self.rarely(ingress, replica, connection)

    def rarely(self, ingress: Ingress, replica: Replica, connection: Connection | None) -> None:
        match self.rng.randrange(12):
            case 0 if ingress.clients:
                request_id = self.rng.choice(ingress.live())
                self.end(ingress, request_id, "aborted")
                self.handle(ingress, RequestsAborted([request_id]))
            case 1 if connection is not None and connection.down:
                connection.down.append(self.rng.choice(GOODBYES))
            case 2 if connection is not None:
                connection.frozen = True
            case 3 | 4 | 5 if connection is not None:
                self.thaw(connection)
            case 6 if not replica.draining and self.rng.random() < 0.5:
                replica.drain_ends_at = self.now + self.rng.choice((0.0, 1.0, 5.0))
            case 7 if self.may_be_replaced(replica):
                self.replace(replica)
            case 8 if self.late:
                self.carry_late()
            case _ if replica.replica_id not in ingress.links:
                self.dial(ingress, replica)

    def may_be_replaced(self, replica: Replica) -> bool:
        """Return whether its drain is over; without a drain it ends by chance."""
        return self.rng.random() < 0.05 if replica.drain_ends_at is None else self.now >= replica.drain_ends_at

    def thaw(self, connection: Connection) -> None:
        """Let sent frames arrive; then the replica learns that the ingress has left, if it has."""
        connection.frozen = False
        if connection.ingress.links.get(connection.replica.replica_id) is not connection:
            while connection.up:
                self.carry_up(connection)
            connection.replica.end(connection)

    def replace(self, replica: Replica) -> None:
        """End a replica, with a Goodbye or without; another takes its place."""
        end = LinkEnd.SAID_GOODBYE if replica.draining else LinkEnd.BROKE_OFF
        for connection in list(replica.links):
            replica.end(connection)
            connection.frozen = False
            connection.down.append(end)
            while connection.down:
                self.carry_down(connection)
        for kept in list(replica.kept):
            self.free(kept, "lease")
        self.replicas[self.replicas.index(replica)] = Replica(f"a{self.num_replicas}")
        self.num_replicas += 1

    def settle(self) -> None:
        """Heal the network and let all remaining requests end; no new ones come."""
        for replica in self.replicas:
            for connection in list(replica.links):
                self.thaw(connection)
            replica.drain_ends_at = None
        for _ in range(400):
            for ingress in self.ingresses:
                for replica in self.replicas:
                    if replica.replica_id not in ingress.links:
                        self.dial(ingress, replica)
                    connection = ingress.links[replica.replica_id]
                    connection.down.append(HeartbeatArrived(replica.replica_id, EngineLoad(1, 0, 0, 0.0), draining=False))
                    while connection.up:
                        self.carry_up(connection)
                    while connection.down:
                        self.carry_down(connection)
            for replica in self.replicas:
                self.compute(replica)
            self.now += 0.05
