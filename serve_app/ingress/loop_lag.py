"""Measures how late the event loop wakes a task: what an ingress with too much to do adds to every token."""

import asyncio

from serve_app import series

PERIOD_S = 0.25
"""Seconds between two looks. A loop that stands still for less may be missed."""

_lag = series.histogram("event_loop_lag_seconds", series.LAG_BOUNDS_S)


async def watch_loop_lag() -> None:
    """Look until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        _lag.observe(max(0.0, loop.time() - due))
