"""`SendBuffer` watches the send buffer of one end of a link and ends the link when the peer does not read. Both ends use it."""

import asyncio
from collections.abc import Callable

_MAX_LOOKS = 12


class SendBuffer:
    """Distinguishes a peer that reads from one that does not.

    The link calls `written` after each write, and `drained` and `lost` when these happen. Bytes that were just written say nothing about
    the peer, because they may not have left this process yet. So a first look that finds more than ``limit_bytes`` only makes the buffer
    full. From then on the buffer looks every ``patience_s``. It is full until the transport asks for more or a look finds at most
    ``limit_bytes``. The peer is stuck if a look finds more than ``limit_bytes``, and no fewer bytes than the look before. So if this side
    keeps writing to a full buffer, a peer that reads less than is written also counts as stuck. After 12 looks in a row that find
    more than ``limit_bytes`` it is stuck in any case: what comes through such a link is too late for any client.
    """

    def __init__(
        self, limit_bytes: int, patience_s: float, *, on_room: Callable[[], None], on_stuck: Callable[[str], None]
    ) -> None:
        """``on_room`` is called when the buffer is no longer full; ``on_stuck``, with the cause for the log, when the peer is stuck."""
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._on_room = on_room
        self._on_stuck = on_stuck
        self._next_look: asyncio.TimerHandle | None = None
        self._looks_left = _MAX_LOOKS

    def is_full(self) -> bool:
        return self._next_look is not None

    def written(self, transport: asyncio.WriteTransport) -> None:
        """Look at the size, unless the buffer is full already."""
        if self._next_look is None and (size := transport.get_write_buffer_size()) > self._limit_bytes:
            self._looks_left = _MAX_LOOKS
            self._look_later(transport, size)

    def drained(self) -> None:
        """Note that the transport asks for more (``resume_writing``)."""
        if self._next_look is not None:
            self._stop_looking()
            self._on_room()

    def lost(self) -> None:
        """Note that the connection is gone."""
        self._stop_looking()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look_later(self, transport: asyncio.WriteTransport, size: int) -> None:
        self._next_look = asyncio.get_running_loop().call_later(self._patience_s, self._look, transport, size)

    def _look(self, transport: asyncio.WriteTransport, size_before: int) -> None:
        size = transport.get_write_buffer_size()
        self._looks_left -= 1
        if size <= self._limit_bytes:
            self.drained()
        elif size >= size_before:
            self._on_stuck(f"{size} bytes unread, limit {self._limit_bytes}, and no fewer than {self._patience_s:g} s before")
        elif self._looks_left == 0:
            self._on_stuck(f"{size} bytes unread, limit {self._limit_bytes}, for {_MAX_LOOKS * self._patience_s:g} s")
        else:
            self._look_later(transport, size)
