"""The running HTTP requests of an ingress: each can be ended from outside by an error.

A request ends so when its tenant's `total_s` is over, and all end when the ingress stops.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from serve_app.errors import DeadlinePassed, ServingError
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer
from serve_app.ingress.front_end.front_end import FrontEnd

_GRACE_S = 1.0
"""How long vLLM's app has to answer by the error, in seconds. If it is cancelled while it makes a whole answer, it leaves tasks behind."""


class RunningRequests:
    """The HTTP requests that the ingress answers now."""

    def __init__(self, front_ends: Mapping[str, FrontEnd]) -> None:
        self._front_ends = front_ends
        self._limits: dict[Exchange, asyncio.Timeout] = {}
        self._timers: dict[Exchange, asyncio.TimerHandle] = {}

    def __reversed__(self) -> Iterator[Exchange]:
        """Yield the running requests, the newest first."""
        return reversed(self._limits)

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._limits)

    async def answer(self, held: HeldAnswer, answering: Coroutine[Any, Any, None]) -> None:
        """Run ``answering``, which sends the answer, until it returns or the request is ended by an error, which the client is sent."""
        exchange, limit = held.exchange, asyncio.timeout(None)
        self._limits[exchange] = limit
        self._start_timer(exchange)
        try:
            async with limit:
                await answering
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            del self._limits[exchange]
            if (timer := self._timers.pop(exchange, None)) is not None:
                timer.cancel()
        if limit.expired():
            self._stop_engines(exchange)
            await held.end()

    def end_all(self, error: ServingError) -> None:
        """End every request by the error, after all text that has arrived for it."""
        for front in self._front_ends.values():
            front.client.output_path.write_all()
        for exchange in self._limits:
            self._end(exchange, error)

    def _start_timer(self, exchange: Exchange) -> None:
        """Limit the time of the request, if its tenant has ``total_s``."""
        if exchange.caller is not None and (total_s := exchange.caller.tenant.total_s) is not None:
            error = DeadlinePassed(exchange.caller.tenant.name, total_s)
            self._call_later(exchange.arrived_at + total_s - time.monotonic(), self._pass_deadline, exchange, error)

    def _call_later(
        self, wait_s: float, end: Callable[[Exchange, DeadlinePassed], None], exchange: Exchange, error: DeadlinePassed
    ) -> None:
        self._timers[exchange] = asyncio.get_running_loop().call_later(wait_s, end, exchange, error)

    def _pass_deadline(self, exchange: Exchange, error: DeadlinePassed) -> None:
        """End a request. A stream, or a body that has not come yet, is cancelled; other answers have a moment to end by the error."""
        if (front := self._front_ends.get(exchange.model)) is not None and not exchange.stream:
            front.client.end_all_of(exchange, error)
            self._call_later(_GRACE_S, self._end, exchange, error)
        else:
            if front is not None:
                front.client.output_path.write_all()
            self._end(exchange, error)

    def _stop_engines(self, exchange: Exchange) -> None:
        """Stop engine requests that tasks of vLLM's app still await, which a cancellation of the app does not reach."""
        front, error = self._front_ends.get(exchange.model), exchange.error
        if front is not None and isinstance(error, DeadlinePassed):
            front.client.end_all_of(exchange, error)

    def _end(self, exchange: Exchange, error: ServingError) -> None:
        exchange.fail(error)
        if (limit := self._limits[exchange]).when() is None:  # else it ends already
            limit.reschedule(0.0)
