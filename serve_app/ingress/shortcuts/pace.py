"""`Pace` decides when the next pass over all streams may write their middle tokens. Pure: no clock, no IO."""

MAX_SHARE = 0.2
"""The share of the time that passes over the streams may take, up to some 550 streams; above that the pause would exceed ``MAX_PAUSE_S``.
A pass over 256 streams takes some 2.3 ms of CPU time; the next pass begins 9.2 ms after its end or later."""
MAX_PAUSE_S = 0.02
"""The longest that a token waits: a reader does not notice that two words arrive together which are 20 ms apart."""


class Pace:
    """Decides when the next pass may write the middle tokens of all streams: at once while passes are cheap, else within `MAX_SHARE`.

    A write is a system call for each stream, and most of the cost of a middle token; the text of two tokens costs
    as much as that of one. With few streams a step of the engine is longer than the pause, and each token is written as it comes.
    """

    def __init__(self) -> None:
        self._next_at = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next pass has to wait; 0.0 if it may begin."""
        return max(0.0, self._next_at - now)

    def wrote(self, cost_s: float, now: float) -> None:
        """Take in the end of a pass that took ``cost_s`` of CPU time."""
        # When the passes of two models were due at the same time, they run in a row, and the pause after them covers both.
        next_at = max(self._next_at, now - cost_s) + cost_s / MAX_SHARE
        self._next_at = min(next_at, now + MAX_PAUSE_S)
