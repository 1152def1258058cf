"""`QueueRate` measures how fast a queue moves: starts, and virtual seconds, per second while requests wait. Pure.

It looks at the last ten seconds. Time in which no request waits does not count: starts then follow arrivals and do not show how many
requests the replicas can take. `FairOrder` notes each first token and its virtual time, and estimates from the pace how long a request
waits.
"""

import math
import zlib
from collections import deque

WINDOW_S = 10.0
_SLOT_S = 0.5
"""Starts within one slot leave the window together."""
_ENOUGH = ((5, 3.0), (50, 1.0))
"""Starts, and seconds, that show a rate. Fewer do not, because answers that began together end together."""
_SEVERAL = 8
"""Starts in the window that show how fast one tenant's requests begin."""
_ENOUGH_FOR_PACE = 50
"""Starts in the window that show how fast virtual time passes. It is a mean of few starts, and jumps with each long request."""
_JITTER = 0.1


class QueueRate:
    """The rate of one queue."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int, float, float]] = deque()
        """For each slot its number, starts, seconds in which requests waited, and virtual seconds that passed meanwhile."""
        self._starts, self._waiting_s, self._moved_s = 0, 0.0, 0.0
        self._noted_at, self._noted_virtual_s, self._is_waiting = 0.0, 0.0, False

    def note(self, num_started: int, *, is_waiting: bool, now: float, virtual_s: float = 0.0) -> None:
        """Count the starts and the virtual time since the last note, if requests waited at that note.

        ``is_waiting``: requests wait from now on. ``virtual_s``: the virtual time.
        """
        if self._is_waiting:
            self._add(num_started, min(now - self._noted_at, WINDOW_S), virtual_s - self._noted_virtual_s, now)
        self._noted_at, self._noted_virtual_s, self._is_waiting = now, virtual_s, is_waiting

    def forget(self) -> None:
        """Forget the rate so far, because there are new places. The starts up to the next note, which fill them, do not count."""
        self._slots.clear()
        self._starts, self._waiting_s, self._moved_s, self._is_waiting = 0, 0.0, 0.0, False

    def per_second(self, now: float) -> float | None:
        """Return the rate, > 0; None if it is not known. Without a start in the whole window, it counts as one start in that time."""
        self.note(0, is_waiting=self._is_waiting, now=now, virtual_s=self._noted_virtual_s)
        self._forget_old(now)
        if any(self._starts >= starts and self._waiting_s >= seconds for starts, seconds in _ENOUGH):
            return self._starts / self._waiting_s
        return max(self._starts, 1) / self._waiting_s if self._waiting_s >= WINDOW_S - 2 * _SLOT_S else None

    def is_long(self, now: float) -> bool:
        """Return whether the rate is one of a nearly full window with several starts."""
        self._forget_old(now)
        return self._starts >= _SEVERAL and self._waiting_s >= WINDOW_S - 2 * _SLOT_S

    def pace(self, now: float) -> float | None:
        """Return the virtual seconds per second, > 0; None if they are not known.

        They are known from a nearly full window: virtual time is a moving mean, and passes slowly while a queue begins.
        """
        self._forget_old(now)
        if self._moved_s <= 0.0 or self._starts < _ENOUGH_FOR_PACE or self._waiting_s < WINDOW_S - 2 * _SLOT_S:
            return None
        return self._moved_s / self._waiting_s

    def _add(self, starts: int, waiting_s: float, moved_s: float, now: float) -> None:
        slot = math.floor(now / _SLOT_S)
        if self._slots and self._slots[-1][0] == slot:
            _, before, before_s, moved_before_s = self._slots.pop()
            self._slots.append((slot, before + starts, before_s + waiting_s, moved_before_s + moved_s))
        else:
            self._slots.append((slot, starts, waiting_s, moved_s))
            self._forget_old(now)
        self._starts += starts
        self._waiting_s += waiting_s
        self._moved_s += moved_s

    def _forget_old(self, now: float) -> None:
        while self._slots and self._slots[0][0] * _SLOT_S <= now - WINDOW_S:
            _, starts, waiting_s, moved_s = self._slots.popleft()
            self._starts -= starts
            self._waiting_s -= waiting_s
            self._moved_s -= moved_s


def jitter(request_id: str) -> float:
    """Return a factor within 10 % of 1 that a request keeps, so that clients that were refused together do not return together."""
    return 1 - _JITTER + 2 * _JITTER * zlib.crc32(request_id.encode("utf-8", "backslashreplace")) / 0xFFFFFFFF
