"""What one engine request went through: its attempts, its first token, and the gaps that changes of replica left in its answer.

Pure. ``FleetState`` writes it, the ledger (``ingress/ledger.py``) reads it. Times are the ingress's monotonic seconds.
"""

from dataclasses import dataclass, field

MOVED = "moved"
"""End of an attempt that this ingress took back, to start the request elsewhere."""


@dataclass(slots=True)
class Trail:
    """``ends`` is one shorter than ``replicas`` while an attempt runs, and after an end that the front end made."""

    replicas: list[str] = field(default_factory=list)
    """Of each attempt, in order."""
    ends: list[str] = field(default_factory=list)
    """Why each attempt ended: a `LinkEnd` in lower case, `MOVED`, or the engine's finish reason."""
    reasons: list[str] = field(default_factory=list)
    """Of each attempt, why it was routed there: a `Reason`."""
    expected_hit_tokens: int = 0
    """Of the latest attempt: prompt tokens that were thought to be cached where it went."""
    started_at: float | None = None
    """When the first attempt was started."""
    first_token_at: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """For each change of replica within the answer: seconds from the last token before the change to the first new one after it."""
    end: str = ""
    """Of the request: the engine's finish reason, or the outcome that the front end gave it. Empty: it is unfinished, or failed."""
    last_token_at: float = 0.0
    _moved: bool = False

    def started(self, replica_id: str, reason: str, expected_hit_tokens: int, now: float) -> None:
        """An attempt begins."""
        if len(self.ends) < len(self.replicas):
            self.ends.append(MOVED)
        self.replicas.append(replica_id)
        self.reasons.append(reason)
        self.expected_hit_tokens = expected_hit_tokens
        self.started_at = now if self.started_at is None else self.started_at
        self._moved = self.first_token_at is not None

    def lost(self, end: str) -> None:
        """The replica of the attempt is gone."""
        self.ends.append(end)

    def delivered(self, now: float) -> None:
        """New tokens go to the front end. Called for each output, so it does little."""
        if self.first_token_at is None:
            self.first_token_at = now
        elif self._moved:
            self._moved = False
            self.gaps_s.append(now - self.last_token_at)
        self.last_token_at = now

    def finished(self, reason: str) -> None:
        """The engine has ended the request."""
        self.ends.append(reason)
        self.end = reason
