"""How much work arrives, from the history of what came: steps are seen within seconds, and chance is not. Pure."""

import math
from dataclasses import dataclass
from itertools import pairwise

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.history import HISTORY_S, History, Sums

WINDOWS_S = (5.0, 15.0, 30.0)
"""Windows that may contradict the long one: the shortest decides how soon a step in the load is seen."""
LONG_REQUESTS, LONG_MIN_S = 200, 60.0
"""The long window holds about so many requests, but lasts from `LONG_MIN_S` to `HISTORY_S`: 200 give the mean to about 10 %."""
CONFIDENCE = 1.5
"""Standard deviations by which a shorter window must differ before it is believed."""
GROWTH_S = 30.0
GROWTH_SPANS = 5
"""Growth counts when it went on over so many spans of this length: a step in the load touches two of them at most."""
STEADY = 0.4
"""Share of the mean growth from span to span that each must have."""
GROWTH_NOISE = 0.5
"""Standard deviations of the difference of two spans that are taken for noise."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What arrivals are counted in: what one request costs, and what each token of its prompt costs more."""

    request: float = 1.0
    prompt_token: float = 0.0

    def of(self, sums: Sums) -> float:
        """Return the weight of all that came in a span."""
        return sums.requests * self.request + sums.prompt_tokens * self.prompt_token


REQUESTS = Weights()
"""While nothing is known of costs."""


def weights_of(times: StepTimes | None, output_tokens: float | None, computed_share: float) -> Weights:
    """Return the seconds of a replica that requests and the tokens of their prompts cost.

    Args:
        times: None while step times are not known.
        output_tokens: Mean of an answer; None while none has ended.
        computed_share: Share of the prompts' tokens that engines compute, 0..1; the prefix cache saves the others.
    """
    if times is None or output_tokens is None:
        return REQUESTS
    weights = Weights(output_tokens * times.output_token_s, computed_share * times.prompt_token_s)
    return weights if weights.request or weights.prompt_token else REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What comes at present."""

    requests_per_s: float
    prompt_tokens: float
    """Mean of a request; 0 when none came."""
    lag_s: float
    """For how many seconds ago that rate is the mean."""


def arrivals(history: History, now: float, weights: Weights) -> Arrivals:
    """Return what comes at present: the long window's work, unless a shorter one contradicts it.

    Then it is the nearest work per second that the shorter one allows, with the shorter one's prompts. The relative deviation of n
    requests' work is sqrt((d + 1) / n), for arrivals of dispersion d and exponential work.
    """
    base = history.sums(now, HISTORY_S)
    if base.requests > LONG_REQUESTS:
        base = history.sums(now, max(LONG_MIN_S, HISTORY_S * LONG_REQUESTS / base.requests))
    work = weights.of(base) / base.interval_s if base.interval_s else 0.0
    lag_s, mix = base.interval_s / 2, base
    for window_s in sorted(WINDOWS_S, reverse=True):
        part = history.sums(now, window_s)
        if part.interval_s:
            known = part if part.requests else base
            mean = weights.of(known) / known.requests if known.requests else 0.0
            slack = CONFIDENCE * math.sqrt((history.dispersion() + 1) * max(part.requests, 1.0)) * mean
            low, high = max(0.0, weights.of(part) - slack) / part.interval_s, (weights.of(part) + slack) / part.interval_s
            if not low <= work <= high:
                work, lag_s = min(max(work, low), high), window_s / 2
                mix = part if part.requests else mix
    per_request = weights.of(mix) / mix.requests if mix.requests else 0.0
    return Arrivals(
        requests_per_s=work / per_request if per_request else 0.0,
        prompt_tokens=mix.prompt_tokens / mix.requests if mix.requests else 0.0,
        lag_s=lag_s,
    )


def growth(history: History, now: float) -> float:
    """Return by how many requests per second the rate grows each second, >= 0, if it grew steadily over the last spans."""
    spans = [history.sums(now - i * GROWTH_S, GROWTH_S) for i in range(GROWTH_SPANS)]
    if spans[-1].interval_s < GROWTH_S / 2:
        return 0.0
    rates = [span.rate() for span in spans]
    steps = [later - earlier for later, earlier in pairwise(rates)]
    if min(steps) < STEADY * sum(steps) / len(steps):
        return 0.0
    noise = GROWTH_NOISE * math.sqrt(2 * (history.dispersion() + 1) * rates[0] / GROWTH_S)
    return max(0.0, sum(steps) - noise) / (GROWTH_S * len(steps))
