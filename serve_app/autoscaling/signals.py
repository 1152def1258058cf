"""`Meter` turns the counters that ingresses and replicas report into the load of one interval, `ModelLoad`. Pure.

Members count from their own start and report the counts, so that the next report makes up for a lost one. A member that starts again
counts from zero under a new id. `Meter` returns the increments since it was last read.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields

from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.tally import Tally

STALE_S = 6.0
"""A member without a report for this long counts as silent: three reports, one every second or two, may be late."""
LATE_S = 3.0
"""A member without a report for this long is counted at its last rate."""
RATE_S = 10.0
"""Each member's rates are smoothed over this time."""
MIN_EVENTS = 0.5
"""A smoothed rate worth fewer events than this per `RATE_S` counts as zero: it is only the tail of a load that has stopped."""


MANY_ASSUMED = 0.1
"""If more than this share of a model's tokens is assumed, for silent ingresses, nothing is learnt from its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """One model in one interval: increments, summed over all members, and the state at its end."""

    interval_s: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    rejected: float = 0.0
    prefilled_tokens: float = 0.0
    cached_tokens: float = 0.0
    long_prompts: float = 0.0
    long_prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    finished_tokens: float = 0.0
    finished_tokens_squared: float = 0.0
    first_tokens: float = 0.0
    late_first_tokens: float = 0.0
    lines: float = 0.0
    line_prompt_tokens: float = 0.0
    line_output_tokens: float = 0.0
    lines_finished: float = 0.0
    line_finished_tokens: float = 0.0
    steps: float = 0.0
    """Engine steps of all replicas that are not silent."""
    busy_s: float = 0.0
    """Seconds that these replicas spent in them; about num_replicas x interval_s at most."""
    waiting: float = 0.0
    """Requests without a replica at the ingresses."""
    queued: float = 0.0
    """Requests in the engines' waiting queues, without lines of batches: lines wait for places that no other request needs."""
    running: float = 0.0
    """Requests in the engines' running batches."""
    lines_held: float = 0.0
    """Lines of batches that replicas have."""
    lines_queued: float = 0.0
    """Those of ``lines_held`` that wait in the engines' queues."""
    over_quota: float = 0.0
    """HTTP requests that quotas of their tenants refused, without lines of batches. They are no demand: only
    `serve-app autoscale explain` reads this."""
    over_quota_unread: float = 0.0
    """The same for all models together: requests that were refused before their body, and so their model, was read."""
    lines_per_s: float = 0.0
    """Lines that must be answered each second so that each open batch ends within its window."""
    kv_usage: float = 0.0
    """Used share of the KV cache, the mean over the replicas that have reported, 0..1."""
    reporting: int = 0
    """How many replicas have reported, fewer than serve while some have just begun to; 0 if they were not counted."""
    max_num_seqs: float | None = None
    """The most requests that one replica runs at once; None if no replica has reported it."""
    cold_start_s: tuple[float, ...] = ()
    """The start of each present replica, from Serve's order to its first readiness."""
    measured: MeasuredCosts | None = None
    """The start measurements of the present replicas; None if none of them has reported any."""
    silent: tuple[str, ...] = ()
    """Ingresses, and replicas of this model, that should report and do not. Requests and tokens of a silent ingress are taken to continue
    at their last rates; running and waiting requests of a silent replica are taken from its last report."""
    silent_ingress_share: float = 0.0
    """Share of all ingresses that are silent, 0..1."""
    assumed_share: float = 0.0
    """Share of the model's output tokens that is assumed, for silent ingresses, 0..1."""
    silent_replica_share: float = 0.0
    """Share of the model's replicas that are silent, 0..1. ``steps`` and ``busy_s`` are those of the others."""
    is_partial: bool = False
    """Whether a replica or an ingress drains: it still works on requests, but its steps or tokens are not reported."""

    @property
    def fits_together(self) -> bool:
        """Whether steps and tokens belong to the same work: no member drains, and few of the tokens are assumed."""
        return not self.is_partial and self.assumed_share <= MANY_ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Asleep:
    """The engine of a model's only replica sleeps."""

    wake_s: float
    """How long its last wake-up took, or its falling asleep before the first."""
    host_bytes: float
    """Host memory that its weights take."""


