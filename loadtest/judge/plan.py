"""The plan predicts what a scenario will cost and what it can show, before anything is sent. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from loadtest.judge.analysis import limit_result
from loadtest.judge.series import InMemory
from loadtest.judge.stats import CONFIDENCE, QUANTILES
from loadtest.plan.laws import Burst, Closed, Trace
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import Schedule
from loadtest.plan.slo import Limit
from loadtest.records import ScheduledRequest
from loadtest.wording import percentile

WORKER_RATE = 80.0
"""Planned requests per second of one worker process on one core, with 128 streamed tokens each."""
WORKER_TOKENS = WORKER_RATE * 128
WORKER_STREAMS = 200
"""Planned open streams of one worker process in a closed loop, whose rate is unknown, at 50 tokens per second each."""
_PEAK_S = 10.0


@dataclass(frozen=True)
class Interval:
    """Whether a sample of independent values bounds a percentile on both sides."""

    quantile: float
    num_needed: int
    minutes: float | None
    """Time until the needed number of requests has been due, warm-up included; None in a closed loop and a burst."""
    possible: bool


@dataclass(frozen=True)
class Plan:
    """The plan. Rates are in requests per second, and None in a closed loop and a burst, where the target sets them."""

    num_requests: int
    num_samples: int
    """Requests due after the warm-up (all of them in a burst and, at best, in a closed loop)."""
    duration_s: float
    """Time until the last possible arrival."""
    longest_s: float
    """Time until the latest end of the drain."""
    mean_rate: float | None
    peak_rate: float | None
    """Rate of the busiest ten seconds (in shorter runs, of the whole run)."""
    input_tokens: int
    output_tokens: int
    workers_needed: int
    workers: int
    """Number of workers in the scenario."""
    intervals: tuple[Interval, ...]
    undecidable: tuple[str, ...]
    """Limits of the SLO that cannot pass because the sample is too small, even if every request is inside. Limits of itl, which counts
    gaps, are never among them."""
    num_left_out: int
    num_after_end: int
    has_conversations: bool
    sha256: str

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        rate = (
            f"{self.mean_rate:.4g}/s, {self.peak_rate:.4g}/s in the busiest {_PEAK_S:g} s"
            if self.mean_rate
            else "set by the target"
        )
        few = (
            ""
            if self.workers >= self.workers_needed
            else f"; the scenario has {self.workers}: set workers: {self.workers_needed}"
        )
        history = " without what each turn repeats of its conversation" if self.has_conversations else ""
        most = "at most " if self.has_conversations else ""  # a slow target gets fewer of the later turns
        rows = [
            f"requests    {most}{self.num_requests:,} ({self.num_samples:,} after the warm-up), rate {rate}",
            f"tokens      {self.input_tokens:,} of prompts{history}, {self.output_tokens:,} of answers",
            f"time        {_lasting(self.duration_s)} of arrivals, at most {_lasting(self.longest_s)} with the last answers",
            f"workers     {self.workers_needed} needed{few}",
        ]
        if self.num_left_out or self.num_after_end:
            rows.append(
                f"trace       {self.num_left_out:,} requests without tokens left out, {self.num_after_end:,} come after duration_s"
            )
        rows += [_line_of(interval) for interval in self.intervals]
        if self.undecidable:
            more = "a longer duration_s" if self.mean_rate else "more max_requests"
            rows.append(f"SLO         cannot be shown to be kept (exit status 5): {', '.join(self.undecidable)}; set {more}")
        return [*rows, f"schedule    sha256 {self.sha256}"]


def _lasting(seconds: float) -> str:
    """Return a duration in a readable unit: 110 s, 4.5 minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.3g} minutes"


def _line_of(interval: Interval) -> str:
    lasts = "" if interval.minutes is None else f", {_lasting(interval.minutes * 60)}"
    verdict = "has an interval" if interval.possible else "NO interval: the sample is too small"
    return f"{percentile(interval.quantile):<11} {verdict} (needs {interval.num_needed:,} independent samples{lasts})"


