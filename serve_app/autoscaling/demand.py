"""This module measures the demand: the work that arrives, from the history of arrivals. It sees a step within seconds. Pure.

Chance variations of a constant rate do not count as steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.history import HISTORY_S, History, Sums

WINDOWS_S = (5.0, 8.0, 11.0, 15.0, 30.0, 60.0, 120.0)
"""Windows that may contradict the long one. The shortest decides how soon a step in the load is seen."""
BRIEF_S, PEAK = 30.0, 0.5
"""In a window of up to `BRIEF_S`, an observation with more than the share `PEAK` of the work does not count: one huge prompt, or many
requests in one second, are no new rate. The queue that they cause is seen as a queue. Repeated bursts are seen by the windows that hold
two of them, at the latest by that of 60 s."""
QUIET_S = 30.0
"""After this long without a request, earlier requests are no demand."""
LONG_REQUESTS, LONG_MIN_S = 1000, 60.0
"""The long window holds about `LONG_REQUESTS`, but lasts from `LONG_MIN_S` to `HISTORY_S`: 1,000 requests give the mean to about 4 %."""
CONFIDENCE = 3.0
"""A shorter window, or growth, must differ by this many standard deviations to count as more than chance: with 1.5, a constant load would
contradict itself every few minutes."""
BELIEVED = 1.0
"""If a window contradicts, the work per second nearest to the old one within this many standard deviations of the window is taken."""
GROWTH_SPANS, GROWTH_MIN_S = 5, 30.0
"""Growth counts if it lasted over this many spans of at least this length: a step in the load touches at most two of them."""
STEADY = 0.4
"""Each span must grow by at least this share of the mean growth from span to span."""
GROWTH_NOISE = 0.5
"""Growth that counts is reduced by this many standard deviations of the difference of two spans."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The unit in which arrivals are counted: the cost of a request, and the additional cost of each token of its prompt."""

    request: float = 1.0
    prompt_token: float = 0.0

    def of(self, sums: Sums) -> float:
        """Return the weight of all arrivals of a span."""
        return sums.requests * self.request + sums.prompt_tokens * self.prompt_token


REQUESTS = Weights()
"""Counts requests alone, while their costs are unknown."""


def weights_of(times: StepTimes | None, output_tokens: float | None, computed_share: float) -> Weights:
    """Return the weights of arrivals: seconds of a replica for a request and for a token of its prompt.

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
    """The present arrivals."""

    requests_per_s: float
    prompt_tokens: float
    """Mean of a request; 0 without requests."""
    lag_s: float
    """The age of the rate: it is the mean rate of this many seconds ago."""
    is_even: bool
    """Whether no shorter window contradicts the long one."""
    error: float
    """Relative standard deviation of the work per second by chance."""


def arrivals(history: History, now: float, weights: Weights) -> Arrivals:
    """Return the present arrivals: the work of the long window, unless a shorter window contradicts it.

    A shorter window that contradicts gives the nearest work per second that its deviation allows, and its prompts. Still shorter windows
    are compared with the part of that window which came before them (`_before`): 15 s after a step, half of the window of 30 s is new
    load, beside which the last 15 s would look usual.

    The work of n requests has a relative deviation of sqrt((d + p^2 v) / n): d is the dispersion of arrivals, v the relative variance of
    the prompts' lengths, p the prompts' share of the work. Answers add nothing, because each counts with the mean length. A measured d
    above 1 is inexact, so the second term is then at least d - 1, up to 1. Real answers do vary: the error of the result is
    sqrt((d + 1) / n).
    """
    base = history.sums(now, HISTORY_S)
    if base.requests > LONG_REQUESTS:
        base = history.sums(now, max(LONG_MIN_S, HISTORY_S * LONG_REQUESTS / base.requests))
    work = weights.of(base) / base.interval_s if base.interval_s else 0.0
    lag_s, mix, dispersion, spread = base.interval_s / 2, base, history.dispersion(), history.prompts_spread()
    contradicting: Sums | None = None
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
        usual = work if contradicting is None else _before(part, contradicting, weights, work)
        came, expected = (max(0.0, weight / mean) if mean else 0.0 for weight in (weights.of(part), usual * part.interval_s))
        if _deviations(came, expected) > CONFIDENCE * math.sqrt(variance):
            low, high = (weights.of(part) + side * BELIEVED * deviation for side in (-1, 1))
            work = min(max(work, low / part.interval_s), high / part.interval_s)
            lag_s, mix, contradicting = part.interval_s / 2, part if part.requests else mix, part
    per_request = weights.of(mix) / mix.requests if mix.requests else 0.0
    return Arrivals(
        requests_per_s=work / per_request if per_request else 0.0,
        prompt_tokens=mix.prompt_tokens / mix.requests if mix.requests else 0.0,
        lag_s=lag_s,
        is_even=lag_s == base.interval_s / 2,
        error=math.sqrt((dispersion + 1) / max(1.0, mix.requests)),
    )


def _deviations(came: float, expected: float) -> float:
    """Return by how many standard deviations of a Poisson variable, >= 0, the number of requests that came differs from the expected one.

    A count above its mean is tested by square roots, whose standard deviation is 1/2 at any mean: their tail is nearly that of the Poisson
    variable. The mean's standard deviation would let chance pass too often; that of the count that came would take a rise to four times the
    rate for chance twice as long. A count below a small mean has less of a tail than its root: the mean's standard deviation tests it.
    """
    if came > expected:
        return 2 * (math.sqrt(came) - math.sqrt(expected))
    return (expected - came) / math.sqrt(max(expected, 1.0))


def _before(part: Sums, longer: Sums, weights: Weights, work: float) -> float:
    """Return the work per second of the ``longer`` window without its last ``part``; ``work`` if the two windows are the same."""
    earlier = longer - part
    # An observation that only the longer window left out as a peak could make the difference negative.
    return max(0.0, weights.of(earlier)) / earlier.interval_s if earlier.interval_s > 0 else work


def _without_peak(part: Sums, observations: Iterable[Sums], weights: Weights) -> Sums:
    """Return a window without the observation that holds more than `PEAK` of its work; the window itself without such an observation.

    An observation that lasted more than half of the window stays: it follows a pause in observing and is all that is known.
    """
    peak = max(observations, key=weights.of)
    if weights.of(peak) <= PEAK * weights.of(part) or peak.interval_s > part.interval_s / 2:
        return part
    return part - peak


def growth(history: History, now: float, ahead_s: float) -> float:
    """Return by how many requests per second the rate grows each second, >= 0, if it grew steadily over the last spans.

    The spans look back as far as the caller wants to look ahead, ``ahead_s``: over spans of 30 s, chance makes one step of a small load in
    fifteen seem steady, and over 300 s that would be twice the replicas. ``ahead_s`` is at most `HISTORY_S`, the whole known history.
    """
    span_s = max(GROWTH_MIN_S, ahead_s / GROWTH_SPANS)
    spans = [history.sums(now - i * span_s, span_s) for i in range(GROWTH_SPANS)]
    if spans[-1].interval_s < span_s / 2:
        return 0.0
    rates = [span.rate() for span in spans]
    steps = [later - earlier for later, earlier in pairwise(rates)]
    if min(steps) < STEADY * sum(steps) / len(steps):
        return 0.0
    # + 1 is slack: false growth would order replicas for a whole cold start.
    deviation = math.sqrt(2 * (history.dispersion() + 1) * rates[0] / span_s)
    if sum(steps) < CONFIDENCE * deviation:
        return 0.0
    return (sum(steps) - GROWTH_NOISE * deviation) / (span_s * len(steps))
