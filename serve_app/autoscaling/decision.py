"""`Decision`, `Observation` and `ScalingRules` are what `ModelAutoscaler` returns, sees and is configured with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.autoscaling.capacity import Slo
from serve_app.autoscaling.signals import Asleep, ModelLoad
from serve_app.core.pool_sizes import PoolSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """The configuration of one model's scaling; times in seconds."""

    slo: Slo
    utilization: float = 0.95
    """Factor on the utilization that keeps the SLO, 0 < x <= 1: a reserve for effects that the model of a replica leaves out."""
    headroom: float = 0.4
    """The share by which an even load may rise at once before the batches are full, >= 0."""
    priority: int = 0
    gpus_per_replica: float = 0.0
    pools: PoolSizes | None = None
    sleeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One model at one moment."""

    running: int
    """Replicas that serve. Starting ones are not counted: they are no capacity yet."""
    target: int
    """Replicas that were asked for last."""
    minimum: int
    maximum: int
    load: ModelLoad
    asleep: Asleep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision, and the quantities that led to it besides the observation."""

    desired: int
    wish: str = field(metadata={"alias": "rule"})  # the key of the log, which other versions read
    alternatives: Mapping[str, int]
    """Wish -> the replicas it asked for, bounds not yet applied."""
    inputs: Mapping[str, float]
    """Quantities behind the decision. ``demand`` and ``growth`` are in replicas that are busy all the time."""
    limit: str = ""
    """The limit of a model's replica: itl, ttft, batch, or unmeasured."""
    kept: int = 0
    """The most replicas that were needed within the remembered time. A model asks for this many where GPUs are short."""
    ready_at: float | None = None
    """When the new replicas of this decision should serve; None if it asks for none."""
