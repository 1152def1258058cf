"""Ticks make the fleet look at its times: which replicas are silent, which requests have waited too long."""

import asyncio
import time

_TICK_S = 0.25  # a silent link or an expired wait is noticed this late at most; 1 s would be felt, 0.01 s would cost CPU
_STANDSTILL_S = 1.0
"""A tick that is later than this follows a standstill of the process, such as a stop signal or a long turn of the loop."""


async def next_tick() -> float:
    """Wait for the next tick and return its time of the monotonic clock.

    After a standstill of this process the wait is one tick longer. Meanwhile the loop reads what the replicas sent during the standstill.
    Otherwise the fleet would take this process's silence for theirs.
    """
    before = time.monotonic()
    await asyncio.sleep(_TICK_S)
    if time.monotonic() - before > _STANDSTILL_S:
        await asyncio.sleep(_TICK_S)
    return time.monotonic()
