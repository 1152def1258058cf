"""`KvTransfers` is the worker's half of a simulated KV connector: what an engine keeps for others, and what it reads from them.

Nothing is copied: a read is over when its simulated time is, and the tokens of a simulated model are a hash of the ids. So the text of a
request that moved says nothing about its KV.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.simulated.exchange import Answer, Ask, Exchange
from serve_app.simulated.transfer import Link, LinkQueue, transfer_s

Clock = Callable[[], float]
"""Seconds from any fixed time."""


@dataclass(frozen=True, slots=True)
class Read:
    """A request whose KV another engine keeps."""

    request_id: str
    block_ids: tuple[int, ...]
    """Blocks of this engine to read into; without any the source is only told that it can free the KV, and nothing is reported."""
    host: str
    port: int
    engine_id: str
    """The source."""
    remote_id: str
    """The request's id at the source."""


@dataclass(frozen=True, slots=True)
class _Kept:
    num_blocks: int
    until: float


@dataclass(slots=True)
class Report:
    """What has ended since the last report, by the ids of this engine's requests."""

    sent: set[str] = field(default_factory=set)
    """Requests whose blocks can be freed: they were read, or their lease is over."""
    received: set[str] = field(default_factory=set)
    """Requests whose read is over, or failed."""
    failed: set[str] = field(default_factory=set)
    """Those of ``received`` whose read failed."""


class KvTransfers:
    """Reads and kept requests of one engine. Its exchange calls `answer`, `release` and the reads from threads.

    Args:
        link: The engine's link, in each direction.
        time_scale: Factor of all times of the link.
        block_bytes: Bytes of a block's KV in all layers.
        lease_s: Seconds for which KV is kept that no engine reads; not scaled. Targets do not extend it, as NIXL's heartbeats do.
        clock: The engine's time.
    """

    def __init__(
        self, engine_id: str, exchange: Exchange, *, link: Link, time_scale: float, block_bytes: int, lease_s: float, clock: Clock
    ) -> None:
        self._engine_id, self._exchange = engine_id, exchange
        self._link, self._time_scale, self._block_bytes = link, time_scale, block_bytes
        self._lease_s, self.clock = lease_s, clock
        self._kept: dict[str, _Kept] = {}
        self._released = set[str]()
        self._reads: dict[str, _RunningRead] = {}
        self._outgoing, self._incoming = LinkQueue(), LinkQueue()
        self._lock = threading.Lock()
        self._end_service = exchange.serve(engine_id, self)

    def close(self) -> None:
        """Answer no engine any more."""
        self._end_service()

    # The source.

    def keep(self, request_id: str, num_blocks: int) -> None:
        """Keep a request's KV until it is read or its lease is over."""
        with self._lock:
            self._kept[request_id] = _Kept(num_blocks, self.clock() + self._lease_s)

    def answer(self, ask: Ask) -> Answer | None:
        """Answer another engine; None if the request is not kept here."""
        with self._lock:
            now = self.clock()
            kept = self._kept.get(ask.request_id)
            if ask.engine_id != self._engine_id or kept is None or now >= kept.until:
                return None
            if not ask.num_blocks:
                self._released.add(ask.request_id)
                return Answer(0, 0.0, 0.0)
            num_bytes = min(ask.num_blocks, kept.num_blocks) * self._block_bytes
            read_s = self._read_s(num_bytes)
            return Answer(num_bytes, self._outgoing.add(now + ask.wait_s, read_s) - now, read_s)

    def release(self, request_id: str) -> None:
        """Note that a request was read. An unknown id is no error: its lease may be over."""
        with self._lock:
            if request_id in self._kept:
                self._released.add(request_id)

    # The target.

    def read(self, wanted: Read) -> None:
        """Begin a read."""
        read = _RunningRead(self)
        with self._lock:
            wait_s = self._incoming.wait_s(self.clock()) if wanted.block_ids else 0.0
            if wanted.block_ids:
                self._reads[wanted.request_id] = read
        ask = Ask(wanted.host, wanted.port, wanted.engine_id, wanted.remote_id, len(wanted.block_ids), wait_s)
        read.finish = self._exchange.ask(ask, read)  # outside the lock: an exchange may call back at once

    def take_answer(self, read: "_RunningRead", answer: Answer | None) -> None:
        with self._lock:
            now = self.clock()
            if answer is None:
                read.has_failed, read.ends_at = True, now
                return
            # The slower of both links decides.
            read_s = max(answer.read_s, self._read_s(answer.num_bytes))
            read.ends_at = self._incoming.add(now + answer.wait_s, read_s) + read_s

    def take_loss(self, read: "_RunningRead") -> None:
        with self._lock:
            now = self.clock()
            if read.ends_at > now:
                read.has_failed, read.ends_at = True, now

    # Both.

    def report(self) -> Report:
        """Return what has ended by now, once, and tell the sources. A step asks when it begins, as the workers of a GPU do."""
        with self._lock:
            now = self.clock()
            over = [(name, read) for name, read in self._reads.items() if read.ends_at <= now]
            sent = self._released | {name for name, kept in self._kept.items() if kept.until <= now}
            self._released = set()
            for name in sent:
                self._kept.pop(name, None)
            for name, _ in over:
                del self._reads[name]
        good = [read for _, read in over if not read.has_failed]
        for read in good:
            read.finish()
        return Report(sent, {name for name, _ in over}, {name for name, read in over if read.has_failed})

    def next_read_at(self) -> float | None:
        """Return when the first of the running reads ends, by the clock; None if none runs whose source has answered."""
        with self._lock:
            return min((read.ends_at for read in self._reads.values() if read.ends_at < math.inf), default=None)

    def _read_s(self, num_bytes: int) -> float:
        return self._time_scale * transfer_s(self._link, num_bytes)


class _RunningRead:
    """A read at its target."""

    def __init__(self, transfers: KvTransfers) -> None:
        self._transfers = transfers
        self.ends_at = math.inf
        """Infinity before the source has answered."""
        self.has_failed = False
        self.finish: Callable[[], None] = lambda: None

    def answered(self, answer: Answer | None) -> None:
        self._transfers.take_answer(self, answer)

    def lost(self) -> None:
        self._transfers.take_loss(self)
