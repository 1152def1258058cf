"""These policies are the autoscaler's rivals: request counts, KEDA, a planner, an oracle. Pure; callers apply the replica bounds.

Each policy is written from the documents of its system and gets the same observations as the autoscaler.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from serve_app.autoscaling.capacity import Capacity, Mix, Slo, StepTimes
from serve_app.autoscaling.decision import Observation, ScalingRules
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.memory import Memory, pack, unpack
from serve_app.autoscaling.signals import INCREMENTS, REPLICA_INCREMENTS, ModelLoad
from serve_app.autoscaling.simulation.simulated_replica import Hardware

MODEL = "model"


class Ours:
    """The product's autoscaler, called as its policy calls it."""

    def __init__(self, rules: ScalingRules) -> None:
        self._scaler = FleetScaler(FleetRules(models={MODEL: rules}))

    def __call__(self, at: float, seen: Observation) -> int:
        return self._scaler.observe(FleetObservation(at=at, models={MODEL: seen}))[MODEL].desired


class Restarted(Ours):
    """The product's autoscaler with a controller that is away for some seconds, while the targets stay and the members' counters continue.

    Args:
        rules: See `Ours`.
        away: Begin and end of the absence, in seconds.
        keeps: Whether the new controller gets the memory of the old one; else it starts without memory.
    """

    def __init__(self, rules: ScalingRules, away: tuple[float, float], *, keeps: bool) -> None:
        super().__init__(rules)
        self._rules, self._away, self._keeps = rules, away, keeps
        self._missed: list[ModelLoad] = []

    def __call__(self, at: float, seen: Observation) -> int:
        if self._away[0] <= at < self._away[1]:
            self._missed.append(seen.load)
            return seen.target
        if self._missed:
            self._scaler = self._new(at)
            loads, self._missed = [*self._missed, seen.load], []
            # Without the old controller's counts of each member, a new controller sees increments only after its first look.
            names = ("interval_s", *INCREMENTS, *REPLICA_INCREMENTS) if self._keeps else ()
            seen = replace(seen, load=replace(seen.load, **{n: sum(getattr(load, n) for load in loads) for n in names}))
        return super().__call__(at, seen)

    def _new(self, at: float) -> FleetScaler:
        if not self._keeps:
            return FleetScaler(FleetRules(models={MODEL: self._rules}))
        began = self._away[0]
        data = pack(Memory(self._scaler, began, models={MODEL: ""}), time=began)
        memory = unpack(data or b"", time=at, models={MODEL: ""}, clock_s=at)
        assert memory is not None
        return memory.scaler


