"""How many replicas a model should have, and why. Pure: observations in, decisions out, time is a number.

``serve_app/autoscaling/policy.py`` feeds it from Ray Serve, the simulator from its own world: the
same observations give the same decisions. The demand is work per second (`autoscaling/capacity.py`), so it is the number of
replicas that would be busy all the time; divided by the utilization that keeps the SLO it is the number that is needed.

    demand   the rate of work now
    growth   what it will be when a new replica serves, if it has grown steadily; counted from the middle of the time whose mean it is
    queue    what waits by then, done by replicas that do nothing else in `RECOVER_S`, or in another cold start

Up at once. Down when for as long as two cold starts nothing more was wanted, and never while a member is silent.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from serve_app.autoscaling.capacity import LEAST_BATCH, RETURN_BATCH, Capacity, Mix, Slo, StepCosts
from serve_app.autoscaling.history import GUARD_S, HISTORY_S, History, Mean, Recent
from serve_app.autoscaling.signals import LEAST, STALE_S, Load
from serve_app.core.cold_starts import p90

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
RECOVER_S = 15.0
"""In which replicas that do nothing but work are to have emptied a queue."""
DEFAULT_COLD_START_S = 60.0
"""Until one was measured."""
MIN_KEEP_S, MAX_KEEP_S = 60.0, 900.0
DOWN_MARGIN = 0.95
"""A replica goes when the others would be at most at this share of the utilization aimed at."""
KV_GUARD = 0.95
MANY = 1e6
"""Requests at once, where nothing is known of a limit."""
MISMEASURED = ("kv cache full", "late first tokens")
"""Guards that say that replicas can do less than was measured."""
LATE_GUARD = 0.1
"""Share of first tokens later than the SLO at which one more replica is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the configuration says of one model; times in seconds."""

    slo: Slo
    utilization: float = 0.95
    """Factor on the utilization that keeps the SLO, 0 < x <= 1: headroom for what the model of a replica leaves out."""
    priority: int = 0
    gpus_per_replica: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One model at one moment."""

    running: int
    """Replicas that serve. Those that start are not among them: they are no capacity yet."""
    target: int
    """Replicas that were asked for last."""
    minimum: int
    maximum: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided, and what it was decided from besides the observation."""

    desired: int
    rule: str
    """Name of the rule that decided: the other rules' wishes are in ``alternatives``."""
    alternatives: Mapping[str, int]
    """Rule -> replicas it asked for, bounds not yet applied."""
    inputs: Mapping[str, float]
    """Quantities that went in. ``demand`` and ``growth`` are in replicas that are busy all the time."""
    limit: str = ""
    """What limits a model's replica: itl, ttft, batch, or unmeasured."""
    held: int = 0
    """The most that was wanted within the time for which replicas are kept, and of what it has what `MISMEASURED` guards asked for: what a
    model asks for where GPUs are short."""
    ready_at: float | None = None
    """When replicas that this decision asks for should serve; None when it asks for none."""


