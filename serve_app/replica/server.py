"""`ReplicaServer` is the replica's listener: it accepts links from ingresses and passes their attempts to one engine core.

It decides nothing but what to refuse. It passes bytes on: an ``Add`` goes to the engine as it came, a step's outputs come back as a
finished frame. Per link it keeps the unfinished attempts, for credit and to abort them when the link ends. A connection gets one of the
slots only when it has proved that it has the token, so that a peer without the token cannot keep an ingress out by merely connecting.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from serve_app.config import ProtocolSettings
from serve_app.core.load import NO_LOAD, EngineLoad
from serve_app.errors import ListenFailed
from serve_app.host import descriptors
from serve_app.links.protocol.errors import SlotsExhausted
from serve_app.links.tls import LinkTls
from serve_app.links.tls_connection import TlsConnection
from serve_app.replica import pipe
from serve_app.replica.cache_reporter import CacheReporter
from serve_app.replica.server_link import ServerLink
from serve_app.replica.trials import Trials

MAX_UNPROVED = 256
"""The most connections before their proof; one more drops the oldest. Each of the 256 may hold a frame of 64 KiB, 16 MiB together (with TLS
also OpenSSL's memory for an unfinished handshake). A handshake takes one round trip, so an ingress is dropped only if more than 255 others
connect within it, and then it dials again."""

_DRAIN_POLL_S = 0.1
_WAIT_FOR_READS_S = 5.0
"""The longest wait of a drained replica for reads of KV that it handed over, after the last of them and after its drain's end."""


class Engine(Protocol):
    """The part of an engine core that a listener uses; its messages come back through ``ReplicaServer.on_engine_message``."""

    def send(self, message: pipe.ToEngine) -> None: ...


@dataclass(frozen=True)
class ReplicaIdentity:
    """The identity of this replica in every handshake."""

    replica_id: str
    model: str


class ReplicaServer:
    """Accepts links and passes messages between them and the engine core."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        settings: ProtocolSettings,
        token: bytes,
        engine: Engine,
        ready: pipe.EngineReady,
        tls: LinkTls | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.token = token
        self.engine = engine
        self.ready = ready
        self.load = NO_LOAD
        self.busy_s = 0.0
        """Seconds that the engine spent in its steps since its start."""
        self._drain_ends_at: float | None = None
        self.sleeping = False
        """Whether the replica takes no request because its engine sleeps, or is about to."""
        self.on_wake: Callable[[], None] = lambda: None
        """Called when an ingress has requests that wait for the sleeping engine."""
        self.kept, self._kv_read_at = set[str](), 0.0
        """Attempts whose KV other replicas may be reading, and the time at which a drained replica stops waiting for them."""
        self.first_output = asyncio.Event()
        """Set when the first tokens have gone to an ingress."""
        self.trials = Trials[ServerLink](ServerLink.begin_trial, lambda: self.engine.send(pipe.AskTrial()))
        self.cache_reporter = CacheReporter(ready.capabilities.block_size, self.open_links)
        self._tls = tls
        self._links: dict[int, ServerLink] = {}
        self._unproved: dict[ServerLink, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self, num_ports: int = 1) -> int:
        """Open the listener and return its port: from a fixed port of the settings on, the first free one of ``num_ports``.

        Raises:
            ListenFailed: All of these ports are taken, or the address is not ours.
        """
        first = self.settings.port
        ports = range(first, min(first + num_ports, 65536)) if first else range(1)
        for port in ports:
            try:
                return await self._listen_at(port)
            except ListenFailed as exc:
                if port == ports[-1]:
                    reason = f"{exc.reason}; ports from {first} on are taken, too" if len(ports) > 1 else exc.reason
                    raise ListenFailed(host=self.settings.host, port=port, reason=reason, key="protocol.port") from exc
        raise AssertionError("no ports")

    async def _listen_at(self, port: int) -> int:
        loop, host = asyncio.get_running_loop(), self.settings.host
        try:
            if host == "::":  # asyncio would listen on IPv6 alone, but the node's address may be of either family
                both = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
                self._server = await loop.create_server(self._accept, sock=both)
            else:
                self._server = await loop.create_server(self._accept, host, port)
        except (OSError, ValueError) as exc:  # ValueError: for both families, where IPv6 is off
            reason = getattr(exc, "strerror", None) or str(exc)
            raise ListenFailed(host=host, port=port, reason=reason, key="protocol.port") from exc
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> asyncio.Protocol:
        link = ServerLink(self)
        return link if self._tls is None else TlsConnection(link, self._tls.context(), server_side=True)

    def open_links(self) -> Iterator[ServerLink]:
        return (link for link in self._links.values() if link.is_open())

    def num_attempts(self) -> int:
        """Return the unfinished attempts over all links."""
        return sum(link.num_attempts() for link in self._links.values())

    async def heartbeats(self) -> None:
        """Send a heartbeat on every link, each interval; ends only by cancellation."""
        while True:
            self.send_heartbeats()
            await asyncio.sleep(self.settings.heartbeat_interval_s)

    def send_heartbeats(self) -> None:
        if not self.num_attempts():  # an abort of the last attempt makes no step, so that no new load follows
            self.load = EngineLoad(self.load.step)
        for link in list(self.open_links()):
            link.send_heartbeat()

    @property
    def draining(self) -> bool:
        return self._drain_ends_at is not None

    def drain_left_s(self) -> float | None:
        """Return the seconds until the drain is over, >= 0; None while there is none."""
        if self._drain_ends_at is None:
            return None
        return max(0.0, self._drain_ends_at - time.monotonic())

    def start_drain(self, limit_s: float) -> None:
        """Tell every ingress at once to send nothing new, and when the drain ends: before that, ingresses move running requests away."""
        self._drain_ends_at = time.monotonic() + limit_s
        for link in self._unproved:
            link.start_drain()
        self.send_heartbeats()

    def sleep_drain(self, limit_s: float) -> None:
        """Tell every ingress at once to send nothing new until `take_again`. After ``limit_s`` call `let_go`."""
        self.sleeping = True
        self.start_drain(limit_s)

    def take_again(self) -> None:
        """Tell every ingress that the engine is awake, unless the replica drains for good."""
        if self.sleeping:
            self.sleeping, self._drain_ends_at = False, None
            for link in self._unproved:
                link.stop_drain()
            self.send_heartbeats()

    def let_go(self) -> None:
        """End the links that still have attempts: their ingresses queue the requests, and dial again."""
        for link in [link for link in self._links.values() if link.num_attempts()]:
            link.say_goodbye("asleep", "the engine falls asleep")
            link.leave()

    async def drain(self, limit_s: float) -> None:
        """Start the drain; return when nothing runs any more, or after ``limit_s``. It lasts up to 5 s longer if KV was handed over."""
        self.sleeping = False
        self.start_drain(limit_s)
        while self.num_attempts() and self.drain_left_s():
            await asyncio.sleep(_DRAIN_POLL_S)
        assert self._drain_ends_at is not None
        while self.kept and time.monotonic() < min(self._kv_read_at, self._drain_ends_at + _WAIT_FOR_READS_S):
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self, code: str, reason: str) -> None:
        """Say goodbye on every link and stop listening."""
        if self._server is not None:
            self._server.close()
        for link in [*self._links.values(), *self._unproved]:
            link.say_goodbye(code, reason)

    def on_engine_message(self, message: pipe.FromEngine) -> None:
        """Pass on a message of the engine core; a message for a link that is gone is dropped."""
        match message:
            case pipe.StepOutputs():
                self._on_step(message)
            case pipe.Answered():
                self.trials.answered()
            case pipe.CacheChanged():
                self.cache_reporter.take(message)

    def _on_step(self, step: pipe.StepOutputs) -> None:
        self.load, self.busy_s = step.load, step.busy_s
        if step.kept:
            earlier = self.kept if (now := time.monotonic()) < self._kv_read_at else set[str]()
            self.kept, self._kv_read_at = earlier | set(step.kept), now + _WAIT_FOR_READS_S
        if link := self._links.get(step.slot):
            link.pass_on(step)
            if step.num_outputs:
                self.first_output.set()
        self.trials.let_go(step.finished)

    def abort(self, attempt_ids: list[str]) -> None:
        """Stop these attempts in the engine, or before it gets them."""
        self.engine.send(pipe.AbortInEngine(attempt_ids))
        self.trials.withdraw(attempt_ids)

    def admit(self, link: ServerLink, descriptor: int) -> None:
        """Let a connection begin its handshake. If there are too many, or too few descriptors, the oldest unproved one is dropped."""
        if len(self._unproved) >= MAX_UNPROVED or (self._unproved and descriptors.are_short(descriptor)):
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.drop()
        self._unproved[link] = None

    def take_slot(self, link: ServerLink) -> int:
        """Return the lowest free slot for a link that has just proved itself, after `check_slots`.

        An earlier link of the same ingress ends: the ingress has given it up, which a network that loses packets may not have told.
        """
        for earlier in list(self._links.values()):
            if earlier.ingress_id == link.ingress_id:
                earlier.drop()
                earlier.leave()  # now, and not when its transport has ended: this may be the only slot
        slot = next(slot for slot in range(self.settings.max_ingresses) if slot not in self._links)
        del self._unproved[link]
        self._links[slot] = link
        return slot

    def check_slots(self, ingress_id: str) -> None:
        """Raise SlotsExhausted if other ingresses have as many links as allowed. A new link of an ingress replaces its earlier link."""
        if sum(link.ingress_id != ingress_id for link in self._links.values()) >= self.settings.max_ingresses:
            raise SlotsExhausted(limit=self.settings.max_ingresses)

    def leave(self, link: ServerLink, slot: int, unfinished: set[str]) -> None:
        """Forget a link, once, and abort its unfinished attempts, so that their KV blocks are free again."""
        self._unproved.pop(link, None)
        if self._links.get(slot) is not link:
            return
        del self._links[slot]
        if unfinished:
            self.abort(sorted(unfinished))