class Silent(Ours):
    """The product's autoscaler with replicas that stop reporting but still serve: their last reported load stays in use.

    The simulation adds up all replicas, so each silent replica is assumed to have the average load, which routing aims at.

    Args:
        rules: See `Ours`.
        share: Share, 0..1, of the replicas serving at ``since_s`` that are silent from then on. They stay when other replicas leave.
        since_s: Time in seconds.
    """

    def __init__(self, rules: ScalingRules, share: float, since_s: float = 60.0) -> None:
        super().__init__(rules)
        self._share, self._since_s = share, since_s
        self._num_silent = 0
        self._last: dict[str, float] = {}
        """The last report of one replica: running and waiting requests, and its KV cache."""

    def __call__(self, at: float, seen: Observation) -> int:
        running = max(1, seen.running)
        if at >= self._since_s and not self._last:
            self._num_silent = math.ceil(self._share * running)
            self._last = {name: getattr(seen.load, name) / running for name in ("running", "queued")}
            self._last["kv_usage"] = seen.load.kv_usage
        if not self._last:
            return super().__call__(at, seen)
        silent = min(1.0, self._num_silent / running)
        told = {name: (1 - silent) * getattr(seen.load, name) for name in (*REPLICA_INCREMENTS, *self._last)}
        for name in ("running", "queued"):
            told[name] += self._num_silent * self._last[name]
        told["kv_usage"] += silent * self._last["kv_usage"]
        names = tuple(f"r{i}" for i in range(self._num_silent))
        load = replace(seen.load, silent=names, silent_replica_share=silent, **told)
        return super().__call__(at, replace(seen, load=load))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCount:
    """Ray Serve's policy: unfinished requests over the target per replica, averaged, and held back by a delay.

    Source: Ray 2.60's ``autoscaling_policy.py``; defaults of its ``AutoscalingConfig`` except for the target. Serve counts only
    requests that go through its handles; here the policy is given all unfinished requests.
    """

    target: float = 2.0
    look_back_s: float = 30.0
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0
    report_s: float = 10.0
    _counts: deque[tuple[float, float]] = field(default_factory=deque)
    _since: dict[bool, float] = field(default_factory=dict)
    """By direction (True is up), the time since which a change in that direction has been wanted."""

    def __call__(self, at: float, seen: Observation) -> int:
        load = seen.load
        self._counts.append((at, load.waiting + load.queued + load.running))
        while self._counts[0][0] <= at - self.look_back_s:
            self._counts.popleft()
        reported = [count for t, count in self._counts if t <= at // self.report_s * self.report_s]
        if not reported:
            return seen.target
        wanted = bounded(math.ceil(sum(reported) / len(reported) / self.target), seen)
        for upward in (True, False):
            if wanted == seen.target or (wanted > seen.target) != upward:
                self._since.pop(upward, None)
        if wanted == seen.target:
            return seen.target
        upward = wanted > seen.target
        delay_s = self.up_delay_s if upward else self.down_delay_s
        if at - self._since.setdefault(upward, at) < delay_s:
            return seen.target
        del self._since[upward]
        return wanted


def request_count(target: float, down_s: float) -> RequestCount:
    """Return Ray Serve's policy as its users tune it: up at once, by the last ten seconds; down after ``down_s``."""
    return RequestCount(target=target, look_back_s=10.0, up_delay_s=0.0, down_delay_s=down_s, report_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keda:
    """A HorizontalPodAutoscaler fed by KEDA with ``vllm:num_requests_waiting``, target 5 per replica.

    Source: KEDA's and Kubernetes' documents: metric polled each 30 s, synced each 15 s, tolerance 10 %, up at once but at most
    twofold or by four per 15 s, down to the highest wish of 300 s. Requests waiting in the ingress count too, as in vLLM's queue.
    """

    target: float = 5.0
    poll_s: float = 30.0
    sync_s: float = 15.0
    stabilization_s: float = 300.0
    _polled: list[float] = field(default_factory=lambda: [-math.inf, 0.0])
    _synced: list[float] = field(default_factory=lambda: [-math.inf])
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)

    def __call__(self, at: float, seen: Observation) -> int:
        if at - self._polled[0] >= self.poll_s:
            self._polled[:] = [at, seen.load.waiting + seen.load.queued]
        if at - self._synced[0] < self.sync_s:
            return seen.target
        self._synced[0] = at
        ratio = self._polled[1] / self.target / max(1, seen.target)
        wish = seen.target if abs(ratio - 1) <= 0.1 else math.ceil(seen.target * ratio)
        self._wishes.append((at, wish))
        while self._wishes[0][0] < at - self.stabilization_s:
            self._wishes.popleft()
        if wish > seen.target:
            return bounded(min(wish, max(2 * seen.target, seen.target + 4)), seen)
        return bounded(max(w for _, w in self._wishes), seen) if wish < seen.target else seen.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A planner like Dynamo's: in each interval it forecasts requests and lengths of the next, and divides by a profile.

    Source: Dynamo's documents of its SLA planner: every 180 s; forecast by a trend (here the last two intervals'); the throughput of a
    replica within the SLO from a profile made before (here `Capacity` of the timed batches, of one replica). Replicas prefill and decode.
    """

    hardware: Hardware
    slo: Slo
    interval_s: float = 180.0
    _sums: dict[str, float] = field(default_factory=dict)
    """Counters of the current interval; its begin is ``began``."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    """Requests per second in the last intervals."""
    _mixes: deque[Mix] = field(default_factory=lambda: deque(maxlen=1))
    """Lengths of the last interval that had any."""

    def __call__(self, at: float, seen: Observation) -> int:
        sums, load = self._sums, seen.load
        began = sums.setdefault("began", at)
        for name in ("requests", "prompt_tokens", "finished", "finished_tokens"):
            sums[name] = sums.get(name, 0.0) + getattr(load, name)
        if at - began < self.interval_s:
            return seen.target
        self._rates.append(sums["requests"] / (at - began))
        if sums["requests"] and sums["finished"]:
            lengths = sums["prompt_tokens"] / sums["requests"], sums["finished_tokens"] / sums["finished"]
            self._mixes.append(Mix(prompt_tokens=lengths[0], output_tokens=lengths[1]))
        sums.clear()
        if not self._mixes:
            return seen.target
        forecast = max(0.0, 2 * self._rates[-1] - self._rates[0])
        return bounded(math.ceil(forecast / self._per_replica(self._mixes[0])), seen)

    def _per_replica(self, mix: Mix) -> float:
        """Return the requests per second of ``mix`` that a replica serves by its profile."""
        measured, hardware = self.hardware.measured(), self.hardware
        assert measured is not None
        times = StepTimes(measured.step_s, measured.output_token_s, measured.prompt_token_s)
        held = hardware.kv_tokens / (mix.prompt_tokens + mix.output_tokens)
        capacity = Capacity(times=times, mix=mix, max_batch=min(held, hardware.max_num_seqs), slo=self.slo)
        return capacity.utilization(1) / capacity.work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """An oracle that knows the future rate and a replica's capacity: it orders a cold start ahead, and removes replicas at once."""

    rate_at: Callable[[float], float]
    rate_per_replica: float
    cold_start_s: float

    def __call__(self, at: float, seen: Observation) -> int:
        ahead = max(self.rate_at(at + s) for s in (0.0, self.cold_start_s / 2, self.cold_start_s, self.cold_start_s + 5))
        return bounded(math.ceil(ahead / self.rate_per_replica - 1e-9), seen)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A policy that keeps the current number of replicas."""

    def __call__(self, at: float, seen: Observation) -> int:
        return seen.target


def bounded(wanted: int, seen: Observation) -> int:
    return max(seen.minimum, min(seen.maximum, wanted))
