"""These are the messages between the simulated engine that reads KV and the one that keeps it, and `MemoryExchange` for one process.

A target asks the source for a request's KV, and the source answers at once how long the read takes and when its link is free. When the read
is over the target says so, and the source frees the blocks. `tcp_exchange.TcpExchange` does the same between processes.
"""

from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

ANSWER_S = 1.0
"""The longest wait for an answer."""

_Name = Annotated[str, Meta(min_length=1, max_length=512)]


class Ask(msgspec.Struct, frozen=True):
    """The question of a target."""

    host: str
    port: int
    engine_id: _Name
    """The source, also if another engine has its address now."""
    request_id: _Name
    """The request's id at the source."""
    num_blocks: Annotated[int, Meta(ge=0)]
    """Blocks to read; 0: the target needs none, and the source can free them."""
    wait_s: Annotated[float, Meta(ge=0)]
    """Seconds until the target's own link is free."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of a source that keeps the request's KV."""

    num_bytes: Annotated[int, Meta(ge=0)]
    wait_s: Annotated[float, Meta(ge=0)]
    """Seconds until the read can begin, by the links of both."""
    read_s: Annotated[float, Meta(ge=0)]
    """Seconds that the read takes on the source's link."""


class Source(Protocol):
    """An engine that keeps KV. Both methods return at once and may be called from any thread."""

    def answer(self, ask: Ask) -> Answer | None:
        """Return None if the request's KV is not kept."""

    def release(self, request_id: str) -> None:
        """Free the blocks of a request: a read is over."""


class Reading(Protocol):
    """A read at its target. Both methods return at once and may be called from any thread."""

    def answered(self, answer: Answer | None) -> None:
        """Take the answer; None: nothing can be read."""

    def lost(self) -> None:
        """Note that the source is dead. A read that is over by then is not concerned."""


class Exchange(Protocol):
    """How engines reach each other."""

    def serve(self, engine_id: str, source: Source) -> Callable[[], None]:
        """Let other engines ask ``source``; return the function that ends this."""

    def ask(self, ask: Ask, reading: Reading) -> Callable[[], None]:
        """Send the question without waiting; ``reading`` gets an answer within `ANSWER_S`.

        Returns:
            The function that says that the read is over.
        """


class MemoryExchange:
    """Connects engines of one process. An answer is there before `ask` returns, so that virtual time decides alone."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Source, set[Reading]]] = {}
        """Engine id -> source, and the reads that it answered and that are not over."""

    def serve(self, engine_id: str, source: Source) -> Callable[[], None]:
        self._sources[engine_id] = source, set()
        return lambda: self._end(engine_id)

    def _end(self, engine_id: str) -> None:
        _, readings = self._sources.pop(engine_id, (None, set()))
        for reading in readings:
            reading.lost()

    def ask(self, ask: Ask, reading: Reading) -> Callable[[], None]:
        if ask.engine_id not in self._sources:
            reading.answered(None)
            return _nothing
        source, readings = self._sources[ask.engine_id]
        answer = source.answer(ask)
        reading.answered(answer)
        if answer is None or not ask.num_blocks:
            return _nothing
        readings.add(reading)

        def finish() -> None:
            readings.discard(reading)
            source.release(ask.request_id)

        return finish


def _nothing() -> None:
    """Do nothing: no source waits for the end of the read."""
