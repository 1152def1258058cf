"""`Judge` decides whether a canary does worse than the model whose requests it shares. Pure.

Each criterion is a question about a request with yes or no for an answer: did it fail, did its first token take more than so many times
the model's median time, ... The same question is asked of the model's own requests of the same time, so that a fault which strikes both
sides does not count against the canary. The test is Wald's sequential one (Annals of Mathematical Statistics 16, 1945): looking at it
after each request does not raise the rate of false alarms. docs/adr/0014-a-canary-judged-against-its-model.md has the reasons and the
measured rates.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

FALSE_ALARM = 1e-3
"""Bound on the probability that one criterion condemns a canary as good as its model, if the model's share were exactly known."""
WORSE_BY = 0.2
"""The test looks for a canary that is worse in this share of its requests; it also finds half of that, later."""
_ENOUGH_TO_TIME = 20
"""Times of the model that must be known before the canary's are compared with their median."""
_FIRST_TIMES = 10
"""The first times of the canary are not judged: its caches are cold."""
_KEPT, _KEPT_OF_MODEL = 256, 4096
"""Values that are kept of each criterion. A canary of 5 % sees 256 requests while its model sees 4,864."""
_USUALLY_SLOW = 0.3
"""For times, at least this share of requests counts as usually beyond the limit: times scatter, and a canary may be a little slower."""
_MIN_PATIENCE_S, _UNKNOWN_PATIENCE_S = 10.0, 30.0
"""The shortest patience, and the patience while too few times of the model are known."""


class Criterion(StrEnum):
    """A property by which canary and model are compared. Values of the last two are seconds, of the others 1 for yes and 0 for no."""

    FAILED = "failed"
    EMPTY = "had an empty answer"
    LOOPED = "had an answer that ends in a loop"
    TTFT = "waited too long for the first token"
    ITL = "had too long gaps between tokens"


TIMES = {Criterion.TTFT: 0.05, Criterion.ITL: 0.005}
"""Criterion in seconds -> the least distance of its limit above the model's median: on a fast model noise alone doubles a time."""


class CanaryState(StrEnum):
    """The verdict over a canary so far."""

    UNDECIDED = "undecided"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class CanaryLimits:
    """Limits of one canary. ``share``: its part of the requests. ``requests``: after how many it counts as good.

    ``slow_factor``: how many times the model's median time is too slow.
    """

    share: float
    requests: int
    slow_factor: float


class Judge:
    """One canary at one ingress. Its verdict ``BAD`` is final."""

    def __init__(self, limits: CanaryLimits) -> None:
        self.limits = limits
        self.reason = ""
        """Why the canary is bad, in words for people; "" while it is not."""
        self.num_taken = 0
        self.num_judged = 0
        self._due = 0.0
        self._model = {criterion: deque[float](maxlen=_KEPT_OF_MODEL) for criterion in Criterion}
        self._canary = {criterion: deque[float](maxlen=_KEPT) for criterion in Criterion}
        self._times_to_skip = dict.fromkeys(TIMES, _FIRST_TIMES)

    @property
    def state(self) -> CanaryState:
        if self.reason:
            return CanaryState.BAD
        return CanaryState.GOOD if self.num_judged >= self.limits.requests else CanaryState.UNDECIDED

    def takes_next(self, *, is_ready: bool) -> bool:
        """Return whether the canary gets the next request.

        Its requests are evenly spread and never more than its share. Requests that it missed while not ready are not made up for.
        """
        if self.reason or not is_ready:
            return False
        self._due += self.limits.share
        if self._due < 1.0 - 1e-9:
            return False
        self._due -= 1.0
        self.num_taken += 1
        return True

    def patience_s(self) -> float:
        """Return how long a request waits for the canary's first token before the model answers it."""
        times = self._model[Criterion.TTFT]
        return max(_MIN_PATIENCE_S, 2.0 * max(times)) if len(times) >= _ENOUGH_TO_TIME else _UNKNOWN_PATIENCE_S

    def saw_model(self, criterion: Criterion, value: float) -> None:
        """Take in a value of one of the model's own requests."""
        self._model[criterion].append(value)

    def saw_canary(self, criterion: Criterion, value: float) -> None:
        """Take in a value of one of the canary's requests, and judge the canary."""
        if criterion is Criterion.FAILED:
            self.num_judged += 1
        if self._times_to_skip.get(criterion, 0):
            self._times_to_skip[criterion] -= 1
            return
        self._canary[criterion].append(value)
        if not self.reason:
            self.reason = self._worse_by(criterion)

    def condemn(self, reason: str) -> None:
        """Take over another ingress's verdict that the canary is bad."""
        self.reason = self.reason or reason

    def _worse_by(self, criterion: Criterion) -> str:
        model, canary, limit = self._model[criterion], self._canary[criterion], 0.5
        if criterion in TIMES:
            if len(model) < _ENOUGH_TO_TIME:
                return ""
            limit = max(self.limits.slow_factor * median(model), median(model) + TIMES[criterion])
        ours, theirs = _over(canary, limit), _over(model, limit)
        usual = max(_usual(theirs, len(model)), _USUALLY_SLOW if criterion in TIMES else 0.0)
        worse = min(usual + WORSE_BY, 0.99)
        evidence = ours * math.log(worse / usual) + (len(canary) - ours) * math.log((1 - worse) / (1 - usual))
        if usual >= worse or evidence < -math.log(FALSE_ALARM):
            return ""
        said = f"{ours} of {len(canary)} requests {criterion}, of the model's own {theirs} of {len(model)}"
        return f"{said} (limit {limit:.3g} s)" if criterion in TIMES else said


def _usual(num_yes: int, num: int) -> float:
    """Return an upper confidence bound of the model's share of yes.

    With few requests the share is uncertain, and an estimate below the true share would condemn a good canary.
    """
    share = (num_yes + 0.5) / (num + 10)
    return share + 1.5 * math.sqrt(share * (1 - share) / (num + 10))


def _over(values: Iterable[float], limit: float) -> int:
    return sum(value > limit for value in values)


def is_looping(token_ids: Sequence[int]) -> bool:
    """Return whether the last 48 tokens repeat a piece of at most 6 tokens, as outputs of broken weights do."""
    last = token_ids[-48:]
    return len(last) == 48 and any(last[period:] == last[:-period] for period in range(1, 7))
