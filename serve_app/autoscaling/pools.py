"""This module sizes a model's two pools, each by its own demand: that of long prompts, and that of answers and short prompts. Pure.

Both pools have the same engines, so `StepCosts` are fitted to all of them together; a replica of the first pool is one whose requests are
long prompts with answers of one token. `PooledCapacity` takes the place of `Capacity`, so that each wish is for both pools together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serve_app.autoscaling.capacity import Capacity, Mix
from serve_app.autoscaling.history import Mean
from serve_app.autoscaling.signals import ModelLoad
from serve_app.core.pool_sizes import PoolSizes

SHARE_STEP = 0.75
"""The ordered share changes if ``abs(asked - ordered) * desired`` is at least this many replicas: each change of roles moves answers.

``asked`` and ``ordered`` are shares, and ``desired`` is the number of replicas that the model should have.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCapacity(Capacity):
    """The capacity of two pools. ``prefill`` and ``decode`` are those of one replica of each; ``mix`` is that of all requests."""

    prefill: Capacity
    decode: Capacity
    sizes: PoolSizes
    prefill_part: float
    """Part of the work of a request, in seconds of a replica, that is long prompts, 0..1."""

    def pools_for(self, demand: float, factor: float = 1.0) -> tuple[int, int]:
        """Return the fewest replicas of each pool, within its bounds, that do ``demand`` seconds of work per second."""
        return self._bounded(
            self.prefill.replicas_for(demand * self.prefill_part, factor),
            self.decode.replicas_for(demand * (1 - self.prefill_part), factor),
        )

    def prefill_share(self, demand: float, factor: float = 1.0) -> float:
        """Return the part of the needed replicas that compute prompts, 0..1, before rounding and bounds.

        Whole replicas would be no measure: at a low load each pool needs one, and half of a larger ``replicas.min`` would compute prompts.
        """
        prefill = _needed(self.prefill, demand * self.prefill_part, factor)
        decode = _needed(self.decode, demand * (1 - self.prefill_part), factor)
        return prefill / (prefill + decode) if prefill else 0.0

    def replicas_for(self, demand: float, factor: float = 1.0) -> int:
        """Return the replicas of both pools."""
        return sum(self.pools_for(demand, factor)) if demand > 0 else 0

    def replicas_with_room(self, demand: float, headroom: float) -> int:
        """Return the replicas of both pools, each with room for a step of its demand."""
        if not headroom:
            return 0
        return sum(
            self._bounded(
                self.prefill.replicas_with_room(demand * self.prefill_part, headroom),
                self.decode.replicas_with_room(demand * (1 - self.prefill_part), headroom),
            )
        )

    def _bounded(self, prefill: int, decode: int) -> tuple[int, int]:
        sizes = self.sizes
        return (
            min(max(prefill, sizes.prefill_min), sizes.prefill_max),
            min(max(decode, sizes.decode_min), sizes.decode_max),
        )


def _needed(capacity: Capacity, demand: float, factor: float) -> float:
    """Return the replicas that do the demand, as a fraction."""
    return demand / (capacity.utilization(max(1, capacity.replicas_for(demand, factor))) * factor)


@dataclass(slots=True)
class PoolMix:
    """Which part of the prompts' tokens are long prompts, and how long these are."""

    _long_share: Mean = field(default_factory=Mean)
    """Of the prompt tokens that engines compute, the share of long prompts, 0..1."""
    _long_tokens: Mean = field(default_factory=Mean)
    """Computed tokens of a long prompt."""

    def learn(self, load: ModelLoad) -> None:
        """Take in an interval."""
        self._long_tokens.add(load.long_prompt_tokens, load.long_prompts, load.interval_s)
        if load.prefilled_tokens:
            share = min(1.0, load.long_prompt_tokens / load.prefilled_tokens)
            self._long_share.add(load.first_tokens * share, load.first_tokens, load.interval_s)

    def weigh(self, weight: float) -> None:
        """Let all that was learnt count ``weight`` times as much, 0..1."""
        self._long_share.weigh(weight)
        self._long_tokens.weigh(weight)

    def divided(self, whole: Capacity, sizes: PoolSizes | None) -> Capacity:
        """Return the capacity of the two pools, or ``whole`` without pools."""
        if sizes is None:
            return whole
        long_tokens = whole.mix.prompt_tokens * (self._long_share.value or 0.0)
        decode = replace(whole, mix=replace(whole.mix, prompt_tokens=whole.mix.prompt_tokens - long_tokens))
        prefill = replace(whole, mix=Mix(prompt_tokens=self._long_tokens.value or 0.0, output_tokens=1.0), work_error_s=0.0)
        return PooledCapacity(
            times=whole.times,
            mix=whole.mix,
            max_batch=whole.max_batch,
            slo=whole.slo,
            left_out=whole.left_out,
            work_error_s=whole.work_error_s,
            prefill=prefill,
            decode=decode,
            sizes=sizes,
            prefill_part=min(1.0, long_tokens * whole.times.prompt_token_s / whole.work_s),
        )


@dataclass(slots=True)
class OrderedShare:
    """The share of a model's replicas that were ordered to compute prompts: more at once, fewer only once fewer have long sufficed.

    Without the second rule, chance in a steady load would give a replica one role and the other in turn.
    """

    share: float
    _fewer_since: float | None = None
    """Since when each share asked for has been at least `SHARE_STEP` replicas smaller; None if the last was not."""
    _most_since: float = 0.0
    """The largest share asked for since then."""

    def ask(self, decision: Mapping[str, float], desired: int, at: float) -> None:
        """Take in the inputs of a decision for ``desired`` replicas at ``at`` seconds, `pool_inputs` among them."""
        # Rounded down, the share may leave the pool for prompts with too few replicas while the other one has more than it needs.
        whole = min(decision["prefill_needed"], desired - decision["decode_needed"])
        asked = max(decision["prefill_share"], whole / max(1, desired))
        difference = (asked - self.share) * desired
        if difference > -SHARE_STEP:
            self._fewer_since = None
            if difference >= SHARE_STEP:
                self.share = asked
            return
        if self._fewer_since is None:
            self._fewer_since, self._most_since = at, asked
        self._most_since = max(self._most_since, asked)
        if at - self._fewer_since >= decision["keep_s"]:
            self.share, self._fewer_since = self._most_since, None


def pool_inputs(capacity: Capacity, demand: float, factor: float) -> dict[str, float]:
    """Return the quantities of the pools among a decision's inputs; none without pools."""
    if not isinstance(capacity, PooledCapacity):
        return {}
    prefill, decode = capacity.pools_for(demand, factor)
    needed = {"prefill_needed": float(prefill), "decode_needed": float(decode)}
    return {**needed, "prefill_demand": demand * capacity.prefill_part, "prefill_share": capacity.prefill_share(demand, factor)}
