"""`HealthSettings` says when a replica's engine counts as hung."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.config.base import Real, Section
from serve_app.config.checks import refuse, wrong

_MAX_STEP_S = {"cpu": 600.0, "cuda": 60.0}


class HealthSettings(Section):
    """When a replica kills its engine as hung. The engine's streams continue at other replicas, and Ray Serve replaces the replica."""

    probe_after_s: Real = Field(default=5.0, gt=0)
    """Seconds without a step after which the engine is asked for one token. An idle engine answers at once, but
    each probe keeps the workers of a tensor-parallel engine busy for a second, because they wait in a loop."""
    eject_after_s: Real = Field(default=8.0, ge=1)
    """Seconds without a step, without an answer to the probe and without CPU time after which the engine is killed. Two more cases are
    ended after this time: an engine with a stopped process (SIGSTOP), and a replica process that does not reach its engine.
    Must exceed probe_after_s."""
    max_step_s: Real | None = Field(default=None, gt=0)
    """Seconds that a step may last while it uses CPU time. On a CPU engine the step of a long prompt takes tens of
    seconds. On a GPU a collective that never ends also keeps a CPU busy, and only this limit ends it.
    Default: 600 on cpu, 60 on cuda. At least eject_after_s."""

    def max_step_on(self, device: Literal["cpu", "cuda"]) -> float:
        """Return ``max_step_s`` of a model's engine."""
        return max(self.eject_after_s, _MAX_STEP_S[device]) if self.max_step_s is None else self.max_step_s

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        if self.eject_after_s <= self.probe_after_s:
            problem = f"is {self.eject_after_s} and probe_after_s is {self.probe_after_s}: an idle engine would be killed without a probe"
            yield wrong("eject_after_s", problem, f"set it well above {self.probe_after_s}")
        if self.max_step_s is not None and self.max_step_s < self.eject_after_s:
            problem = f"is {self.max_step_s} and eject_after_s is {self.eject_after_s}"
            yield wrong("max_step_s", problem, f"set it to {self.eject_after_s} or more")
