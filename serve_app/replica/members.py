"""`Members` are the other nodes of an engine, as the supervisor on its first node sees them: all join, and each loss ends the engine."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable

from serve_app.core.health import ProcessUse
from serve_app.errors import EngineStartFailed
from serve_app.replica.cord import Beat, Cord, Ended, Hello, Message

logger = logging.getLogger(__name__)

_ABOVE_PIDS = 1 << 32


class Members:
    """Waits for the members of ranks 1 to ``number``, then watches them. ``secret`` is what a member has to show."""

    def __init__(self, number: int, *, silence_s: float) -> None:
        self.secret = secrets.token_bytes(32)
        self._number = number
        self._silence_s = silence_s
        self._cords: dict[int, Cord] = {}
        self._strangers: set[Cord] = set()
        self._uses: dict[int, dict[int, ProcessUse]] = {}
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._lost = ""
        self._closed = False

    async def listen(self, host: str) -> int:
        """Listen for the members; return the port."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> Cord:
        cord = Cord(silence_s=self._silence_s, beat=Beat, on_message=self._hear, on_lost=self._lose)
        self._strangers.add(cord)
        return cord

    async def all_joined(self) -> None:
        """Wait until each member has joined.

        Raises:
            EngineStartFailed: One that had joined has ended.
        """
        await asyncio.shield(self._complete)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` once with the reason when a member has ended, also if it has already. Not after `close`."""
        self._on_lost = on_lost
        if self._lost:
            on_lost(self._lost)

    def uses(self) -> dict[int, ProcessUse]:
        """Return the engine's processes on the members' nodes, under ids above all process ids of a node."""
        return {rank * _ABOVE_PIDS + pid: use for rank, processes in self._uses.items() for pid, use in processes.items()}

    def close(self) -> None:
        """Let the members go: each kills its part of the engine."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for cord in (*self._cords.values(), *self._strangers):
            cord.close()
        self._complete.cancel()

    def _hear(self, cord: Cord, message: Message) -> None:
        rank = self._rank_of(cord)
        match message:
            case Hello():
                self._join(cord, message)
            case Beat(processes) if rank is not None:
                self._uses[rank] = processes
            case Ended(reason) if rank is not None:
                self._end(rank, reason)

    def _join(self, cord: Cord, hello: Hello) -> None:
        is_ours = hmac.compare_digest(hello.secret, self.secret) and 0 < hello.rank <= self._number
        if not is_ours or hello.rank in self._cords or cord not in self._strangers:
            logger.warning("refused a connection that does not belong to this engine")
            self._strangers.discard(cord)
            cord.close()
            return
        self._strangers.discard(cord)
        self._cords[hello.rank] = cord
        if len(self._cords) == self._number and not self._complete.done():
            self._complete.set_result(None)

    def _rank_of(self, cord: Cord) -> int | None:
        return next((rank for rank, member in self._cords.items() if member is cord), None)

    def _lose(self, cord: Cord, reason: str) -> None:
        self._strangers.discard(cord)
        if (rank := self._rank_of(cord)) is not None:
            self._end(rank, reason)

    def _end(self, rank: int, reason: str) -> None:
        """Take note of the first member that ended: the others end with it."""
        if self._lost or self._closed:
            return
        self._lost = f"node {rank} of the engine: {reason}"
        if not self._complete.done():
            self._complete.set_exception(EngineStartFailed(model="", reason=self._lost))
        if self._on_lost is not None:
            self._on_lost(self._lost)
