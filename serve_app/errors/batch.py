"""These errors say why a batch cannot begin or continue."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class BatchError(ServingError):
    """A batch cannot begin or continue; its answers are kept. ``hint`` is the way out."""

    code: ClassVar[str] = "batch_error"
    problem: str
    hint: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"


@dataclass(eq=False)
class KeyRefused(BatchError):
    """The batch has no API key that the service accepts. The command line ends with exit status 2: another try fails, too."""

    code: ClassVar[str] = "key_refused"


@dataclass(eq=False)
class LeaseLost(BatchError):
    """The lease of this ingress on a batch is over, and another ingress has taken the batch over."""

    code: ClassVar[str] = "lease_lost"


@dataclass(eq=False)
class JournalBroken(BatchError):
    """The file of a batch's answers is damaged, or not a journal."""

    code: ClassVar[str] = "journal_broken"


@dataclass(eq=False)
class ServiceAway(BatchError):
    """The service has answered no request at all for ``Limits.patience_s``."""

    code: ClassVar[str] = "service_away"