def make_plan(scenario: Scenario, schedule: Schedule) -> Plan:
    """Return the totals of the schedule, and the percentiles that it can give with a two-sided 95 % interval."""
    timed = not isinstance(scenario.arrival, Burst | Closed)
    due_s = _due_s(schedule.requests)
    # Of a conversation's turns, those that may be sent before the end of the run.
    requests = [r for r, at_s in zip(schedule.requests, due_s, strict=True) if r.after is None or at_s < scenario.duration_s]
    due_s = _due_s(requests)
    num_samples = sum(not timed or at_s >= scenario.warmup_s for at_s in due_s)
    span_s = scenario.duration_s
    if isinstance(scenario.arrival, Trace):  # a trace may end long before duration_s
        span_s = max(due_s, default=0.0) or span_s
    window_s = span_s - scenario.warmup_s
    sample_rate = num_samples / window_s if timed and window_s > 0 else None
    peak_rate, peak_tokens = _peaks(requests, due_s, min(_PEAK_S, scenario.duration_s) if timed else _PEAK_S)
    return Plan(
        num_requests=len(requests),
        num_samples=num_samples,
        duration_s=scenario.duration_s,
        longest_s=scenario.duration_s + scenario.drain_s,
        mean_rate=len(requests) / span_s if timed else None,
        peak_rate=peak_rate if timed else None,
        input_tokens=sum(r.input_tokens for r in requests),
        output_tokens=sum(r.output_tokens for r in requests),
        workers_needed=_workers(scenario, peak_rate, peak_tokens),
        workers=scenario.workers,
        intervals=tuple(_interval(q, num_samples, sample_rate, scenario.warmup_s) for q in _quantiles(scenario)),
        undecidable=tuple(
            str(limit) for limit in scenario.slo.limits if limit.metric != "itl" and not _can_pass(limit, num_samples)
        ),
        num_left_out=schedule.num_left_out,
        num_after_end=schedule.num_after_end,
        has_conversations=scenario.has_conversations,
        sha256=schedule.sha256,
    )


def samples_needed(quantile: float) -> int:
    """Return the smallest number of independent samples whose order statistics bound the quantile on both sides, 2.5 % error each.

    With n samples the largest lies below the quantile with probability binom(n, q).pmf(n) = q^n, the smallest above it with (1-q)^n.
    """
    rarer = max(quantile, 1 - quantile)
    num = math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(rarer))
    while binom.pmf(num, num, rarer) > (1 - CONFIDENCE) / 2:  # corrects the rounding of the logarithms
        num += 1
    return num


def _can_pass(limit: Limit, num_samples: int) -> bool:
    best = np.zeros(num_samples)
    return limit_result(limit, InMemory(best, best)).verdict == "pass"


def _quantiles(scenario: Scenario) -> list[float]:
    return sorted({*QUANTILES, *(limit.quantile for limit in scenario.slo.limits)})


def _interval(quantile: float, num_samples: int, sample_rate: float | None, warmup_s: float) -> Interval:
    needed = samples_needed(quantile)
    minutes = (warmup_s + needed / sample_rate) / 60 if sample_rate else None
    return Interval(quantile, needed, minutes, num_samples >= needed)


def _due_s(requests: Sequence[ScheduledRequest]) -> list[float]:
    """Return the due time of each request. For a later turn this is the earliest possible time: its pause after the turn before it."""
    due_s: dict[int, float] = {}
    for request in requests:
        due_s[request.id] = (request.due_s or 0.0) if request.after is None else due_s[request.after] + request.think_s
    return list(due_s.values())


def _peaks(requests: Sequence[ScheduledRequest], due_s: Sequence[float], span_s: float) -> tuple[float, float]:
    """Return the most requests, and the most output tokens, per second in any ``span_s`` that begins with a request."""
    order = np.argsort(due_s, kind="stable")
    due = np.array(due_s)[order]
    tokens = np.concatenate([[0], np.cumsum(np.array([r.output_tokens for r in requests])[order])])
    first, end = (
        np.arange(due.size),
        np.searchsorted(due, due + span_s - 1e-6),
    )  # so that a rounded sum does not include the next request
    return float((end - first).max() / span_s), float((tokens[end] - tokens[first]).max() / span_s)


def _workers(scenario: Scenario, peak_rate: float, peak_tokens: float) -> int:
    if isinstance(scenario.arrival, Closed):
        return math.ceil(scenario.arrival.concurrency / WORKER_STREAMS)
    return max(1, math.ceil(max(peak_rate / WORKER_RATE, peak_tokens / WORKER_TOKENS)))
