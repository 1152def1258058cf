"""These errors end a request, or a utility call, on its way to a replica or there. Links have `serve_app/links/protocol/errors.py`."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class ReplicaLost(ServingError):
    """The replica that held the request failed, and the request cannot go on elsewhere.

    ``reason`` is in our own words: what the replica said last may quote another client's request.
    """

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "replica_lost"
    request: str
    reason: str

    def __str__(self) -> str:
        return f"the replica was lost while it held request {self.request}: {self.reason}"


@dataclass(eq=False)
class ResumeDiverged(ServingError):
    """A request started afresh gave another token than the client has; ``position`` counts output tokens from 0."""

    http_status: ClassVar[int] = 502
    code: ClassVar[str] = "resume_diverged"
    position: int

    def __str__(self) -> str:
        return f"after the loss of its replica the answer could not go on: it differs at output token {self.position}"


@dataclass(eq=False)
class SendFailed(ServingError):
    """A request could not be put on the wire, and not because of what the client sent."""

    code: ClassVar[str] = "send_failed"
    request: str
    cause: str

    def __str__(self) -> str:
        return f"request {self.request} could not be sent to a replica: {self.cause}"
