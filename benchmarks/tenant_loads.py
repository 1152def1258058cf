"""This module plays the loads of several tenants at once against a fleet, from one process, with the load kit's client and its arrivals.

`Player.play` returns a `Phase`: a row for each request, the CPU that machine, generator and fleet used meanwhile, and the memory of the
fleet's processes. All random numbers come from the phase's seed. Each tenant has `CLIENTS` clients with connections of their own, so that
the kernel spreads them over several ingresses.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
import msgspec
import numpy as np
import psutil
from gevent.pool import Group

from benchmarks.processes import cpu_by_role, role_of
from benchmarks.tenant_fleet import Served, key_of
from loadtest.control.monitor import Monitor, Ticker
from loadtest.plan.arrivals import due_times, generator
from loadtest.plan.laws import Poisson
from loadtest.records import HealthSample, Row, ScheduledRequest
from loadtest.wire.client import Asked, Client
from loadtest.wire.target import Target

CLIENTS = 8
MEMORY_EVERY_S = 2.0
_FIRST_ID, _LAST_ID = 10, 210
"""Token ids that the tiny checkpoint's vocabulary has."""
_TIMEOUT_S = 3600.0
"""No client gives up by itself: the end of the drain ends what is left."""
_REFUSED = (429, 503)
_LEAST_PAUSE_S = 0.2


@dataclass(frozen=True)
class Shape:
    """The requests of a tenant: one of its ``kinds`` shared prompts of ``shared`` tokens, then an own part. Ranges include both ends."""

    own: tuple[int, int]
    answer: tuple[int, int]
    shared: int = 0
    kinds: int = 1


@dataclass(frozen=True)
class Load:
    """The load of one tenant: Poisson arrivals at ``rate`` a second, or ``depth`` clients that each send one request after the other."""

    tenant: str
    shape: Shape
    rate: float = 0.0
    depth: int = 0
    from_s: float = 0.0
    until_s: float | None = None
    """None: the end of the phase."""
    retries: int = 0
    """How often a refused request is sent again, at once."""
    returns: bool = False
    """Whether a refused request is sent once more, when its Retry-After is over."""


class Sent(msgspec.Struct):
    """One request as its client saw it. ``attempt`` counts how often the client had been refused before."""

    tenant: str
    attempt: int
    row: Row


class Phase(msgspec.Struct):
    """One phase of a run. Times are seconds from its begin; the window of its figures is from ``warmup_s`` to ``until_s``."""

    part: str
    name: str
    side: str
    ingresses: int
    seed: int
    warmup_s: float
    until_s: float
    epoch_unix_s: float
    sent: list[Sent]
    health: list[HealthSample]
    """Of the generator, each second."""
    machine: list[float]
    """Share of all cores that was busy, each second, with what else the machine runs."""
    cores: dict[str, float]
    """Cores that each role of the fleet used on average."""
    memory_mib: dict[str, list[float]]
    """Memory (USS) of each process of the fleet, named by role and pid, every `MEMORY_EVERY_S`."""
    served: dict[str, Served] = {}
    """By the ledger, in the window."""
    notes: dict[str, float] = {}


class Player:
    """Plays phases against one side of a fleet."""

    def __init__(self, url: str, root: psutil.Process, side: str, *, ingresses: int, seed: int) -> None:
        self._url, self._root, self._side, self._ingresses, self._seed = url, root, side, ingresses, seed

    def play(
        self, part: str, name: str, loads: Sequence[Load], seconds: float, *, warmup_s: float = 5.0, drain_s: float = 5.0
    ) -> Phase:
        """Send the loads for so many seconds after the warm-up, then wait for answers for ``drain_s``; what has not ended is cut."""
        until_s = warmup_s + seconds
        generating = _Generating(self._url, self._side, loads, until_s, stream=f"{self._seed} {part} {name}", seed=self._seed)
        watch = _Watch(self._root)
        before = cpu_by_role(self._root)
        with watch:
            sent, health = generating.run(drain_s)
        took_s = time.perf_counter() - generating.epoch
        cores = {role: (used - before.get(role, 0.0)) / took_s for role, used in cpu_by_role(self._root).items()}
        return Phase(
            part, name, self._side, self._ingresses, self._seed, warmup_s, until_s, generating.epoch_unix_s, sent, health,
            watch.machine, cores, watch.memory_mib,
        )  # fmt: skip


