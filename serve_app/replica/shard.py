"""`Shard` supervises an engine's part on a node other than the first: vLLM's workers there, without a scheduler of their own.

A shard serves no requests and judges nothing but the cord. The first node's supervisor judges the whole engine, and gets for that the
processes of this node with each beat.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.checkpoints import resolve_model
from serve_app.config import ModelSettings, default_cache_dir
from serve_app.core.health import ProcessUse
from serve_app.engine_args import NodeOfEngine, engine_core_args, engine_environment
from serve_app.errors import EngineDied
from serve_app.host.foreign_errors import in_one_line
from serve_app.links.protocol.messages import MAX_REASON_CHARS, readable
from serve_app.links.tls import LinkTls
from serve_app.replica import pipe
from serve_app.replica.child import EngineChild
from serve_app.replica.cord import Beat, Challenge, Cord, Ended, Hello, Message, Serves, proof
from serve_app.replica.health import LOOK_EVERY_S
from serve_app.replica.oom_kills import OomKills
from serve_app.replica.process_group import group_use

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0


@dataclass(frozen=True)
class Summons:
    """What a member needs to know to join: its node, and where `Members` listen."""

    node: NodeOfEngine
    port: int
    secret: bytes
    silence_s: float
    """Seconds without a sign of life of the other end after which each end of the cord kills its part of the engine."""


class Shard:
    """One member of an engine, from its start to its end. ``on_serves`` is called once when the whole engine takes requests."""

    def __init__(
        self,
        model: ModelSettings,
        summons: Summons,
        environment: Mapping[str, str] | None = None,
        *,
        tls: LinkTls | None = None,
        on_serves: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._summons = summons
        self._tls = tls
        self._on_serves = on_serves
        self._environment = dict(os.environ if environment is None else environment)
        self._child = EngineChild(self._from_child, self._child_closed)
        self._failure = ""
        self._oom_kills = OomKills()
        self._out_of_memory = False
        self._processes: dict[int, ProcessUse] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """The process that leads this node's part of the engine."""
        return self._child.pid

    async def run(self) -> str:
        """Join, load and work until a process of the engine ends anywhere; return why. No process of this node is left then."""
        cord = await self._connect()
        working = asyncio.create_task(self._work(), name="shard")
        try:
            either: list[asyncio.Future[Any]] = [self._over, working]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (exc := working.exception()) is not None:
                self._end(in_one_line(exc))
            reason = self._over.result()
            cord.send(Ended(readable(reason, MAX_REASON_CHARS), self._out_of_memory))
            return reason
        finally:
            working.cancel()
            await asyncio.wait([working])  # a process that it is just starting must be known before the kill
            cord.close()
            self._child.kill()
            await self._child.stop()

    async def _connect(self) -> Cord:
        """Connect to the first node, which then asks for the proof.

        Raises:
            OSError: The first node cannot be reached; TimeoutError is one.
        """
        summons = self._summons
        cord = Cord(
            silence_s=summons.silence_s, beat=self._beat, on_message=self._hear, on_lost=lambda _, reason: self._end(reason)
        )
        end = cord.end_of(None if self._tls is None else self._tls.context(), server_side=False)
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().create_connection(lambda: end, summons.node.first_address, summons.port)
        return cord

    async def _work(self) -> None:
        """Start the node's part of the engine, and ping its process until cancelled: the process kills a silent supervisor."""
        node = self._summons.node
        await self._child.spawn(engine_environment(self._model, {**self._environment, **node.environment()}))
        path = await asyncio.to_thread(resolve_model, self._model.model, default_cache_dir())
        self._child.hand_over(
            {
                "engine_args": engine_core_args(self._model, path, node),
                "device": self._model.device,
                "supervisor_silence_s": self._summons.silence_s,
            }
        )
        while True:
            self._child.send(pipe.Ping(probe=False))
            await asyncio.sleep(LOOK_EVERY_S)

    def _beat(self) -> Beat:
        if self.pid is not None:
            try:
                self._processes = group_use(self.pid)
            except OSError as exc:  # a lack of descriptors is not the engine's fault
                logger.warning("no look at the engine's processes: %s", exc)
        return Beat(self._processes)

    def _hear(self, cord: Cord, message: Message) -> None:
        """Take a message of the first node. The cord has already counted a beat."""
        if isinstance(message, Challenge):
            rank = self._summons.node.rank
            cord.send(Hello(proof(self._summons.secret, message.nonce, rank), rank))
        elif isinstance(message, Serves) and self._on_serves is not None:
            self._on_serves()

    def _from_child(self, message: pipe.FromEngine) -> None:
        if isinstance(message, pipe.EngineFailed):
            self._failure = message.reason

    def _child_closed(self) -> None:
        self._out_of_memory = self._oom_kills.any_since()
        if self._out_of_memory:  # most often it is a worker, of which the engine's process could still say that it has ended
            said = f" ({self._failure})" if self._failure else ""
            self._end(f"the kernel killed a process of the engine: out of memory{said}")
        else:
            self._end(self._failure or EngineDied.NO_MESSAGE)

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)
