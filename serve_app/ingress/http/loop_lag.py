"""The loop lag is the delay with which the event loop wakes a task; an overloaded ingress delays every token by as much.

An ingress whose loop is far behind refuses new requests, before it misses the heartbeats of its links: without these, the replicas of all
its streams would count as lost. Running streams continue.
"""

import asyncio
import logging

from serve_app.books import series

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two measurements. A loop that stands still for less may go unnoticed."""
LATE_LOOKS = 2
"""The loop counts as overloaded after so many late measurements in a row. A single one is a pause, for example by the garbage collector,
which is over when it is measured."""

_lag = series.histogram("event_loop_lag_seconds", series.LAG_BOUNDS_S)
_tasks = series.gauge("tasks")


class LoopLag:
    """The lag of the running event loop, and whether the loop is overloaded, so that new requests are refused.

    Args:
        limit_s: The loop is overloaded after `LATE_LOOKS` measurements in a row above this, until one is at most half of it.
    """

    def __init__(self, limit_s: float) -> None:
        self.is_overloaded = False
        self.limit_s = limit_s
        self._num_late = 0

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        _tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.note(max(0.0, loop.time() - due))

    def note(self, late_s: float) -> None:
        """Take in one measurement."""
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