class _Generating:
    """The requests of one phase, in greenlets of this thread."""

    def __init__(self, url: str, model: str, loads: Sequence[Load], until_s: float, *, stream: str, seed: int) -> None:
        self.epoch = time.perf_counter()
        self.epoch_unix_s = time.time()
        self._model, self._loads, self._until_s, self._stream, self._seed = model, loads, until_s, stream, seed
        self._sent: list[Sent] = []
        self._requests, self._num = Group(), 0
        self._clients = {
            load.tenant: [
                Client(Target(url, key_of(load.tenant)), worker=0, epoch=self.epoch, id_prefix=f"{load.tenant}-{n}-")
                for n in range(CLIENTS)
            ]
            for load in loads
        }

    def run(self, drain_s: float) -> tuple[list[Sent], list[HealthSample]]:
        monitor, health = Monitor(0, epoch=self.epoch, ticker=Ticker()), list[HealthSample]()
        watching = [gevent.spawn(monitor.run), gevent.spawn(self._sample, monitor, health)]
        gevent.joinall([gevent.spawn(self._arrive, number, load) for number, load in enumerate(self._loads)], raise_error=True)
        gevent.sleep(max(0.0, self._until_s - self._now()))
        self._requests.join(timeout=drain_s)
        self._requests.kill()
        gevent.killall(watching)
        for client in (each for clients in self._clients.values() for each in clients):
            client.close()
        return self._sent, health

    def _now(self) -> float:
        return time.perf_counter() - self.epoch

    def _sample(self, monitor: Monitor, health: list[HealthSample]) -> None:
        while True:
            gevent.sleep(1.0)
            health.append(monitor.sample(in_flight=len(self._requests), num_sent=self._num, num_rows=len(self._sent)))

    def _arrive(self, number: int, load: Load) -> None:
        bodies = _bodies(self._model, load, generator(self._seed, f"{self._stream} {number}"))
        until_s = self._until_s if load.until_s is None else load.until_s
        for _ in range(load.depth):
            self._requests.spawn(self._one_after_the_other, load, bodies, until_s)
        if not load.rate:
            return
        law, seed = Poisson(law="poisson", rate=load.rate), 1000 * self._seed + number
        for due_s in due_times(law, duration_s=until_s - load.from_s, seed=seed):
            gevent.sleep(max(0.0, load.from_s + due_s - self._now()))
            self._requests.spawn(self._request, load, next(bodies), load.from_s + float(due_s))

    def _one_after_the_other(self, load: Load, bodies: Iterator[bytes], until_s: float) -> None:
        while (now := self._now()) < until_s:
            row = self._ask(load.tenant, next(bodies), now, attempt=0)
            if row.state == "timeout":  # the drain has ended
                return
            if row.status != 200:
                gevent.sleep(min(max(row.retry_after_s or 0.0, _LEAST_PAUSE_S), max(0.0, until_s - self._now())))

    def _request(self, load: Load, body: bytes, due_s: float) -> None:
        row = self._ask(load.tenant, body, due_s, attempt=0)
        for attempt in range(1, load.retries + load.returns + 1):
            if row.status not in _REFUSED:
                return
            if load.returns:
                gevent.sleep(row.retry_after_s or 0.0)
            row = self._ask(load.tenant, body, self._now(), attempt=attempt)

    def _ask(self, tenant: str, body: bytes, due_s: float, *, attempt: int) -> Row:
        self._num += 1
        clients, request = self._clients[tenant], ScheduledRequest(self._num, due_s, tenant, 0, 0)
        asked = Asked(request, "/v1/completions", body, timeout_s=_TIMEOUT_S, stream=True, keep_text=False)
        row = clients[self._num % len(clients)].ask(asked, due_s=due_s)
        self._sent.append(Sent(tenant, attempt, row))
        return row


def _bodies(model: str, load: Load, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield the bodies of a tenant's requests. Its shared prompts are the same in all phases, its own parts are never repeated."""
    shared = generator(0, f"shared {load.tenant}").integers(_FIRST_ID, _LAST_ID, (load.shape.kinds, load.shape.shared))
    encoder = msgspec.json.Encoder()
    while True:
        own = rng.integers(_FIRST_ID, _LAST_ID, rng.integers(*load.shape.own, endpoint=True))
        prompt = [*shared[rng.integers(load.shape.kinds)].tolist(), *own.tolist()]
        length = int(rng.integers(*load.shape.answer, endpoint=True))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": length, "stream": True}
        yield encoder.encode(body | {"ignore_eos": True, "temperature": 0})


class _Watch:
    """Samples the machine's CPU each second, and the memory of the fleet's processes, in a thread of its own for the block."""

    def __init__(self, root: psutil.Process) -> None:
        self.machine: list[float] = []
        self.memory_mib: dict[str, list[float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(root,), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self, root: psutil.Process) -> None:
        roles = {process: role_of(process) for process in root.children(recursive=True)}
        lasting = {process: f"{role} {process.pid}" for process, role in roles.items() if role in ("ingress", "engine core")}
        psutil.cpu_percent()  # counts from the last call of the same thread
        while not self._end.wait(1.0):
            self.machine.append(psutil.cpu_percent() / 100)
            if len(self.machine) % MEMORY_EVERY_S == 0:
                for process, name in lasting.items():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self.memory_mib.setdefault(name, []).append(round(process.memory_full_info().uss / 2**20, 1))
