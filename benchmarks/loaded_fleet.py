"""`LoadedFleet` is a `VirtualFleet` whose tenants send requests by themselves, and whose engines may stall.

Benchmarks and tests use it; `serve-app plan` plays traces, whose requests come when the trace says.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from serve_app.core.prefix_index import tokens_at
from serve_app.core.queue_rate import jitter
from serve_app.core.refusals import MIN_RETRY_AFTER_S
from serve_app.errors import CannotStartInTime
from serve_app.planning.virtual_fleet import BLOCK, DELIVERED_S, Engine, Ingress, VirtualFleet
from serve_app.planning.virtual_loads import Asked, Load

TEXT, KINDS = 256, 4
"""Each prompt begins with one of `KINDS` texts of `TEXT` tokens, repeated up to `Load.shared`."""
CONNECTIONS = 8
"""Connections of each tenant with a rate, each of which stays at one ingress."""
_START_S = 0.1
"""Seconds in which the first requests of all clients come."""


class LoadedFleet(VirtualFleet):
    """A fleet with tenants, each of which sends at a rate, or sends one request after the other."""

    def __init__(self, cores: Sequence[Any], **options: Any) -> None:
        super().__init__(cores, **options)
        self._connections: dict[Load, list[int]] = {}
        self._kinds = [[self._random.randrange(10, 210) for _ in range(TEXT)] for _ in range(KINDS)]
        self._places: int = cores[0].scheduler.max_num_running_reqs
        self._stalled_until: dict[Engine, float] = {}
        self._free: dict[Engine, tuple[int, float]] = {}
        """Engine -> its free places, if no request waits, and since when."""
        self._free_s = 0.0
        """Seconds of free places since the warm-up."""

    def stall(self, number: int, seconds: float) -> None:
        """Let an engine stand still from now on for so many seconds. Its heartbeats go on."""
        self._stalled_until[self._engines[str(number)]] = self._now + seconds

    def hand_overs(self) -> Counter[str]:
        """Return the results of all hand-overs."""
        return sum((ingress.fleet.hand_overs.results for ingress in self._ingresses), Counter[str]())

    def shares(self) -> dict[str, float]:
        """Return each tenant's share of the tokens of answers."""
        return {load.tenant: self.tokens[load.tenant] / self.tokens.total() for load in self._connections}

    def idle(self) -> float:
        """Return the share of all places and seconds since the warm-up in which a place was free while no request waited."""
        return self._free_s / (len(self._engines) * self._places * (self._now - self._counts_from))

    def run(self, loads: Sequence[Load], seconds: float, *, warmup_s: float = 20.0) -> None:
        """Play what the loads send, and what `at` has planned, once. What comes before the end of the warm-up is not counted."""
        for load in loads:
            self._connections[load] = [self._random.randrange(len(self._ingresses)) for _ in range(load.depth or CONNECTIONS)]
            for connection in range(load.depth):
                self._at(self._random.uniform(0.0, _START_S), self._ask, load, connection)
            if load.rate:
                self._at(self._random.expovariate(load.rate), self._arrive, load)
        self.play(seconds, warmup_s=warmup_s)

    def _ingress_of(self, load: Load, connection: int) -> Ingress:
        return self._ingresses[self._connections[load][connection]]

    def _arrive(self, load: Load) -> None:
        self._at(self._random.expovariate(load.rate), self._arrive, load)
        self._ask(load, self._random.randrange(CONNECTIONS))

    def _ask(self, load: Load, connection: int) -> None:
        number, kind = next(self._num), self._random.randrange(KINDS)
        name = f"{load.tenant}-{number}"
        own = [self._random.randrange(10, 210) for _ in range(self._random.randint(*load.own))]
        answer = self._random.randint(*load.answer)
        beginning = list(self._connections).index(load) * KINDS + kind + 1
        points = [(beginning << 40) + point for point in itertools.takewhile(_is_within(load.shared), itertools.count())]
        rest = itertools.takewhile(_is_within(load.shared + len(own)), itertools.count(len(points)))
        points += [(1 << 63) + (number << 16) + point for point in rest]
        self.ask(load, name, self._kinds[kind] * (load.shared // TEXT) + own, answer, points, connection)

    def _step(self, engine: Engine) -> None:
        num_free, since = self._free.get(engine, (0, 0.0))
        self._free_s += num_free * max(0.0, self._now - max(since, self._counts_from))
        super()._step(engine)
        num_busy = len(engine.scheduler.running) if engine.is_busy else 0
        is_full = engine.is_busy and bool(engine.scheduler.waiting)
        self._free[engine] = 0 if is_full else self._places - num_busy, self._now

    def _deliver(self, engine: Engine, planned: Any, made: Any) -> None:
        until = self._stalled_until.get(engine, 0.0)
        if self._now < until:
            self._at(until - self._now, self._deliver, engine, planned, made)
        else:
            super()._deliver(engine, planned, made)

    def _ended(self, asked: Asked) -> None:
        self._ask_again(asked, DELIVERED_S)

    def _fail(self, name: str, asked: Asked, error: Exception) -> None:
        assert isinstance(error, CannotStartInTime)
        assert error.retry_after_s is not None
        if error.waited_s:
            asked.late_at = self._now
        else:
            asked.refused_at, asked.retry_after_s = self._now, error.retry_after_s
            asked.said_s = max(MIN_RETRY_AFTER_S, error.retry_after_s / jitter(name))
        self._ask_again(asked, 1.0)

    def _ask_again(self, asked: Asked, in_s: float) -> None:
        if asked.load.depth:
            self._at(in_s, self._ask, asked.load, asked.connection)


def _is_within(tokens: int) -> Callable[[int], bool]:
    return lambda point: tokens_at(point, BLOCK) <= tokens
