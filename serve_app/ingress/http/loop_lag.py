"""Measures how late the event loop wakes a task: what an ingress with too much to do adds to every token.

An ingress that is far behind refuses new requests before it misses the heartbeats of its links, which would cost all its streams
their replicas. Streams that run go on.
"""

import asyncio
import logging

from serve_app.books import series

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two looks. A loop that stands still for less may be missed."""
LATE_LOOKS = 2
"""So many looks in a row have to be too late: one alone is a pause, as of the garbage collector, and over when it is seen."""

_lag = series.histogram("event_loop_lag_seconds", series.LAG_BOUNDS_S)
_tasks = series.gauge("tasks")


class LoopLag:
    """How late the loop is, and whether that is too late for new requests.

    Args:
        limit_s: Seconds. `LATE_LOOKS` looks in a row that are later make it overloaded; one within half of that ends it.
    """

    def __init__(self, limit_s: float) -> None:
        self.is_overloaded = False
        self.limit_s = limit_s
        self._num_late = 0

    async def watch(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        _tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.note(max(0.0, loop.time() - due))

    def note(self, late_s: float) -> None:
        """Take in one look."""
        _lag.observe(late_s)
        self._num_late = self._num_late + 1 if late_s > self.limit_s else 0
        if not self.is_overloaded and self._num_late >= LATE_LOOKS:
            self.is_overloaded = True
            logger.warning(
                "the event loop is %.1f s late, limit ingress.max_loop_lag_s %g s: new requests get 503 until it is within half of that",
                late_s,
                self.limit_s,
            )
        elif self.is_overloaded and late_s <= self.limit_s / 2:
            self.is_overloaded = False
            logger.warning("the event loop is %.1f s late: new requests are answered again", late_s)
