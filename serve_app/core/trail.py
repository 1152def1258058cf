"""`Trail` records what one engine request went through: its attempts, its first token, and the gaps that changes of replica left.

Pure. ``FleetState`` writes it, ``ingress/exchange/engine_requests.py`` reads it. Times are the ingress's monotonic seconds.
"""

from dataclasses import dataclass, field
from typing import Any

MOVED = "moved"
"""End of an attempt that this ingress took back, to start the request elsewhere."""
ENGINES_OWN_ENDS = {"error": "failed", "abort": "aborted"}
"""Finish reasons, as vLLM prints them, of answers that the engine gave up -> outcome."""

_SCHEDULED = 2
"""vLLM's ``EngineCoreEventType.SCHEDULED``."""


@dataclass(slots=True)
class Trail:
    """``ends`` is one shorter than ``replicas`` while an attempt runs, and after an end that the front end made."""

    replicas: list[str] = field(default_factory=list)
    """The replica of each attempt, in order."""
    ends: list[str] = field(default_factory=list)
    """Why each attempt ended: a `LinkEnd` in lower case, `MOVED`, or the engine's finish reason."""
    reasons: list[str] = field(default_factory=list)
    """Why each attempt was routed to its replica: a `Reason`."""
    expected_hit_tokens: int = 0
    """Prompt tokens of the latest attempt that were expected in its replica's prefix cache."""
    starts: list[float] = field(default_factory=list)
    """When each attempt was started."""
    scheduled_at: float | None = None
    """When the engine took the request from its queue, as it reports with the first token; None if it does not."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache, as it reports with the first token; None if it does not."""
    first_token_at: float | None = None
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """For each change of replica within the answer: when the last token before it came, and the first new one after it."""
    end: str = ""
    """The end of the request: the engine's finish reason, or the front end's outcome. Empty: the request is unfinished, or failed."""
    last_token_at: float = 0.0
    _moved: bool = False

    @property
    def started_at(self) -> float | None:
        """When the first attempt was started."""
        return self.starts[0] if self.starts else None

    @property
    def gaps_s(self) -> list[float]:
        """The length of each of the ``gaps``."""
        return [end - begin for begin, end in self.gaps]

    @property
    def answer_s(self) -> float:
        """The seconds from the first to the last token so far."""
        return 0.0 if self.first_token_at is None else self.last_token_at - self.first_token_at

    def started(self, replica_id: str, reason: str, expected_hit_tokens: int, now: float) -> None:
        """Note that an attempt begins."""
        if len(self.ends) < len(self.replicas):
            self.ends.append(MOVED)
        self.replicas.append(replica_id)
        self.reasons.append(reason)
        self.expected_hit_tokens = expected_hit_tokens
        self.starts.append(now)
        self._moved = self.first_token_at is not None

    def lost(self, end: str) -> None:
        """Note that the replica of the attempt is gone."""
        self.ends.append(end)

    def delivered(self, output: Any, now: float) -> None:
        """Note that new tokens go to the front end. Called for each output, so it does little; it reads only the first ``EngineOutput``."""
        if self.first_token_at is None:
            self.first_token_at = now
            self._take_report(output)
        elif self._moved:
            self._moved = False
            self.gaps.append((self.last_token_at, now))
        self.last_token_at = now

    def _take_report(self, output: Any) -> None:
        for event in output.events or ():
            if event.type == _SCHEDULED and self.scheduled_at is None:  # later ones follow a preemption
                self.scheduled_at = event.timestamp
        if output.prefill_stats is not None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens

    def finished(self, reason: str) -> None:
        """Note that the engine has ended the request."""
        self.ends.append(reason)
        self.end = reason
