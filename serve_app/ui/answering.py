"""Answers that are under way, by the page that shows them, so that each can be stopped."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve_app.ui.answer import Answer
from serve_app.ui.api import Event, Service
from serve_app.ui.preset import Message, Preset

SHOW_S = 0.05
"""Least time between two states of an answer that are shown: a browser gains nothing from more."""


class Answering:
    """One page has one answer at a time. ``stop`` closes its connection to the service, which aborts on the engine.

    Gradio's own cancelling is not used: it abandons a generator between two of its values, and only garbage collection would then close
    the connection. It also says nothing, while this shows what had come until the stop.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stops: dict[str, asyncio.Event] = {}

    def stop(self, page: str) -> None:
        """End the answer that ``page`` waits for; without one, nothing happens."""
        if (stop := self._stops.get(page)) is not None:
            stop.set()

    async def answer(self, page: str, preset: Preset, history: Sequence[Message], key: str) -> AsyncGenerator[Answer, None]:
        """Yield the answer as it grows, at most every `SHOW_S` seconds, and once at its end or stop.

        Close the generator: only then the connection is closed, and ``stop`` no longer knows of this answer.

        Raises:
            ServiceProblem: The service refuses or fails; what was yielded before stays valid.
        """
        self.stop(page)
        stop = self._stops[page] = asyncio.Event()
        try:
            answer = Answer(preset.n, sent_at=time.monotonic())
            path, body = preset.request(history)
            shown_at = 0.0
            yield answer
            async with aclosing(_until(stop, self._service.stream(path, body, key))) as events:
                async for event in events:
                    answer.add(event, now=(now := time.monotonic()))
                    if now - shown_at >= SHOW_S:
                        shown_at = now
                        yield answer
            yield answer
        finally:
            if self._stops.get(page) is stop:
                del self._stops[page]


async def _until(stop: asyncio.Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield events until ``stop`` is set; then cancel the wait for the next one, which closes the connection."""
    stopped = asyncio.create_task(stop.wait(), name="stop of an answer")
    following: asyncio.Task[Event] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        stopped.cancel()
        if following is not None and not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()
