"""These errors end a command that works on a Ray cluster, or reads the log of its autoscaler."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class ClusterFailed(ServingError):
    """A command could not do its work on the Ray cluster; ``hint`` is the way out."""

    code: ClassVar[str] = "cluster_failed"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}" if self.hint else self.problem


@dataclass(eq=False)
class ClusterSilent(ClusterFailed):
    """Ray's control plane has not answered within a limit. It is dead, away, or only slow."""

    code: ClassVar[str] = "cluster_silent"


@dataclass(eq=False)
class ModelFailed(ClusterFailed):
    """Serve has given up starting the model's replicas."""

    code: ClassVar[str] = "model_failed"


@dataclass(eq=False)
class DecisionLogError(ServingError):
    """A log of the autoscaler cannot be used for the request; ``hint`` is the way out."""

    code: ClassVar[str] = "decision_log_error"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"
