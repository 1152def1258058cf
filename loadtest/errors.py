"""These errors end a command; their class gives its exit status.

    LoadtestError      2
      UsageError       2  scenario, command line, trace or target cannot be used as given
      InvalidRun       3  the run says nothing about the target: the generator was sick or lost records
      AuditMismatch    4  schedule, client and server disagree about what happened to a request

0 is a pass, 1 a missed SLO, 5 undecided: those are results, not errors.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The exit statuses of every command of ``serve-app-loadtest``."""

    PASS = 0
    SLO_MISSED = 1
    USAGE = 2
    INVALID = 3
    AUDIT_MISMATCH = 4
    UNDECIDED = 5


class LoadtestError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.USAGE


@dataclass(eq=False)
class UsageError(LoadtestError):
    """A wrong input: ``where`` names the key, file or option; ``problem`` has the value and the way out."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(eq=False)
class InvalidRun(LoadtestError):
    """The run is invalid: none of its headline numbers may be printed."""

    exit_code: ClassVar[ExitCode] = ExitCode.INVALID
    reasons: list[str]

    def __str__(self) -> str:
        return "the run is invalid: " + "; ".join(self.reasons)


@dataclass(eq=False)
class AuditMismatch(LoadtestError):
    """Some requests are not in exactly one final state."""

    exit_code: ClassVar[ExitCode] = ExitCode.AUDIT_MISMATCH
    num_findings: int
    first: str

    def __str__(self) -> str:
        return f"{self.num_findings} audit findings, first: {self.first}"
