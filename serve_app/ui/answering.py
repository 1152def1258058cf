"""`Answering` holds the answers under way, by the page that shows them, so that each can be stopped."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve_app.ui.api import Event, Service
from serve_app.ui.preset import Message, Preset
from serve_app.ui.shown_answer import ShownAnswer

SHOW_S = 0.05
"""Shortest time between two shown states of an answer: more would gain nothing in a browser."""


class Answering:
    """The answers under way. A page has one answer at a time. ``stop`` closes the answer's connection, which aborts it on the engine.

    Gradio's own cancelling is not used: it abandons a generator between two of its values, and only garbage collection would then close
    the connection. It also shows nothing, while this class shows the text up to the stop.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._readers: dict[str, asyncio.Task[None]] = {}

    def stop(self, page: str) -> None:
        """End the answer that ``page`` waits for; without one, nothing happens."""
        if (reader := self._readers.get(page)) is not None:
            reader.cancel()

    async def answer(self, page: str, preset: Preset, history: Sequence[Message], key: str) -> AsyncGenerator[ShownAnswer, None]:
        """Yield the answer whenever it has grown, at most every `SHOW_S` seconds, and once at its end or stop.

        The caller has to close the generator: only then the connection is closed, and ``stop`` no longer knows this answer.

        Raises:
            ServiceProblem: The service refuses or fails; states that were yielded before stay valid.
        """
        self.stop(page)
        answer = ShownAnswer(preset.n, sent_at=time.monotonic())
        path, body = preset.request(history)
        news = asyncio.Event()
        reader = asyncio.create_task(_read(self._service.stream(path, body, key), answer, news), name="reader of an answer")
        reader.add_done_callback(lambda _: news.set())
        self._readers[page] = reader
        try:
            yield answer
            while not reader.done():
                await news.wait()
                news.clear()
                yield answer
                await asyncio.wait({reader}, timeout=SHOW_S)
            yield answer
            if not reader.cancelled():
                reader.result()
        finally:
            reader.cancel()
            await asyncio.wait({reader})
            if self._readers.get(page) is reader:
                del self._readers[page]


async def _read(events: AsyncGenerator[Event, None], answer: ShownAnswer, news: asyncio.Event) -> None:
    """Add ``events`` to ``answer``. This is a task of its own, so that the text is shown while the next event is awaited."""
    async with aclosing(events):
        async for event in events:
            answer.add(event, now=time.monotonic())
            news.set()