INCREMENTS = tuple(f.name for f in fields(Tally))
REPLICA_INCREMENTS = ("steps", "busy_s")


@dataclass(slots=True)
class _Member:
    """The counters of one member."""

    stamp: float
    """Time stamp of its newest report, by its own clock."""
    heard_at: float
    """When the newest report was first seen here: clocks of hosts may differ, and be set."""
    counters: dict[str, float]
    rates: dict[str, float] = field(default_factory=dict)
    """Increments per second, over the last `RATE_S`."""
    assumed: dict[str, float] = field(default_factory=dict)
    """Increments that were returned without a report, and that no report has confirmed yet."""

    def hear(self, stamp: float, counters: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the increments of a new report, minus those that were assumed before."""
        elapsed_s = max(now - self.heard_at, 1e-9)
        forget = math.exp(-elapsed_s / RATE_S)
        increments = {}
        for name, value in counters.items():
            # A counter falls when a process has started again under the old name.
            new = max(0.0, value - self.counters.get(name, 0.0))
            rate, assumed = self.rates.get(name, new / elapsed_s), self.assumed.get(name, 0.0)
            self.rates[name] = forget * rate + (1 - forget) * new / elapsed_s
            increments[name] = max(0.0, new - assumed)
            self.assumed[name] = min(max(0.0, assumed - new), STALE_S * rate)  # after a long standstill most is written off
        self.counters |= counters
        self.stamp, self.heard_at = stamp, now
        return increments

    def assume(self, span_s: float) -> dict[str, float]:
        """Return the assumed increments of a span without a report, at the last rates."""
        increments = {name: rate * span_s for name, rate in self.rates.items() if rate * RATE_S > MIN_EVENTS}
        self.assumed = {name: self.assumed.get(name, 0.0) + value for name, value in increments.items()}
        return increments


@dataclass(slots=True)
class Meter:
    """Returns the increments of cumulative counters since they were last taken.

    A member that is seen for the first time adds nothing. A member whose report is late is taken to continue as before until its next
    report: neither a missing report nor its late arrival may look like a change of the load.
    """

    _members: dict[str, _Member] = field(default_factory=dict)
    _taken_at: float = 0.0

    def take(
        self, reports: Mapping[str, tuple[float, Mapping[str, float]]], *, now: float, assume_s: float = math.inf
    ) -> dict[str, float]:
        """Return the sum of the increments of each counter.

        Args:
            reports: Member -> time stamp of its report, in seconds of its own clock, and its counters. Members that are left out are
                gone, and are forgotten.
            now: Seconds of one clock, never less than before.
            assume_s: A member without a report is taken to continue as before for this long; after that it adds nothing. Its next report
                adds nothing either, because the work of many seconds would count in one.
        """
        total: dict[str, float] = {}
        for name, (stamp, counters) in reports.items():
            increments: Mapping[str, float] = {}
            if (member := self._members.get(name)) is None:
                self._members[name] = _Member(stamp, now, dict(counters))
            elif stamp != member.stamp:
                was_left_out = self._taken_at - member.heard_at > assume_s
                heard = member.hear(stamp, counters, now)
                increments = {} if was_left_out else heard
            elif LATE_S < now - member.heard_at <= assume_s:
                increments = member.assume(now - self._taken_at)
            for counter, value in increments.items():
                total[counter] = total.get(counter, 0.0) + value
        self._members = {name: member for name, member in self._members.items() if name in reports}
        self._taken_at = now
        return total

    def share_of(self, some: Collection[str], members: Collection[str], counter: str) -> float:
        """Return the share of a counter's increments that ``some`` of the ``members`` make, 0..1.

        A member that has never reported counts with an equal share.
        """
        rates = {name: self._members[name].rates.get(counter, 0.0) for name in members if name in self._members}
        total = sum(rates.values())
        known = sum(rates.get(name, 0.0) for name in some) / total if total else 0.0
        never = sum(name not in rates for name in some) / max(1, len(members))
        return never + (1 - never) * known

    def silent(self, members: Iterable[str], *, now: float) -> tuple[str, ...]:
        """Return those of ``members`` that have reported nothing, or nothing new for `STALE_S`, sorted."""
        heard_at = {name: member.heard_at for name, member in self._members.items()}
        return tuple(sorted(m for m in members if now - heard_at.get(m, -math.inf) > STALE_S))
