"""These errors say why a replica has lost its engine and ends its links."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


class EngineLost(ServingError):
    """A replica has lost its engine and ends its own process."""

    code: ClassVar[str] = "engine_lost"


@dataclass(eq=False)
class EngineDied(EngineLost):
    """The engine core process ended by itself; ``reason`` is its last message, or `NO_MESSAGE`."""

    code: ClassVar[str] = "engine_dead"
    NO_MESSAGE: ClassVar[str] = "the engine core process ended without a message (killed?)"
    reason: str

    def __str__(self) -> str:
        return f"the engine core died: {self.reason}"


@dataclass(eq=False)
class EngineOutOfMemory(EngineDied):
    """The kernel has killed the engine: the machine or the replica's memory cgroup (the container) had no memory left."""

    code: ClassVar[str] = "engine_out_of_memory"


@dataclass(eq=False)
class EngineHung(EngineLost):
    """The engine ran and made no progress, so its supervisor killed it."""

    code: ClassVar[str] = "engine_hung"
    after_s: float

    def __str__(self) -> str:
        return f"the engine hung for {self.after_s} s"


@dataclass(eq=False)
class EngineStopped(EngineHung):
    """A process of the engine was stopped, as by SIGSTOP."""

    code: ClassVar[str] = "engine_stopped"

    def __str__(self) -> str:
        return f"a process of the engine was stopped for {self.after_s} s"


@dataclass(eq=False)
class EngineSilent(EngineHung):
    """The engine made no step, answered no probe and used no CPU time: a deadlock."""

    code: ClassVar[str] = "engine_silent"

    def __str__(self) -> str:
        return f"the engine made no step, answered no probe and used no CPU for {self.after_s} s"


@dataclass(eq=False)
class StepTooLong(EngineHung):
    """The engine used CPU time and did not finish a step."""

    code: ClassVar[str] = "step_too_long"

    def __str__(self) -> str:
        return f"a step of the engine lasted {self.after_s} s"
