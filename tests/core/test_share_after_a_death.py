"""A replica that no longer answers gets few requests: four replicas in steps of 10 ms, requests by Poisson's law.

Real processes, killed with -9, are in tests/chaos/test_dead_replicas.py.
"""

import random
from collections import Counter

import pytest

from serve_app.core.events import Event, HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, RequestArrived, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import AbortAttempts, CloseLink, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.request import Resume
from tests.core.helpers import Output, outputs

NAMES = ("a", "b", "c", "d")
VICTIM = "a"
STEP, TICK, BEAT = 3, 25, 100  # an engine's step, the ingress's look, a replica's heartbeat; in 10 ms
TIMEOUT_S = 5.0


class World:
    """One ingress with its replicas. Engines give each request a token a step; answers have 20 to 300 tokens."""

    def __init__(self, seed: int, rate: float) -> None:
        self._random, self._rate = random.Random(seed), rate
        self._fleet = FleetState(FleetSettings(model="m", heartbeat_timeout_s=TIMEOUT_S))
        self._running: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._tokens: dict[str, int] = {}
        self._arrives_at = 0.0
        self._beats = set(NAMES)
        self._computes = set(NAMES)
        self.at = 0
        self.given: list[tuple[int, str]] = []
        """(time in units of 10 ms, replica) of each started attempt."""
        self.closed: list[tuple[int, str]] = []
        for name in NAMES:
            self._tell(LinkOpened(name, 64))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            self.at += 1
            self._arrive()
            if self.at % STEP == 0:
                for name in NAMES:
                    self._compute(name)
            if self.at % BEAT == 0:
                for name in sorted(self._beats):
                    self._tell(HeartbeatArrived(name, EngineLoad(self.at, len(self._running[name]), 0, 0.1), draining=False))
            if self.at % TICK == 0:
                self._tell(Ticked())
        self._fleet.validate()

    def kill(self) -> None:
        self.fall_silent()
        self._tell(LinkLost(VICTIM, LinkEnd.ENGINE_DIED))

    def fall_silent(self) -> None:
        self._beats.discard(VICTIM)
        self._computes.discard(VICTIM)

    def share(self, since: int, until: int) -> float:
        """Return the victim's share of the attempts that started in that time, in units of 10 ms."""
        given = Counter(name for at, name in self.given if since <= at < until)
        assert given.total() > 50
        return given[VICTIM] / given.total()

    def _arrive(self) -> None:
        while self._arrives_at <= self.at / 100:
            self._arrives_at += self._random.expovariate(self._rate)
            request_id = f"r{len(self._tokens)}"
            tokens = self._tokens[request_id] = self._random.randint(20, 300)
            self._tell(RequestArrived(request_id, 50, tokens, Resume.CONTINUE, fingerprint=request_id))

    def _compute(self, name: str) -> None:
        running = self._running[name] if name in self._computes else {}
        for attempt_id in running:
            running[attempt_id] -= 1
        ended = [attempt_id for attempt_id, left in running.items() if not left]
        given = [Output(attempt_id, [1], finish_reason=None if left else "length") for attempt_id, left in running.items()]
        for attempt_id in ended:
            del running[attempt_id]
        if given:
            self._tell(outputs(name, *given))

    def _tell(self, event: Event) -> None:
        for instruction in self._fleet.handle(event, now=self.at / 100):
            match instruction:
                case StartAttempt():
                    self.given.append((self.at, instruction.replica_id))
                    left = self._tokens[instruction.request_id] - instruction.emitted
                    self._running[instruction.replica_id][instruction.attempt_id] = left
                case AbortAttempts():
                    for attempt_id in instruction.attempt_ids:
                        del self._running[instruction.replica_id][attempt_id]
                case CloseLink():
                    self.closed.append((self.at, instruction.replica_id))


@pytest.mark.parametrize("rate", [15.0, 40.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_whose_link_ends_gets_nothing_from_that_moment_on(seed: int, rate: float) -> None:
    world = World(seed, rate)
    world.run(8.0)
    assert world.share(400, 800) == pytest.approx(1 / len(NAMES), abs=0.1)
    world.kill()
    world.run(8.0)
    assert world.share(801, 1601) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_is_silent_gets_less_until_it_is_ejected_and_then_nothing(seed: int) -> None:
    """The victim keeps its requests while the others finish theirs: routing by outstanding tokens hardly gives it any more."""
    world = World(seed, 40.0)
    world.run(8.0)
    world.fall_silent()
    world.run(TIMEOUT_S + 3.0)
    ((closed_at, name),) = world.closed
    assert name == VICTIM
    assert closed_at <= 800 + TIMEOUT_S * 100 + TICK
    assert world.share(900, closed_at) < 0.1
    assert world.share(closed_at, world.at + 1) == 0.0