@dataclass(slots=True)
class ModelAutoscaler:
    """Decides for one model. ``observe`` is its one door, called about every second. All it remembers is in its fields."""

    rule: Rule
    _history: History = field(default_factory=History)
    _costs: StepCosts = field(default_factory=StepCosts)
    _output_tokens: Mean = field(default_factory=Mean)
    _kv_per_request: Mean = field(default_factory=Mean)
    _recent: Recent = field(default_factory=Recent)
    _observed_s: float = 0.0
    """The time over which wishes are kept: while nothing is observed it stands still."""
    _guard_since: dict[str, float] = field(default_factory=dict)
    _missing: Recent = field(default_factory=Recent)
    """Replicas beyond the demand's that `MISMEASURED` guards asked for."""
    _mix: Mix = field(default_factory=Mix)
    _left_out: frozenset[str] = frozenset()
    """Limits of the SLO that no number of replicas keeps."""
    _ordered_at: float | None = None
    _cold_start_s: float = DEFAULT_COLD_START_S

    @property
    def cold_start_s(self) -> float:
        """What a start took when one was measured last, else `DEFAULT_COLD_START_S`."""
        return self._cold_start_s

    def observe(self, seen: Observation, *, at: float) -> Decision:
        """Take in one observation and decide. ``at``: seconds, never less than before."""
        self._learn(seen, at)
        self._cold_start_s = cold_start_s = p90(seen.load.cold_start_s) or self._cold_start_s
        keep_s = min(MAX_KEEP_S, max(MIN_KEEP_S, 2 * cold_start_s))
        inputs: dict[str, float] = {"cold_start_s": cold_start_s, "keep_s": keep_s}
        wishes, limit = self._wishes(seen, at, inputs)
        rule = max(wishes, key=wishes.__getitem__, default="idle")
        up = wishes.get(rule, 0)
        self._observed_s += min(seen.load.interval_s, STALE_S)
        # The minimum too: one that a schedule lowers lets go as late as any other wish.
        low = max(up, int(inputs.get("low", 0)), seen.minimum)
        kept = max(
            min(seen.target, self._corrected(wishes, seen.target)),
            self._recent.add(self._observed_s, low, keep_s, first=seen.target),
        )
        desired = up
        if up <= seen.target:
            desired, rule = (kept, "low for long") if kept < seen.target else (seen.target, "keep")
            if seen.load.silent and desired < seen.target:
                desired, rule = seen.target, "silent members"
        maximum = max(seen.maximum, seen.target) if seen.load.silent else seen.maximum  # one that a schedule lowers waits
        bounded = max(seen.minimum, min(maximum, desired))
        if bounded > seen.target:
            self._ordered_at = at
        if bounded != desired:
            rule = "minimum" if bounded > desired else "maximum"
        return Decision(
            desired=bounded,
            rule=rule,
            alternatives=wishes,
            inputs=inputs,
            limit=limit,
            held=max(seen.minimum, min(maximum, kept)),
            ready_at=at + cold_start_s if bounded > max(seen.target, seen.running) else None,
        )

    def _corrected(self, wishes: Mapping[str, int], target: int) -> int:
        """Return the demand's replicas and those that it was short of: what the measure misses, it misses again when they go."""
        demand = wishes.get("demand", 0)
        missing = self._missing.add(self._observed_s, 0, MAX_KEEP_S, first=0)
        asked = max((wishes.get(name, 0) for name in MISMEASURED), default=0)
        if asked > demand and target <= demand + missing:  # else they are late for another reason
            missing = self._missing.add(self._observed_s, asked - demand, MAX_KEEP_S, first=0)
        return demand + min(missing, demand)  # as far as the guards themselves go

    def _learn(self, seen: Observation, at: float) -> None:
        load = seen.load
        self._history.add(at, load)
        if not (load.silent or load.is_partial):  # else tokens are missing beside the steps that made them, or steps
            self._costs.add(
                load.interval_s,
                steps=load.steps,
                busy_s=load.busy_s,
                output_tokens=load.output_tokens,
                prefilled_tokens=load.prefilled_tokens,
            )
        self._output_tokens.add(load.finished_tokens, load.finished)
        if load.running and seen.running:
            self._kv_per_request.add(load.kv_usage * seen.running, load.running)

    def _wishes(self, seen: Observation, at: float, inputs: dict[str, float]) -> tuple[dict[str, int], str]:
        """Return rule -> replicas it asks for, and what limits a replica. Adds to ``inputs``."""
        load = seen.load
        wishes: dict[str, int] = {}
        limit = "unmeasured"
        rate, prompt_tokens, lag_s = self._rate(at)
        holds = load.waiting or load.queued or load.running
        if holds or self._history.sums(at, WINDOWS_S[-1]).requests:
            wishes["first"] = 1
        else:
            rate = 0.0  # quiet: what came minutes ago is no demand
        inputs["requests_per_s"] = rate
        if (capacity := self._capacity(prompt_tokens, load.max_num_seqs)) is not None:
            batch, limit = capacity.batch_limit()
            work_s = capacity.work_s
            inputs |= asdict(capacity.times) | asdict(capacity.mix) | {"batch_limit": batch, "work_per_request_s": work_s}
            inputs["demand"] = demand = rate * work_s
            inputs["growth"] = growth = self._growth(at) * (inputs["cold_start_s"] + lag_s) * work_s
            inputs["queue_s"] = queue_s = self._queue_s(seen, at, capacity, demand)
            inputs["itl_batch"] = capacity.slo_batches()["itl"]
            inputs["saturation"] = capacity.saturation()
            factor = self.rule.utilization
            wishes["demand"] = capacity.replicas_for(demand, factor)
            inputs["utilization"] = capacity.utilization(max(1, wishes["demand"])) * factor
            inputs["low"] = capacity.replicas_for(demand, factor * DOWN_MARGIN)
            wishes["growth"] = capacity.replicas_for(demand + growth, factor) if growth else 0
            recover_s = max(RECOVER_S, self._cold_start_s)
            wishes["queue"] = math.ceil((demand + queue_s / recover_s) / capacity.saturation()) if queue_s else 0
        elif holds:
            wishes["unmeasured"] = seen.target
        most = 2 * wishes["demand"] if capacity is not None else math.inf  # where it does not help, it must not go on for ever
        for name, is_on in self._guards(seen, at, capacity).items():
            if self._held_for(name, is_on, at) and seen.running >= seen.target:  # else help is on its way
                wishes[name] = int(min(seen.target + 1, max(2, most)))
        return {name: wish for name, wish in wishes.items() if wish}, limit

    def _capacity(self, prompt_tokens: float, max_num_seqs: float | None) -> Capacity | None:
        times = self._costs.times()
        if times is None or self._output_tokens.value is None:
            return None
        if prompt_tokens:
            self._mix = Mix(prompt_tokens=prompt_tokens, output_tokens=self._output_tokens.value)
        kv = self._kv_per_request.value
        held = KV_GUARD / kv if kv else MANY
        capacity = Capacity(times=times, mix=self._mix, max_batch=min(held, max_num_seqs or MANY), slo=self.rule.slo)
        # At the edge the last digits of a fit must not decide between one replica and thirty.
        batches = capacity.slo_batches().items()
        self._left_out = frozenset(n for n, batch in batches if batch < (RETURN_BATCH if n in self._left_out else LEAST_BATCH))
        return replace(capacity, left_out=self._left_out)

    def _rate(self, now: float) -> tuple[float, float, float]:
        """Return requests per second, the mean prompt of the long window, and for how many seconds ago that rate is the mean.

        The long window's rate, unless a shorter one contradicts it: then the nearest rate that the shorter one allows. The
        relative deviation of n requests' work is sqrt((d + 1) / n), for arrivals of dispersion d and exponential work.
        """
        long = self._history.sums(now, HISTORY_S)
        if long.requests > LONG_REQUESTS:
            long = self._history.sums(now, max(LONG_MIN_S, HISTORY_S * LONG_REQUESTS / long.requests))
        rate, lag_s = long.rate(), long.interval_s / 2
        for window_s in sorted(WINDOWS_S, reverse=True):
            part = self._history.sums(now, window_s)
            if part.interval_s:
                slack = CONFIDENCE * math.sqrt((self._history.dispersion() + 1) * max(part.requests, 1.0))
                low, high = max(0.0, part.requests - slack) / part.interval_s, (part.requests + slack) / part.interval_s
                if not low <= rate <= high:
                    rate, lag_s = min(max(rate, low), high), window_s / 2
        return rate, long.prompt_tokens / long.requests if long.requests else 0.0, lag_s

    def _queue_s(self, seen: Observation, now: float, capacity: Capacity, demand: float) -> float:
        """Return the seconds of work that will wait when replicas that start, or would be asked for now, serve."""
        starting = seen.running < seen.target
        cold_start_s = self._cold_start_s
        left_s = 0.0 if self._ordered_at is None else max(0.0, self._ordered_at + cold_start_s - now)
        until_s = min(cold_start_s, left_s) if starting else cold_start_s
        missing = max(0.0, demand - seen.running * capacity.saturation()) if seen.running else demand
        return self._history.least_queue() * capacity.work_s + missing * until_s

    def _growth(self, now: float) -> float:
        """Return by how many requests per second the rate grows each second, >= 0, if it grew steadily over the last spans."""
        spans = [self._history.sums(now - i * GROWTH_S, GROWTH_S) for i in range(GROWTH_SPANS)]
        if spans[-1].interval_s < GROWTH_S / 2:
            return 0.0
        rates = [span.rate() for span in spans]
        steps = [later - earlier for later, earlier in pairwise(rates)]
        if min(steps) < STEADY * sum(steps) / len(steps):
            return 0.0
        noise = GROWTH_NOISE * math.sqrt(2 * (self._history.dispersion() + 1) * rates[0] / GROWTH_S)
        return max(0.0, sum(steps) - noise) / (GROWTH_S * len(steps))

    def _guards(self, seen: Observation, now: float, capacity: Capacity | None) -> dict[str, bool]:
        recent = self._history.sums(now, WINDOWS_S[0])
        late = recent.late_first_tokens > max(1.0, LATE_GUARD * recent.first_tokens)
        return {
            # With a queue both are its doing, and that has its own rule.
            "kv cache full": seen.load.kv_usage > KV_GUARD and not recent.queued,
            "late first tokens": late and not recent.queued and (capacity is None or capacity.can_keep_ttft()),
            "rejected": recent.rejected >= LEAST,
            "queue without measure": seen.load.queued > 0 and capacity is None,
        }

    def _held_for(self, guard: str, holds: bool, at: float) -> bool:
        if not holds:
            self._guard_since.pop(guard, None)
            return False
        return at - self._guard_since.setdefault(guard, at) >= GUARD_S
