"""How many requests one turn of the event loop begins: a few, so that tokens need not wait for all of a burst.

A request takes some 0.35 ms without a pause, from its head to the frame for a replica. All of a burst of 256 would be one turn of 90 ms. A
first token passes three turns, and would wait in each: the frame is read, vLLM's output handler takes it, the stream's generator writes it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context

MAX_BEGINS = 4
"""Requests of one turn: 1.4 ms."""


class Intake:
    """Begins requests in the order in which they came. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        self._num_begun = 0
        """In the present turn; 0 once nothing is due."""

    def begin(self, request: Callable[[], object]) -> None:
        """Call ``request`` now, or in one of the next turns if this one has begun `MAX_BEGINS`."""
        if self._num_begun == 0:
            self._call_soon()
        if self._num_begun < MAX_BEGINS and not self._waiting:
            self._num_begun += 1
            request()
        else:
            self._waiting.append((self._clock(), request))

    def late_s(self) -> float:
        """Return for how long the first of those that wait has waited."""
        return self._clock() - self._waiting[0][0] if self._waiting else 0.0

    def _call_soon(self) -> None:
        # In a context of its own, or a task begun there would inherit what the request that happened to come first had in its own.
        asyncio.get_running_loop().call_soon(self._next_turn, context=Context())

    def _next_turn(self) -> None:
        self._num_begun = min(MAX_BEGINS, len(self._waiting))
        if self._num_begun:
            self._call_soon()
        for _ in range(self._num_begun):
            _, request = self._waiting.popleft()
            request()
