"""`ReadCosts` measures how long a read of KV takes if no other read is before it, by the number of its tokens. Pure."""

from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.usual_costs import GUESS

MIN_TOKENS = 256
"""While the cost of prompt tokens is not known, requests with fewer tokens of prompt and answer are computed again."""
_FIRST_S, _FIRST_TOKENS = (0.03, 0.08), (0.0, 8192.0)
"""The law that is assumed at first goes through these two points: the KV of 8,192 tokens of an 8B model at 200 Gbit/s, a step at both ends,
and the way of the messages. It is meant to be too low rather than too high: what is never tried is never measured."""
_WEIGHT = 0.2
"""Weight of the latest read."""
_FORGET_S = 300.0
"""After so long without a read the first law counts again. Otherwise reads that were slow once would never be tried again."""


class ReadCosts:
    """A straight line through the latest reads, each of which weighs less the older it is."""

    def __init__(self) -> None:
        self._learned_at = 0.0
        self._start()

    def _start(self) -> None:
        pairs = list(zip(_FIRST_TOKENS, _FIRST_S, strict=True))
        self._tokens, self._seconds = sum(_FIRST_TOKENS) / 2, sum(_FIRST_S) / 2
        self._squares = sum(tokens * tokens for tokens, _ in pairs) / 2
        self._products = sum(tokens * seconds for tokens, seconds in pairs) / 2

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """Take in a read: the seconds from the order to read, or from the end of an earlier read of that source, to the next token."""
        self._learned_at = now
        self._tokens += _WEIGHT * (tokens - self._tokens)
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._squares += _WEIGHT * (tokens * tokens - self._squares)
        self._products += _WEIGHT * (tokens * seconds - self._products)

    def seconds(self, tokens: int) -> float:
        """Return how long the read of so many tokens would probably take, > 0."""
        variance = self._squares - self._tokens**2
        slope = max(0.0, (self._products - self._tokens * self._seconds) / variance) if variance > 1.0 else 0.0
        slope = min(slope, self._seconds / self._tokens)  # so that no read has a negative cost
        return self._seconds + slope * (tokens - self._tokens)

    def pays(self, tokens: int, costs: MeasuredCosts) -> bool:
        """Return whether a read is shorter than the computation of so many tokens."""
        if costs is GUESS:
            return tokens >= MIN_TOKENS
        return self.seconds(tokens) < tokens * costs.prompt_token_s

    def tick(self, now: float) -> None:
        """Forget what is too old."""
        if self._learned_at and now - self._learned_at > _FORGET_S:
            self._learned_at = 0.0
            self._start()
