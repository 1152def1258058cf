"""`Members` are the other nodes of an engine, as the supervisor on its first node sees them: all join, and each loss ends the engine."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable

from serve_app.core.health import ProcessUse
from serve_app.errors import EngineDied, EngineOutOfMemory, EngineStartFailed
from serve_app.links.tls import LinkTls
from serve_app.replica.cord import Beat, Challenge, Cord, Ended, Hello, Message, Serves, proof

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""The most connections without proof; one more drops the oldest. A proof takes few round trips: only 64 newer connections within them keep
a member out, and then the start of the engine fails. Each stranger may hold a frame of 1 MiB."""

_ABOVE_PIDS = 1 << 32


class Members:
    """Waits for the members of ranks 1 to ``number``, then watches them. ``secret`` is what a member has to know."""

    def __init__(self, number: int, *, silence_s: float, tls: LinkTls | None = None) -> None:
        self.secret = secrets.token_bytes(32)
        self._number = number
        self._silence_s = silence_s
        self._tls = tls
        self._cords: dict[int, Cord] = {}
        self._strangers: dict[Cord, bytes] = {}
        """Connections without proof, the oldest first, and the nonce of each."""
        self._uses: dict[int, dict[int, ProcessUse]] = {}
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._on_lost: Callable[[EngineDied], None] | None = None
        self._lost: EngineDied | None = None
        self._closed = False

    async def listen(self, host: str) -> int:
        """Listen for the members; return the port."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> asyncio.Protocol:
        nonce = secrets.token_bytes(32)
        cord = Cord(silence_s=self._silence_s, beat=Beat, on_message=self._hear, on_lost=self._lose, opening=Challenge(nonce))
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.drop()
        self._strangers[cord] = nonce
        return cord.end_of(None if self._tls is None else self._tls.context(), server_side=True)

    async def all_joined(self) -> None:
        """Wait until each member has joined.

        Raises:
            EngineStartFailed: One that had joined has ended.
        """
        await asyncio.shield(self._complete)

    def watch(self, on_lost: Callable[[EngineDied], None]) -> None:
        """Call ``on_lost`` once with the loss when a member has ended, also if it has already. Not after `close`."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def tell_that_it_serves(self) -> None:
        """Tell all members that the engine takes requests."""
        for cord in self._cords.values():
            cord.send(Serves())

    def uses(self) -> dict[int, ProcessUse]:
        """Return the engine's processes on the members' nodes, under ids above all process ids of a node."""
        return {rank * _ABOVE_PIDS + pid: use for rank, processes in self._uses.items() for pid, use in processes.items()}

    def close(self) -> None:
        """Let the members go: each kills its part of the engine."""
        self._closed = True
        self._refuse_more()
        for cord in self._cords.values():
            cord.close()
        self._complete.cancel()

    def _hear(self, cord: Cord, message: Message) -> None:
        rank = self._rank_of(cord)
        match message:
            case Hello() if rank is None and cord in self._strangers:
                self._join(cord, message)
            case Beat(processes) if rank is not None:
                self._uses[rank] = processes
            case Ended(reason, out_of_memory) if rank is not None:
                self._end(rank, reason, EngineOutOfMemory if out_of_memory else EngineDied)

    def _join(self, cord: Cord, hello: Hello) -> None:
        nonce = self._strangers.pop(cord)
        is_ours = 0 < hello.rank <= self._number and hmac.compare_digest(hello.proof, proof(self.secret, nonce, hello.rank))
        if not is_ours or hello.rank in self._cords:
            logger.warning("refused a connection that does not belong to this engine")
            cord.close()
            return
        self._cords[hello.rank] = cord
        if len(self._cords) == self._number:
            self._refuse_more()
            if not self._complete.done():
                self._complete.set_result(None)

    def _refuse_more(self) -> None:
        """Stop listening, and end the connections without proof."""
        if self._server is not None:
            self._server.close()
        for cord in self._strangers:
            cord.close()
        self._strangers.clear()

    def _rank_of(self, cord: Cord) -> int | None:
        return next((rank for rank, member in self._cords.items() if member is cord), None)

    def _lose(self, cord: Cord, reason: str) -> None:
        self._strangers.pop(cord, None)
        if (rank := self._rank_of(cord)) is not None:
            self._end(rank, reason)

    def _end(self, rank: int, reason: str, lost: type[EngineDied] = EngineDied) -> None:
        """Take note of the first member that ended: the others end with it."""
        if self._lost is not None or self._closed:
            return
        self._lost = lost(f"node {rank} of the engine: {reason}")
        if not self._complete.done():
            self._complete.set_exception(EngineStartFailed(model="", reason=self._lost.reason))
        if self._on_lost is not None:
            self._on_lost(self._lost)
