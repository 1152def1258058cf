"""`SleepSettings` says when a model's engine sleeps, and how many engines share a GPU."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import wrong

if TYPE_CHECKING:
    from serve_app.config.model import ModelSettings


class SleepSettings(Section):
    """An idle engine gives up its GPU's memory and stays a process, which wakes sooner than a new one starts: docs/models.md."""

    level: Literal[1, 2] = 1
    """1: the weights move to the host's memory, and back. 2: they are dropped, and loaded again."""
    after_s: Real = Field(default=60.0, gt=0)
    """Seconds without a request after which the engine sleeps, also if no other model needs its GPU."""
    replicas_per_gpu: Int = Field(default=1, ge=1, le=64)
    """Replicas, of any models with `sleep`, that Ray places on one GPU. One of them is awake at a time."""


def sleep_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    """Check what a model with an engine that sleeps cannot have."""
    if (sleep := model.sleep) is None:
        return
    if model.device == "cpu" and model.simulated is None:
        way_out = "remove it, set device: cuda, or simulate an accelerator"
        yield wrong("sleep", "is set and device is cpu: an engine on a CPU cannot sleep", way_out)
    if model.replicas.max > 1:
        problem = f"is set and replicas.max is {model.replicas.max}: a model that sleeps has one replica"
        yield wrong("sleep", problem, "set replicas.max: 1, or remove sleep")
    if model.canary is not None:
        yield wrong("sleep", "is set, and a canary that sleeps gets no request", "remove it from the canary")
    if model.kv.is_on:
        problem = f"is set and kv.transfer is {model.kv.transfer!r}: other replicas would read memory that a sleep has freed"
        yield wrong("sleep", problem, "remove it, or set kv.transfer: none")
    if model.nodes > 1:
        yield wrong("sleep", f"is set and nodes is {model.nodes}", "remove it: an engine over several nodes does not sleep")
    if sleep.level == 2 and model.adapters:
        problem = "is 2 and adapters is not empty: a wake-up would load the model without its adapters"
        yield wrong("sleep.level", problem, "set sleep.level: 1")
    if sleep.replicas_per_gpu > 1 and model.gpus_per_replica != 1:
        problem = f"is {sleep.replicas_per_gpu} and gpus_per_replica is {model.gpus_per_replica}: Ray divides one GPU only"
        yield wrong("sleep.replicas_per_gpu", problem, "set gpus_per_replica: 1, or remove it")
