"""`Answering` holds the answers under way, by the page that shows them, so that each can be stopped."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve_app.ui.api import Event, Service
from serve_app.ui.preset import Message, Preset
from serve_app.ui.shown_answer import ShownAnswer

SHOW_S = 0.05
"""Least time between two states of an answer that are shown: a browser gains nothing from more."""


class Answering:
    """One page has one answer at a time. ``stop`` closes its connection to the service, which aborts on the engine.

    Gradio's own cancelling is not used: it abandons a generator between two of its values, and only garbage collection would then close
    the connection. It also says nothing, while this shows what had come until the stop.
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

        Close the generator: only then the connection is closed, and ``stop`` no longer knows of this answer.

        Raises:
            ServiceProblem: The service refuses or fails; what was yielded before stays valid.
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
    """Add ``events`` to ``answer``. A task of its own: what has come is shown also while the next event is waited for."""
    async with aclosing(events):
        async for event in events:
            answer.add(event, now=time.monotonic())
            news.set()
