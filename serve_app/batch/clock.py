"""`BatchClock` is the time of day by which batches expire and files are removed, which cannot be undone.

One machine whose clock is wrong for a while must not do either. Ingresses that share a database all follow its server's clock. An ingress
with a folder believes a step of its machine's clock only after ten minutes, in which a time service would have mended a wrong one.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_DRIFT_S = 60.0
"""Time services move a clock by less than this between two looks. A larger difference to the monotonic clock is a step."""
SETTLE_S = 600.0
"""How long a step has to last until it is believed."""


class BatchClock:
    """A clock of one process. Any thread may read it."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._began_at = monotonic()
        self._offset = wall() - self._began_at
        self._first_s = int(wall())
        self._follows = False
        self._stepped_at: float | None = None

    def time(self) -> float:
        """Return seconds since 1970."""
        at = self._monotonic()
        if not self._follows:
            self._look_at_wall(at)
        return at + self._offset

    def follow(self, unix_s: float) -> None:
        """Take the time of another clock, from now on instead of this machine's."""
        self._offset, self._follows = unix_s - self._monotonic(), True

    def is_settled(self) -> bool:
        """Return whether a clock that was wrong when the machine started would have been mended by now."""
        self.time()
        return self._follows or (self._monotonic() - self._began_at >= SETTLE_S and self._stepped_at is None)

    def has_passed(self, moment: float, *, since: int) -> bool:
        """Return whether ``moment`` has passed. Both arguments are in seconds since 1970; ``moment`` was computed at ``since``.

        If an earlier process computed ``moment``, this clock may be the wrong one of two, and counts only when it is settled.
        """
        return self.time() >= moment and (since >= self._first_s or self.is_settled())

    def _look_at_wall(self, at: float) -> None:
        step = self._wall() - at - self._offset
        if abs(step) > MAX_DRIFT_S and self._stepped_at is None:
            self._stepped_at = at
            logger.warning(
                "the machine's clock was set by %+.0f s; batches go by it only if it stays so for %g s", step, SETTLE_S
            )
        if abs(step) <= MAX_DRIFT_S or (self._stepped_at is not None and at - self._stepped_at >= SETTLE_S):
            self._offset, self._stepped_at = self._offset + step, None
