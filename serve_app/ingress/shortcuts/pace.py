"""How often the middle tokens of all streams are written: at once while that is cheap, else in a bounded share of the time.

Pure: no clock, no IO. A write is a system call for each stream, and most of what a middle token costs; the text of two tokens costs as much
as that of one. With few streams a step of the engine is longer than the pause, and each token is written as it comes.
"""

MAX_SHARE = 0.2
"""Share of the time that passes may take: a fifth, up to some 550 streams, of which the pause would be longer than ``MAX_PAUSE_S``. A pass
over 256 streams takes some 2.3 ms of CPU time; the next begins 9.2 ms after its end or later."""
MAX_PAUSE_S = 0.02
"""Longest that a token waits: nobody sees that two words come together which are 20 ms apart."""


class Pace:
    """Decides when the next pass may begin."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next pass has to wait; 0.0 if it may begin."""
        return max(0.0, self._next_at - now)

    def wrote(self, cost_s: float, now: float) -> None:
        """A pass that took ``cost_s`` of CPU time has ended."""
        # Two models that waited for the same time pass one behind the other: the pause behind both is that of both.
        next_at = max(self._next_at, now - cost_s) + cost_s / MAX_SHARE
        self._next_at = min(next_at, now + MAX_PAUSE_S)
