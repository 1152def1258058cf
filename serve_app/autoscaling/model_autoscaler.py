"""`ModelAutoscaler` decides how many replicas a model should have, and records why. Pure: observations in, decisions out, time is a number.

``serve_app/autoscaling/policy.py`` passes it what Ray Serve reports, the simulator what its own replicas do: the same observations give
the same decisions. Each wish is for a number of replicas (`ModelAutoscaler._wishes`), and the largest wins. Scaling up
happens at once; scaling down stops at the most that was needed in the last two cold starts (`needs.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from serve_app.autoscaling.capacity import LEAST_BATCH, RETURN_BATCH, Capacity, Mix, StepCosts
from serve_app.autoscaling.deadlines import Lines
from serve_app.autoscaling.decision import Decision, Observation, ScalingRules
from serve_app.autoscaling.demand import QUIET_S, WINDOWS_S, Arrivals, arrivals, growth, weights_of
from serve_app.autoscaling.feedback import MEMORY_S, Feedback
from serve_app.autoscaling.history import GUARD_S, HISTORY_S, History, Mean
from serve_app.autoscaling.needs import Needs, Unproven, keep_s, positive
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S, Orders, queue_at_s
from serve_app.autoscaling.pools import PoolMix, pool_inputs
from serve_app.autoscaling.signals import STALE_S, ModelLoad

RECOVER_S, RECOVER_STARTS = 15.0, 0.5
"""New replicas, busy all the time, must empty a queue within this many seconds of serving, or cold starts if that is longer."""
QUEUE_MOST, QUEUE_FEW = 1.2, 1.5
"""For a demand of n replicas the wish `queue` is at most 1.2 n + 1.5 sqrt(n) + 1: 7 for 3, 16 for 9, 1,330 for 1,067.
A queue ends, but the replicas asked for stay for two cold starts. A few more cost a small fleet little and empty its queue much sooner."""
CHANCE = 1.5
"""The number of replicas stays while the measured demand is within this many of its standard deviations of what they can carry."""
ROOM_CHANCE = 3.0
"""Room for a step is asked for as soon as the measured demand needs it. The room is given up once the demand plus this many standard
deviations no longer needs it. With `CHANCE` both ways, a fleet of one or two often lacked the room."""
LEAST_CHANCE, MOST_CHANCE = 0.05, 0.5
"""The error of a demand counts as a twentieth to a half, however many requests were seen. At least a twentieth, because step costs are
never exact: a large fleet that trusted its demand more would be too near its limit for a step of the load."""
KV_GUARD = 0.95
"""Share of the KV cache in use above which a replica counts as full."""
MANY = 1e6  # requests at once, if no limit is known
MISMEASURED = ("kv cache full", "late first tokens")
"""Guards that fire when replicas can do less than was measured."""
LATE_GUARD = 0.1
"""Share of first tokens later than the SLO at which one more replica is asked for."""
MIN_REJECTED = 0.5
"""Rejections in the shortest window from which the guard `rejected` fires: assumed increments are fractions."""
LENGTHS_S = 15.0
"""Until this long after the first answer has ended, the lengths of answers count as unknown: short answers end first."""
TAUGHT = ("taught_step", "taught_output_token", "taught_prompt_token")
"""Names among a decision's inputs: for each cost, the share that was learnt from the load since replicas measured it."""
UNSEEN_HALF_S = 3600.0
"""Knowledge weighs half as much after this long without a controller."""
LEARN_SILENT = 0.25
"""With at most this share of silent replicas, step costs are still learnt: the other replicas are taken to make their part of the tokens.
If the silent ones made none, a token would seem at most 1 / (1 - 0.25) = 1.33 times as expensive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wishes:
    """All wishes at one moment."""

    asked: Mapping[str, int]
    """Wish -> replicas."""
    inputs: Mapping[str, float]
    limit: str
    demand: int = 0
    """Replicas for the demand alone, without a margin."""
    low: int = 0
    """The smallest replica count that carries the upper bound of the demand plus headroom. Scaling down stops at this count."""


@dataclass(slots=True)
class ModelAutoscaler:
    """Decides for one model. ``observe`` is its one door, called about every second. Its fields are all that it remembers."""

    rules: ScalingRules = field(metadata={"alias": "rule"})  # the key of the log's snapshots
    _history: History = field(default_factory=History)
    _costs: StepCosts = field(default_factory=StepCosts)
    _output_tokens: Mean = field(default_factory=Mean)
    """Output tokens of an answer; see `_learn_lengths`."""
    _squared_tokens: Mean = field(default_factory=Mean)
    """The square of the output tokens of answers that ended."""
    _finished_tokens: Mean = field(default_factory=Mean)
    _computed_share: Mean = field(default_factory=Mean)
    """The share of a prompt's tokens that engines compute; the prefix cache has the others."""
    _kv_per_request: Mean = field(default_factory=Mean)
    _lines: Lines = field(default_factory=Lines)
    _pools: PoolMix = field(default_factory=PoolMix)
    _orders: Orders = field(default_factory=Orders)
    _needs: Needs = field(default_factory=Needs)
    _feedback: Feedback = field(default_factory=Feedback)
    _guard_since: dict[str, float] = field(default_factory=dict)
    _mix: Mix = field(default_factory=Mix)
    _left_out: frozenset[str] = frozenset()
    """Limits of the SLO that no number of replicas keeps."""
    _cold_start_s: float = DEFAULT_COLD_START_S
    _unproven: Unproven = field(default_factory=Unproven)
    _unseen_s: float | None = None
    """How old the knowledge was when this controller took it over from the one before; None if it did not take any over."""
    _answered_at: float | None = None
    """When an answer was first seen to end."""

    @property
    def unproven(self) -> int:
        """The replicas that silent members may need."""
        return self._unproven.replicas

    @property
    def cold_start_s(self) -> float:
        """The cold start that was measured last, else `DEFAULT_COLD_START_S`."""
        return self._cold_start_s

    @property
    def step_costs(self) -> StepCosts:
        """The fitted costs of the model's steps."""
        return self._costs

    def pass_unseen(self, span_s: float) -> None:
        """Take in that no controller saw the model for ``span_s`` seconds: knowledge of it weighs less the longer that was."""
        weight = 0.5 ** (span_s / UNSEEN_HALF_S)
        self._costs.weigh(weight)
        lengths = self._output_tokens, self._squared_tokens, self._finished_tokens
        for known in (*lengths, self._kv_per_request, self._computed_share, self._lines, self._pools):
            known.weigh(weight)
        if span_s > STALE_S:
            self._guard_since.clear()  # the signs may have ended meanwhile
        if span_s > MEMORY_S:
            self._feedback = Feedback()
        if span_s > HISTORY_S:
            self._history = History()
        self._unseen_s = span_s

    def observe(self, seen: Observation, *, at: float) -> Decision:
        """Take in one observation and decide. ``at``: seconds, never less than before."""
        self._learn(seen, at)
        wishes = self._wishes(seen, at)
        rests = not (seen.target or seen.load.waiting)
        if rests:
            # A request for a model without replicas waits for one. Without a waiting request, the load from before the last replica was
            # removed, as by `serve-app models unload`, must neither start another replica nor keep a GPU free for it.
            wishes = replace(wishes, asked={})
        wish = max(wishes.asked, key=wishes.asked.__getitem__, default="idle")
        up, kept = wishes.asked.get(wish, 0), self._kept(seen, wishes)
        kept = 0 if rests else kept
        silent, desired = self._unproven.replicas, up
        if up <= seen.target:
            desired, wish = (kept, "low for long") if kept < seen.target else (seen.target, "keep")
            if desired < silent:
                desired, wish = silent, "silent members"
        maximum = max(seen.maximum, silent)  # a maximum that a schedule lowers waits for silent members
        bounded = max(seen.minimum, min(maximum, desired))
        if bounded != desired:
            wish = "minimum" if bounded > desired else "maximum"
        return Decision(
            desired=bounded,
            wish=wish,
            alternatives=wishes.asked,
            inputs=wishes.inputs,
            limit=wishes.limit,
            kept=max(seen.minimum, min(maximum, kept)),
            ready_at=at + self._cold_start_s if bounded > max(seen.target, seen.running) else None,
        )

    def _kept(self, seen: Observation, wishes: _Wishes) -> int:
        """Return how many replicas stay: the most that were needed within the time for which needs are remembered."""
        asked = max((wishes.asked.get(name, 0) for name in MISMEASURED), default=0)
        wished = max(wishes.asked.values(), default=0)
        corrected = self._needs.corrected(wishes.demand, asked=asked, wished=wished, target=seen.target)
        # The minimum is a need, too: after a schedule lowers it, replicas go as late as for any other need. Replicas that are only kept
        # are no claim on further GPUs.
        needs = (*wishes.asked.values(), seen.minimum, min(seen.target, max(wishes.low, corrected)))
        return self._needs.kept(needs, keep_s(self._cold_start_s), target=seen.target)

    def _learn(self, seen: Observation, at: float) -> None:
        load = seen.load
        self._history.add(at, load)
        self._unproven.observe(load, running=seen.running, target=seen.target)
        self._needs.pass_time(load.interval_s)
        self._orders.observe(running=seen.running, target=seen.target, at=at)
        self._cold_start_s = self._orders.cold_start_s(load.cold_start_s, at)
        self._costs.start_from(load.measured)
        if load.fits_together and load.silent_replica_share <= LEARN_SILENT:
            share = 1 - load.silent_replica_share  # the part of the tokens that reporting replicas made in their steps
            tokens = {"output_tokens": share * load.output_tokens, "prefilled_tokens": share * load.prefilled_tokens}
            num_begun = load.first_tokens or load.finished  # pooling requests have an end and no first token
            prompts = share * (num_begun + load.lines)
            self._costs.add(load.interval_s, steps=load.steps, busy_s=load.busy_s, prompts=prompts, **tokens)
        self._learn_lengths(load)
        self._lines.learn(load)
        self._pools.learn(load)
        if load.finished and self._answered_at is None:
            self._answered_at = at
        if load.running and seen.running:
            self._kv_per_request.add(load.kv_usage * (load.reporting or seen.running), load.running, load.interval_s)

    def _learn_lengths(self, load: ModelLoad) -> None:
        """Learn how long answers are, also from those that still run, and the share of prompts that the prefix cache saves.

        Short answers end first, so that the mean over ended answers falls while the load rises. If a request is equally likely to end at
        each of its tokens (exponential lengths), the mean is all tokens made, divided by the number of ends, whatever still runs. For
        equal lengths, the mean over ended answers is right. The squared variation, 1 and 0 in these cases, weighs the two means.
        """
        self._squared_tokens.add(load.finished_tokens_squared, load.finished, load.interval_s)
        self._finished_tokens.add(load.finished_tokens, load.finished, load.interval_s)
        square, mean = self._squared_tokens.value, self._finished_tokens.value
        variation = min(1.0, max(0.0, square / mean**2 - 1)) if square and mean else 0.0
        still_run = variation * (load.output_tokens - load.line_output_tokens - load.finished_tokens)
        self._output_tokens.add(load.finished_tokens + still_run, load.finished, load.interval_s)
        if prompts := load.prefilled_tokens + load.cached_tokens:
            self._computed_share.add(load.first_tokens * load.prefilled_tokens / prompts, load.first_tokens, load.interval_s)

    def _computed(self) -> float:
        """Return the share of the prompts' tokens that engines compute; 1 until a first token has been counted."""
        return 1.0 if self._computed_share.value is None else self._computed_share.value

    def _wishes(self, seen: Observation, at: float) -> _Wishes:
        load, times = seen.load, self._costs.times()
        come = arrivals(self._history, at, weights_of(times, self._output_tokens.value, self._computed()))
        holds = load.waiting or load.queued or load.running > load.lines_held - load.lines_queued
        is_quiet = not holds and not self._history.sums(at, QUIET_S).requests
        asked = {"first": 1} if load.lines_held or not is_quiet else {}
        if is_quiet:
            come = replace(come, requests_per_s=0.0, lag_s=QUIET_S / 2)  # requests of minutes ago are no demand
        inputs = {"cold_start_s": self._cold_start_s, "keep_s": keep_s(self._cold_start_s)}
        inputs |= {"requests_per_s": come.requests_per_s, "rate_over_s": 2 * come.lag_s}
        inputs |= {} if self._unseen_s is None else {"taken_over_s": self._unseen_s}
        max_batch = self._max_batch(load)
        capacity = self._capacity(come.prompt_tokens, max_batch, at)
        if capacity is None:
            asked |= {"unmeasured": seen.target} if holds else {}
            asked["batches"] = self._lines.replicas(load, times, max_batch, demand=0.0)
            asked |= self._guards(seen, at, None, most=math.inf)
            return _Wishes(asked=positive(asked), inputs=inputs, limit="unmeasured")
        if come.is_even:
            step_s, plain = capacity.times.step_s, come.requests_per_s * capacity.mix.work_s(capacity.times)
            self._feedback.observe(load, step_s=step_s, demand=plain, running=seen.running)
        quantities = self._quantities(seen, at, capacity, come)
        by_demand, low = self._for_demand(seen, capacity, come, quantities)
        demand, factor = quantities["demand"], self._factor(capacity)
        needed = capacity.replicas_for(demand, factor)
        most = int(QUEUE_MOST * needed + QUEUE_FEW * needed**0.5) + 1
        asked |= by_demand | {"queue": min(most, self._for_queue(quantities["queue_s"], at, capacity, demand))}
        asked["batches"] = self._lines.replicas(load, times, max_batch, demand=demand)
        asked |= self._guards(seen, at, capacity, most=2 * needed)
        quantities |= dict(zip(TAUGHT, self._costs.taught() or (), strict=False)) | pool_inputs(capacity, demand, factor)
        quantities["utilization"] = capacity.utilization(max(1, needed)) * factor
        limit = capacity.batch_limit()[1]
        return _Wishes(asked=positive(asked), inputs=inputs | quantities, limit=limit, demand=needed, low=low)

    def _factor(self, capacity: Capacity) -> float:
        """Return the factor on the utilization that keeps the computed SLO, <= 1: the configured factor times the measured one."""
        measured = self._feedback.factor(with_ttft="ttft" not in capacity.left_out)
        return min(1.0, self.rules.utilization * measured)

    def _for_demand(
        self, seen: Observation, capacity: Capacity, come: Arrivals, of: Mapping[str, float]
    ) -> tuple[dict[str, int], int]:
        """Return the wishes for demand, room for a step and growth; and where scaling down stops: the upper bound of the demand."""
        demand, error = of["demand"], math.hypot(come.error, self._output_tokens.error)
        chance, room_chance = (min(MOST_CHANCE, max(LEAST_CHANCE, deviations * error)) for deviations in (CHANCE, ROOM_CHANCE))
        alone = partial(capacity.replicas_for, factor=self._factor(capacity))
        with_room = partial(capacity.replicas_with_room, headroom=self.rules.headroom)
        needed = alone(demand)
        # A deviation that may be chance is no reason for more replicas, unless a short window shows that the load rose.
        is_chance = come.is_even and max(needed, 1) > seen.target >= alone(demand * (1 - chance))
        asked = {
            "demand": seen.target if is_chance else needed,
            "headroom": with_room(demand) if come.is_even else 0,  # room for the next step is asked for when this step is over
            "growth": alone(demand + of["growth"]) if of["growth"] else 0,
        }
        return asked, max(alone(demand * (1 + chance)), with_room(demand * (1 + room_chance)))

    def _quantities(self, seen: Observation, at: float, capacity: Capacity, come: Arrivals) -> dict[str, float]:
        """Return the quantities that the wishes use, under their names among a decision's inputs."""
        work_s, ahead_s = capacity.work_s, min(self._cold_start_s, HISTORY_S)
        demand = come.requests_per_s * work_s
        return (
            asdict(capacity.times)
            | asdict(capacity.mix)
            | {
                "batch_limit": capacity.batch_limit()[0],
                "work_per_request_s": work_s,
                "work_error_s": capacity.work_error_s,
                "cached_share": 1 - self._computed(),
                "demand": demand,
                "growth": growth(self._history, at, ahead_s) * (ahead_s + come.lag_s) * work_s,
                "queue_s": self._queue_s(seen, at, capacity, demand),
                "itl_batch": capacity.slo_batches()["itl"],
                "saturation": capacity.saturation(),
                "correction": self._factor(capacity) / self.rules.utilization,
                "itl_s": self._feedback.itl_s,
                "expected_itl_s": self._feedback.expected_itl_s,
                "late_share": self._feedback.late_share,
                "feedback_s": self._feedback.span_s,
            }
        )

    def _queue_s(self, seen: Observation, at: float, capacity: Capacity, demand: float) -> float:
        """Return the seconds of work that will wait when a replica ordered now serves, given the replicas on their way."""
        most = capacity.saturation()
        return queue_at_s(
            self._history.least_queue() * capacity.work_s,
            demand,
            running_work=seen.running * most,
            per_replica=most,
            ready_in_s=self._orders.ready_in_s(self._cold_start_s, at),
            until_s=self._orders.horizon_s(self._cold_start_s, at),
        )

    def _for_queue(self, queue_s: float, at: float, capacity: Capacity, demand: float) -> int:
        """Return the replicas that serve the demand and also empty ``queue_s`` within `RECOVER_S` or half a cold start."""
        recover_s = max(RECOVER_S, RECOVER_STARTS * self._orders.horizon_s(self._cold_start_s, at))
        return math.ceil((demand + queue_s / recover_s) / capacity.saturation()) if queue_s else 0

    def _max_batch(self, load: ModelLoad) -> float:
        """Return the requests that a replica can run at once, by its limit and by its KV cache."""
        kv = self._kv_per_request.value
        return min(KV_GUARD / kv if kv else MANY, load.max_num_seqs or MANY)

    def _capacity(self, prompt_tokens: float, max_batch: float, at: float) -> Capacity | None:
        times = self._costs.times()
        is_answered = self._answered_at is not None and at - self._answered_at >= LENGTHS_S
        if times is None or self._output_tokens.value is None or not is_answered:
            return None
        if prompt_tokens:
            self._mix = Mix(prompt_tokens=prompt_tokens * self._computed(), output_tokens=self._output_tokens.value)
        error_s = self._costs.work_error_s(self._mix)
        capacity = Capacity(times=times, mix=self._mix, max_batch=max_batch, slo=self.rules.slo, work_error_s=error_s)
        # At the edge the last digits of a fit must not decide between one replica and thirty.
        batches = capacity.slo_batches().items()
        self._left_out = frozenset(n for n, batch in batches if batch < (RETURN_BATCH if n in self._left_out else LEAST_BATCH))
        return self._pools.divided(replace(capacity, left_out=self._left_out), self.rules.pools)

    def _guards(self, seen: Observation, at: float, capacity: Capacity | None, *, most: float) -> dict[str, int]:
        """Return the wishes of guards, <= ``most``: each sign of a wrong measure asks for one more replica, if none is on its way."""
        recent = self._history.sums(at, WINDOWS_S[0])
        is_recent = recent.interval_s <= 2 * WINDOWS_S[0]  # after a long time without observations the signs may be old
        late = is_recent and recent.late_first_tokens > max(1.0, LATE_GUARD * recent.first_tokens)
        signs = {
            # A queue would cause both of these signs, and the queue has a wish of its own.
            "kv cache full": seen.load.kv_usage > KV_GUARD and not recent.queued,
            "late first tokens": late and not recent.queued and (capacity is None or capacity.can_keep_ttft()),
            "rejected": is_recent and recent.rejected >= MIN_REJECTED,
            # On each replica one request may wait for the end of the current step.
            "queue without measure": seen.load.queued > seen.running and capacity is None,
        }
        held = [name for name, is_on in signs.items() if self._held_for(name, is_on, at)]
        return {name: int(min(seen.target + 1, max(2, most))) for name in held if seen.running >= seen.target}

    def _held_for(self, guard: str, holds: bool, at: float) -> bool:
        if not holds:
            self._guard_since.pop(guard, None)
            return False
        return at - self._guard_since.setdefault(guard, at) >= GUARD_S
