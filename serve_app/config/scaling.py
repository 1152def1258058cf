"""`ScalingSettings` says how many replicas a model has, and `Bounds` how many a deployment may have."""

from typing import Self

from pydantic import Field, model_validator

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import wrong
from serve_app.config.schedule import ScheduledBounds

_WAITED_SLOS = 15
"""Times `ttft_slo_s` that a request may wait by default. Clients that send all their requests at once expect to wait."""


class Bounds(Section):
    """The bounds of a deployment's number of replicas."""

    min: Int = Field(default=1, ge=0)
    """Replicas that always run. With 0 the last replica of an idle model ends, and the next request waits for a cold start; such a model
    needs required: false."""
    max: Int = Field(default=1, ge=1)
    """Most replicas that the autoscaler may start. Equal to min: no autoscaling."""

    @property
    def is_scaled(self) -> bool:
        """Whether the number of replicas may change."""
        return self.min != self.max

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> Self:
        if self.min > self.max:
            raise wrong("max", f"min is {self.min} and max is {self.max}", f"set max to {self.min} or more")
        return self


class ScalingSettings(Bounds):
    """The number of a model's replicas."""

    initial: Int | None = Field(default=None, ge=0)
    """Replicas at the first deployment, between min and max. Default: min."""
    ttft_slo_s: Real = Field(default=2.0, gt=0)
    """The limit that the autoscaler aims at for almost all requests: seconds from a request's arrival to its first token."""
    refuse_after_s: Real | None = Field(default=None, gt=0)
    """A request is refused with 503 at arrival if its first token is expected later than so many seconds. With fewer than `max` replicas,
    the p90 of starts is added. Not for tenants with `first_token_s`. None: 15 times ttft_slo_s."""
    itl_slo_s: Real = Field(default=0.1, gt=0)
    """The limit that the autoscaler aims at for almost all tokens: seconds between two tokens. Lower: smaller batches, more replicas."""
    utilization: Real = Field(default=0.95, gt=0, le=1)
    """The autoscaler adds a replica at this share of the load that would just keep both limits. Lower: more headroom."""
    headroom: Real = Field(default=0.4, ge=0, le=10)
    """Share by which a steady load may rise at once before the replicas are full. With 0.4, 99 % of first tokens stay in time after a step
    to 1.5 times the load of several replicas; this costs 12 to 33 % more replicas, and two replicas where one would do. With 0 only
    the room within the limits is left, and after such a step first tokens are late for about a cold start."""
    schedule: tuple[ScheduledBounds, ...] = ()
    """Windows of the week with other bounds, all between min and max."""
    priority: Int = 0
    """The model's rank for GPUs when `autoscaling.max_gpus` is too few for all models; higher ranks get GPUs first."""
    surge: Int | None = Field(default=None, ge=0, le=1)
    """Extra replicas while an update replaces the model's replicas. 1: a new replica is ready before an old one stops, and the update
    waits for room for it. 0: an old replica stops first, so a model with one replica is away during a start. Default: 0 for a model that
    holds GPUs, else 1."""

    def max_wait_s(self) -> float:
        """Return the seconds within which an answer has to begin, by what is known when the request comes."""
        return _WAITED_SLOS * self.ttft_slo_s if self.refuse_after_s is None else self.refuse_after_s

    @model_validator(mode="after")
    def _initial_is_within_bounds(self) -> Self:
        if self.initial is not None and not self.min <= self.initial <= self.max:
            problem = f"initial is {self.initial}, min is {self.min} and max is {self.max}"
            raise wrong("initial", problem, f"set initial from {self.min} to {self.max}, or remove it")
        return self

    @model_validator(mode="after")
    def _schedule_is_within_bounds(self) -> Self:
        if self.schedule and self.min == self.max:
            raise wrong("schedule", f"has no effect: min and max are {self.min}", "widen them, or remove the schedule")
        for index, window in enumerate(self.schedule):
            for name, value in (("min", window.min), ("max", window.max)):
                if value is not None and not self.min <= value <= self.max:
                    problem = f"is {value}, and replicas.min is {self.min} and max is {self.max}"
                    raise wrong(f"schedule[{index}].{name}", problem, "a window narrows these bounds: widen them, or the window")
        return self
