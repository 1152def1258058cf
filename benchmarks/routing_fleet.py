"""This module simulates replicas with prefix caches behind one or several ingresses, in simulated time. Pure.

Queueing and routing are the product's own (a `FleetState` per ingress), the replicas those of `serve_app.simulated`. This module adds each
replica's prefix cache: blocks of prompts and answers, evicted in the order of their last use. A second cache in the memory of the host gets
all blocks, too; a hit there costs no time.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica, SimulatedOutput
from serve_app.core.cached_points import Changes, DigestStream
from serve_app.core.events import CacheReported, HeartbeatArrived, LinkOpened, OutputsArrived, RequestArrived
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import Instruction, StartAttempt
from serve_app.core.prefix_index import Prefix, tokens_at
from serve_app.core.request import Resume
from serve_app.core.routing import RoutingPolicy
from serve_app.replica.cache_reporter import EVERY_S

BLOCK_SIZE = 16
CREDIT = 2048
BEAT_S = 1.0


class Points(list[int]):
    """The hashes of a `Prefix`, with the block that ends at each point, for look-ups in a replica's cache."""

    def __init__(self, hashes: Sequence[int], blocks: Sequence[int]) -> None:
        super().__init__(hashes)
        self.blocks = [blocks[tokens_at(point, BLOCK_SIZE) // BLOCK_SIZE - 1] for point in range(len(hashes))]


@dataclass(slots=True, kw_only=True)
class Ask(Job):
    """A request with its text: hashes of the full blocks of the prompt, and of the prompt with its answer."""

    ingress: int
    blocks: Sequence[int]
    blocks_after: Sequence[int]
    prefix: Prefix
    """The prefix as the ingress sees it."""
    points_after: Sequence[int] = ()
    """The points of the prompt with its answer, for replicas that report what they have cached."""
    expected_tokens: int = 0
    """Tokens that the ingress expected in the chosen replica's cache."""


class BlockCache:
    """The prefix cache of one replica."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks. Later blocks are evicted before earlier ones, as in vLLM."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


class CachingReplica(Replica):
    """A replica that computes only the uncached part of a prompt."""

    def __init__(self, replica_id: str, hardware: Hardware, cache_tokens: int, host_tokens: int = 0) -> None:
        super().__init__(replica_id, hardware, 0.0)
        self._tiers = BlockCache(cache_tokens // BLOCK_SIZE), BlockCache(host_tokens // BLOCK_SIZE)
        self.digest_stream = DigestStream()
        self._points: dict[int, int] = {}
        """Block -> the point at its end."""
        self._reported: dict[int, None] = {}

    def __contains__(self, block: object) -> bool:
        """Return whether a tier has the block."""
        return any(block in tier for tier in self._tiers)

    def add_blocks(self, blocks: Sequence[int]) -> None:
        for tier in self._tiers:
            tier.add(blocks)

    def begin(self, job: Job) -> int:
        assert isinstance(job, Ask)
        count = next((n for n, block in enumerate(job.blocks) if block not in self), len(job.blocks))
        self.add_blocks(job.blocks)
        return min(count, (job.prompt_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE

    def learn_points(self, ask: Ask) -> None:
        """Note the points of a prompt and its answer, which a real replica computes from the tokens."""
        self._points.update(zip(Points(ask.points_after, ask.blocks_after).blocks, ask.points_after, strict=True))

    def changes(self) -> Changes:
        """Return the points that were added and removed since the last call."""
        points = {self._points[block]: None for tier in self._tiers for block in tier if block in self._points}
        before, self._reported = self._reported, points
        return Changes([p for p in points if p not in before], [p for p in before if p not in points])


Policy = Callable[[int, Mapping[str, CachingReplica]], RoutingPolicy]


@dataclass(slots=True)
class RoutedFleet:
    """A fleet with several ingresses; ``policy`` makes the routing of each ingress from its number and the replicas."""

    hardware: Hardware
    num_replicas: int
    num_ingresses: int
    policy: Policy
    cache_tokens: int
    """Size of each replica's prefix cache, and the size that the ingresses are given."""
    host_tokens: int = 0
    """Size of each replica's cache in the memory of its host."""
    reports: bool = False
    """Whether replicas report what they have cached, each `EVERY_S`."""
    asks: list[Ask] = field(default_factory=list)
    ingresses: list[FleetState] = field(default_factory=list)
    placed: Counter[str] = field(default_factory=Counter)
    """Number of requests by replica."""
    replicas: dict[str, CachingReplica] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _running: dict[str, Ask] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)
    _agenda: list[tuple[float, int, str, Any]] = field(default_factory=list)
    _order: int = 0
    _next_ask: Callable[[Ask, float], Ask | None] = lambda ask, at: None

    def run(self, asks: Iterable[Ask], next_ask: Callable[[Ask, float], Ask | None]) -> list[Ask]:
        """Serve ``asks`` and, after each, the request that ``next_ask`` returns: the next turn of a conversation."""
        self._next_ask = next_ask
        limits = FleetSettings(model="m", max_waiting_requests=1 << 20, no_replica_s=1e9)
        self.ingresses = [FleetState(limits, self.policy(i, self.replicas)) for i in range(self.num_ingresses)]
        for number in range(self.num_replicas):
            replica = CachingReplica(f"replica-{number}", self.hardware, self.cache_tokens, self.host_tokens)
            self.replicas[replica.replica_id] = replica
            self._versions[replica.replica_id] = 0
            for fleet in self.ingresses:
                opened = LinkOpened(replica.replica_id, CREDIT, kv_tokens=self.cache_tokens, host_kv_tokens=self.host_tokens)
                fleet.handle(opened, now=0.0)
        for ask in asks:
            self._put(ask.due_at, "ask", ask)
        self._put(BEAT_S, "beat", None)
        if self.reports:
            self._put(EVERY_S, "report", None)
        while self._agenda:
            at, _, kind, what = heapq.heappop(self._agenda)
            if kind == "ask":
                self._arrive(what, at)
            elif kind == "step" and what[1] == self._versions[what[0]]:
                self._advance(self.replicas[what[0]], at)
            elif kind == "report":
                for replica in self.replicas.values():
                    self._tell(replica, at)
                if len(self._agenda) > self.reports or self._running:
                    self._put(at + EVERY_S, "report", None)
            elif kind == "beat":
                for replica in self.replicas.values():
                    self._beat(replica, at)
                if len(self._agenda) > self.reports or self._running:
                    self._put(at + BEAT_S, "beat", None)
        return self.asks

    def _put(self, at: float, kind: str, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (at, self._order, kind, what))

    def _arrive(self, ask: Ask, at: float) -> None:
        self.asks.append(ask)
        self._running[ask.request_id] = ask
        event = RequestArrived(
            ask.request_id, ask.prompt_tokens, ask.output_tokens, Resume.CONTINUE, ask.request_id, prefix=ask.prefix
        )
        self._start(self.ingresses[ask.ingress].handle(event, now=at), at)

    def _start(self, instructions: Sequence[Instruction], at: float) -> None:
        for start in instructions:
            if isinstance(start, StartAttempt):
                replica = self.replicas[start.replica_id]
                happened = replica.run_to(at)
                ask = self._running[start.request_id]
                replica.learn_points(ask)
                ask.expected_tokens = self.ingresses[ask.ingress].requests[ask.request_id].trail.expected_hit_tokens
                replica.add(ask, start.attempt_id, at)
                self._told[start.attempt_id] = 0
                self.placed[start.replica_id] += 1
                self._report(replica, happened, at)
                self._schedule(replica)

    def _schedule(self, replica: CachingReplica) -> None:
        self._versions[replica.replica_id] += 1
        if (next_at := replica.next_at()) is not None:
            self._put(next_at, "step", (replica.replica_id, self._versions[replica.replica_id]))

    def _advance(self, replica: CachingReplica, at: float) -> None:
        self._report(replica, replica.run_to(at), at)
        self._schedule(replica)

    def _report(self, replica: CachingReplica, happened: Sequence[tuple[Job, str, bool]], at: float) -> None:
        outputs: dict[int, list[SimulatedOutput]] = {}
        for ask, attempt_id, ended in happened:
            assert isinstance(ask, Ask)
            tokens = (ask.output_tokens if ended else 1) - self._told[attempt_id]
            outputs.setdefault(ask.ingress, []).append(SimulatedOutput(attempt_id, [0] * tokens, "length" if ended else None))
            self._told[attempt_id] += tokens
            if ended:
                del self._told[attempt_id], self._running[ask.request_id]
                replica.add_blocks(ask.blocks_after)
                if (following := self._next_ask(ask, at)) is not None:
                    self._put(following.due_at, "ask", following)
        for ingress, items in outputs.items():
            self._start(self.ingresses[ingress].handle(OutputsArrived(replica.replica_id, items), now=at), at)

    def _tell(self, replica: CachingReplica, at: float) -> None:
        changes = replica.changes()
        for digest in replica.digest_stream.digests(changes, changes.added, 1 << 30, has_room=True) if any(changes) else ():
            for fleet in self.ingresses:
                self._start(fleet.handle(CacheReported(replica.replica_id, *digest), now=at), at)

    def _beat(self, replica: CachingReplica, at: float) -> None:
        self._advance(replica, at)
        self._report_progress(replica, at)
        for fleet in self.ingresses:
            self._start(fleet.handle(HeartbeatArrived(replica.replica_id, replica.load(), draining=False), now=at), at)

    def _report_progress(self, replica: CachingReplica, at: float) -> None:
        outputs: dict[int, list[SimulatedOutput]] = {}
        for ends_at, attempt_id, ask in replica.running:
            assert isinstance(ask, Ask)
            done = ask.output_tokens - (ends_at - replica.steps)
            if (new := done - self._told[attempt_id]) > 0:
                outputs.setdefault(ask.ingress, []).append(SimulatedOutput(attempt_id, [0] * new))
                self._told[attempt_id] = done
        for ingress, items in outputs.items():
            self._start(self.ingresses[ingress].handle(OutputsArrived(replica.replica_id, items), now=at), at)
