"""This module measures the demand: the work that arrives, from the history of arrivals. It sees a step within seconds. Pure.

Chance variations of a constant rate do not count as steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.history import HISTORY_S, History, Sums

WINDOWS_S = (5.0, 15.0, 30.0, 60.0, 120.0)
"""Windows that may contradict the long one: the shortest decides how soon a step in the load is seen."""
BRIEF_S, PEAK = 30.0, 0.5
"""Of a window up to so long, one observation does not count where it holds more than this share of the work: one huge prompt, or many
requests in one second, are no new rate. The queue that they make is seen as such. Bursts that repeat are seen by the windows that hold
two of them, and at the latest by that of 60 s."""
QUIET_S = 30.0
"""After so long without a request what came before is no demand."""
LONG_REQUESTS, LONG_MIN_S = 1000, 60.0
"""The long window holds about so many requests, but lasts from `LONG_MIN_S` to `HISTORY_S`: 1,000 give the mean to about 4 %."""
CONFIDENCE = 3.0
"""Standard deviations by which a shorter window must differ, or the rate have grown, before that is taken for more than chance: with
1.5, a constant load contradicts itself every few minutes."""
BELIEVED = 1.0
"""A window that does contradict is believed to within so many standard deviations: the nearest work per second that these allow."""
GROWTH_SPANS, GROWTH_MIN_S = 5, 30.0
"""Growth counts when it went on over so many spans of at least this length: a step in the load touches two of them at most."""
STEADY = 0.4
"""Share of the mean growth from span to span that each must have."""
GROWTH_NOISE = 0.5
"""Standard deviations of the difference of two spans that are taken off growth which counts."""


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
    is_even: bool
    """Whether no shorter window contradicts the long one."""
    error: float
    """Relative standard deviation of the work per second: what chance makes of it."""


def arrivals(history: History, now: float, weights: Weights) -> Arrivals:
    """Return what comes at present: the long window's work, unless a shorter one contradicts it.

    Then it is the nearest work per second that the shorter one allows, with the shorter one's prompts. The work of n requests has a
    relative deviation of sqrt((d + p^2 v) / n): d is the dispersion of arrivals, v the relative variance of the prompts' lengths, p the
    prompts' share of the work. Answers add nothing, because each counts with the mean length. A measured d above 1 is inexact, so the
    second term is then at least d - 1, up to 1. Real answers do vary: the error of the result is sqrt((d + 1) / n).
    """
    base = history.sums(now, HISTORY_S)
    if base.requests > LONG_REQUESTS:
        base = history.sums(now, max(LONG_MIN_S, HISTORY_S * LONG_REQUESTS / base.requests))
    work = weights.of(base) / base.interval_s if base.interval_s else 0.0
    lag_s, mix, dispersion, spread = base.interval_s / 2, base, history.dispersion(), history.prompts_spread()
    for window_s in sorted(WINDOWS_S, reverse=True):
        part = history.sums(now, window_s)
        if not 0 < part.interval_s < base.interval_s:
            continue
        if window_s <= BRIEF_S:
            part = _without_peak(part, history.observations(now, window_s), weights)
        known = part if part.requests else base
        mean = weights.of(known) / known.requests if known.requests else 0.0
        prompts = 1.0 - weights.request / mean if mean else 0.0
        variance = dispersion + max(spread * prompts**2, min(1.0, dispersion - 1.0))
        deviation = math.sqrt(variance * max(part.requests, 1.0)) * mean
        # Few requests where many were expected say less of chance than the expected ones do.
        expected = max(part.requests, work * part.interval_s / mean if mean else 0.0, 1.0)
        if abs(weights.of(part) - work * part.interval_s) > CONFIDENCE * math.sqrt(variance * expected) * mean:
            low, high = (weights.of(part) + side * BELIEVED * deviation for side in (-1, 1))
            work = min(max(work, low / part.interval_s), high / part.interval_s)
            lag_s, mix = part.interval_s / 2, part if part.requests else mix
    per_request = weights.of(mix) / mix.requests if mix.requests else 0.0
    return Arrivals(
        requests_per_s=work / per_request if per_request else 0.0,
        prompt_tokens=mix.prompt_tokens / mix.requests if mix.requests else 0.0,
        lag_s=lag_s,
        is_even=lag_s == base.interval_s / 2,
        error=math.sqrt((dispersion + 1) / max(1.0, mix.requests)),
    )


def _without_peak(part: Sums, observations: Iterable[Sums], weights: Weights) -> Sums:
    """Return a window without the observation that holds more than `PEAK` of its work; the window itself where none does.

    One that lasted more than half of the window stays: then nobody looked for a while, and it is all that is known.
    """
    peak = max(observations, key=weights.of)
    if weights.of(peak) <= PEAK * weights.of(part) or peak.interval_s > part.interval_s / 2:
        return part
    return part - peak


def growth(history: History, now: float, ahead_s: float) -> float:
    """Return by how many requests per second the rate grows each second, >= 0, if it grew steadily over the last spans.

    These look back as far as the caller wants to look ahead, ``ahead_s``: over spans of 30 s, chance makes one step of a small load in
    fifteen seem steady, and over 300 s that would be twice the replicas. ``ahead_s`` is at most `HISTORY_S`, which is all that is known.
    """
    span_s = max(GROWTH_MIN_S, ahead_s / GROWTH_SPANS)
    spans = [history.sums(now - i * span_s, span_s) for i in range(GROWTH_SPANS)]
    if spans[-1].interval_s < span_s / 2:
        return 0.0
    rates = [span.rate() for span in spans]
    steps = [later - earlier for later, earlier in pairwise(rates)]
    if min(steps) < STEADY * sum(steps) / len(steps):
        return 0.0
    # + 1 is slack: a growth that is none orders replicas for a whole cold start.
    deviation = math.sqrt(2 * (history.dispersion() + 1) * rates[0] / span_s)
    if sum(steps) < CONFIDENCE * deviation:
        return 0.0
    return (sum(steps) - GROWTH_NOISE * deviation) / (span_s * len(steps))
