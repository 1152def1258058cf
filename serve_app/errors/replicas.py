"""These errors end a request, or a utility call, on its way to a replica or there. Links have `serve_app/links/protocol/errors.py`."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class ReplicaLost(ServingError):
    """The replica that held the request failed, and the request cannot continue at another replica.

    ``reason`` is in our own words: the replica's last message may quote another client's request.
    """

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "replica_lost"
    request: str
    reason: str

    def __str__(self) -> str:
        return f"the replica was lost while it held request {self.request}: {self.reason}"


@dataclass(eq=False)
class ResumeDiverged(ServingError):
    """A replayed request gave another token than the client already has; ``position`` counts output tokens from 0."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "resume_diverged"
    position: int

    def __str__(self) -> str:
        return f"after the loss of its replica the answer could not continue: it differs at output token {self.position}"


@dataclass(eq=False)
class SendFailed(ServingError):
    """A request could not be sent to a replica, and the client's input is not the cause."""

    code: ClassVar[str] = "send_failed"
    request: str
    cause: str

    def __str__(self) -> str:
        return f"request {self.request} could not be sent to a replica: {self.cause}"
