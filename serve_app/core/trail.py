"""`Trail` records what one engine request went through: its attempts, its first token, and the gaps that changes of replica left.

Pure. ``FleetState`` writes it, ``ingress/exchange/engine_requests.py`` reads it. Times are the ingress's monotonic seconds.
"""

from dataclasses import dataclass, field
from typing import Any

MOVED = "moved"
"""End of an attempt that this ingress took back, to start the request elsewhere."""
TAKEN_BACK = "new_replica"
"""Cause of a move out of an engine's queue, when a replica joined that shares its requests."""
WITHOUT_KV = "without_kv"
"""Result of a move in which no KV was to be read."""
ENGINES_OWN_ENDS = {"error": "failed", "abort": "aborted"}
"""Finish reasons, as vLLM prints them, of answers that the engine gave up -> outcome."""

_SCHEDULED = 2
"""vLLM's ``EngineCoreEventType.SCHEDULED``."""


@dataclass(frozen=True, slots=True)
class Route:
    """The numbers behind the choice of an attempt's replica.

    ``hit_tokens``: prompt tokens that were expected in the replica's prefix cache. ``tokens_before``: tokens that the replica had still to
    do for this ingress, without those that do not count for the request (`ReplicaState.tokens_before`). ``saves_s``: seconds that requests
    wait less there in sum, by the estimate; 0 if the choice was not made by that.
    """

    hit_tokens: int
    tokens_before: int
    saves_s: float


@dataclass(slots=True)
class Move:
    """A decision that the request leaves a replica that lives.

    ``attempt`` is the number of the attempt that is to end, from 0. ``cause`` is that of `HandOvers.asked`, or `TAKEN_BACK`. Expected are
    ``saves_s``, the seconds that the move saves, and ``read_s``, those in which the target reads the KV; None if no KV moves. ``result`` is
    that of `HandOvers.results`, `WITHOUT_KV`, or "" while it is not known. ``read_tokens``: tokens whose KV was read.
    """

    attempt: int
    at: float
    cause: str
    saves_s: float
    read_s: float | None
    result: str = ""
    read_tokens: int = 0


@dataclass(slots=True)
class Trail:
    """``ends`` is one shorter than ``replicas`` while an attempt runs, and after an end that the front end made."""

    replicas: list[str] = field(default_factory=list)
    """The replica of each attempt, in order."""
    ends: list[str] = field(default_factory=list)
    """Why each attempt ended: a `LinkEnd` in lower case, `MOVED`, or the engine's finish reason."""
    reasons: list[str] = field(default_factory=list)
    """Why each attempt was routed to its replica: a `Reason`."""
    routes: list[Route] = field(default_factory=list)
    """The numbers behind each of these choices."""
    moves: list[Move] = field(default_factory=list)
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
    def expected_hit_tokens(self) -> int:
        """Prompt tokens of the latest attempt that were expected in its replica's prefix cache."""
        return self.routes[-1].hit_tokens if self.routes else 0

    @property
    def gaps_s(self) -> list[float]:
        """The length of each of the ``gaps``."""
        return [end - begin for begin, end in self.gaps]

    @property
    def answer_s(self) -> float:
        """The seconds from the first to the last token so far."""
        return 0.0 if self.first_token_at is None else self.last_token_at - self.first_token_at

    def started(self, replica_id: str, reason: str, route: Route, now: float) -> None:
        """Note that an attempt begins."""
        if len(self.ends) < len(self.replicas):
            self.ends.append(MOVED)
        self.replicas.append(replica_id)
        self.reasons.append(reason)
        self.routes.append(route)
        self.starts.append(now)
        self._moved = self.first_token_at is not None

    def moves_on(self, cause: str, now: float, *, saves_s: float = 0.0, read_s: float | None = None) -> None:
        """Note the decision that the present attempt leaves its replica. Without ``read_s`` it leaves without its KV."""
        result = WITHOUT_KV if read_s is None else ""
        self.moves.append(Move(len(self.replicas) - 1, now, cause, saves_s, read_s, result))

    def moved(self, result: str, read_tokens: int = 0) -> None:
        """Note how the first move ended whose result is not known. Without such a move, no one asked for it."""
        for move in self.moves:
            if not move.result:
                move.result, move.read_tokens = result, read_tokens
                return

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
