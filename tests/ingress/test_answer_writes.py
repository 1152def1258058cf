"""An answer costs few writes to its connection, and leaves no objects that only the garbage collector would free."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.ingress.exchange.held_answer import HeldAnswer
from serve_app.ingress.http.connection import LimitedHttpProtocol
from serve_app.ingress.shortcuts.gathering import Gathering
from tests.doubles.fleet import in_loop, until
from tests.ingress.streams import CHAT, COMPLETIONS, NUM_TOKENS, Play, serving
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]


class Recording:
    """A transport that remembers its writes."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All writes to all connections of clients."""
    written: list[bytes] = []
    made = LimitedHttpProtocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, Recording(transport, written))  # type: ignore[arg-type]

    monkeypatch.setattr(LimitedHttpProtocol, "connection_made", connection_made)
    return written


@in_loop
async def test_the_head_goes_with_the_first_event_and_the_last_events_go_together(
    model: Path, monkeypatch: pytest.MonkeyPatch, written: list[bytes]
) -> None:
    async with serving(model, monkeypatch, 18131) as ingress:
        replica = await ingress.join()
        for path in (COMPLETIONS, CHAT):
            fields = {"stream_options": {"include_usage": True}}
            await Play(ingress, path, **fields).to_end(replica)  # its events become a template
            written.clear()
            play = Play(ingress, path, **fields)
            await play.to_end(replica)
            assert written[0].startswith(b"HTTP/1.1 200"), path
            assert written[0].count(b"data: {") == 1, path
            assert (written[-1].count(b"data: {"), written[-1].count(b"data: [DONE]")) == (2, 1), path
            assert written[-1].endswith(b"\r\n0\r\n\r\n"), path
            assert b"".join(written).count(b"data: ") == play.num_events(), path
            role = path == CHAT  # an event without a token
            assert len(written) == NUM_TOKENS + role, path


@in_loop
async def test_an_answer_that_is_no_stream_is_one_write(
    model: Path, monkeypatch: pytest.MonkeyPatch, written: list[bytes]
) -> None:
    async with serving(model, monkeypatch, 18132) as ingress:
        replica = await ingress.join()
        play = Play(ingress, CHAT, stream=False)
        await until(lambda: replica.engine.running)
        while replica.engine.running:
            replica.engine.step()
            await asyncio.sleep(0)
        await play.task
        assert [data[:12] for data in written] == [b"HTTP/1.1 200"]
        assert written[0].endswith(play.content)


class Cycle:
    """Of uvicorn's cycle, the transport; it writes into ``written``."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.transport: Any = SimpleNamespace(
            write=self.written.append, close=lambda: self.written.append(b"closed"), is_closing=lambda: b"closed" in self.written
        )


def test_what_is_gathered_is_written_once_and_before_the_end_of_the_connection() -> None:
    cycle: Any = Cycle()
    own = cycle.transport
    gathering = Gathering.of(cycle)
    assert gathering is not None
    assert Gathering.of(cycle) is None, "it gathers already"
    cycle.transport.write(b"one ")
    cycle.transport.write(b"two")
    assert cycle.written == []
    cycle.transport.close()
    gathering.flush()
    assert (cycle.written, cycle.transport is own) == ([b"one two", b"closed"], True)
    late = Gathering.of(cycle)
    assert late is not None
    cycle.transport.write(b"three")
    late.flush()
    assert cycle.written == [b"one two", b"closed"]


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@in_loop
async def test_an_answer_that_has_ended_is_freed_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[weakref.ref[HeldAnswer]] = []
    begin = HeldAnswer.__init__

    def begun(self: HeldAnswer, *args: Any, **kwargs: Any) -> None:
        answers.append(weakref.ref(self))
        begin(self, *args, **kwargs)

    monkeypatch.setattr(HeldAnswer, "__init__", begun)
    async with serving(model, monkeypatch, 18133) as ingress:
        replica = await ingress.join()
        with without_garbage_collection():
            for path in (COMPLETIONS, CHAT):
                await Play(ingress, path).to_end(replica)
            await until(lambda: [answer() for answer in answers] == [None, None])
