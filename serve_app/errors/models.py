"""These errors say that a model's checkpoint, engine core or front end cannot be used or does not start."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class CheckpointError(ServingError):
    """A checkpoint cannot be made, fetched or used. The operator has to act; the error is never sent over HTTP."""

    code: ClassVar[str] = "checkpoint_error"
    problem: str
    """A sentence that names the wrong value and the way out."""

    def __str__(self) -> str:
        return self.problem


@dataclass(eq=False)
class EngineStartFailed(ServingError):
    """An engine core ended before it could serve, or took too long."""

    code: ClassVar[str] = "engine_start_failed"
    model: str
    reason: str

    def __str__(self) -> str:
        return f"the engine core of {self.model!r} did not start: {self.reason}"


@dataclass(eq=False)
class FrontEndStartFailed(ServingError):
    """vLLM's front end of a model could not be built; ``reason`` has vLLM's own message, in one line."""

    code: ClassVar[str] = "front_end_start_failed"
    model: str
    reason: str
    way_out: str = ""

    def __str__(self) -> str:
        said = f"the front end of {self.model!r} did not start: {self.reason}"
        return f"{said}; {self.way_out}" if self.way_out else said
