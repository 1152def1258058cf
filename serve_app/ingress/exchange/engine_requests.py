"""`EngineRequests` lists the engine requests of one HTTP request with their replicas, and adds up their totals for the ledger. Pure.

One HTTP request becomes several engine requests by a list of prompts, by ``n`` > 1, and at each step of a beam search.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from serve_app.books.ledger_lines import MAX_ATTEMPTS_LISTED
from serve_app.core.request import RequestState
from serve_app.core.step_costs import long_context
from serve_app.core.trail import ENGINES_OWN_ENDS, Move, Route

_FOLD_AT = 64
"""The states of so many engine requests are kept to the end; older ones that have ended are kept as totals only. A beam search makes
thousands."""
_BEAM = re.compile(r"-beam-\d+$")  # the end of an engine request's id in a beam search, in vLLM's and in routes/generate.py
_ENDS = {"complete": "stop"}  # the front end ended the answer itself: its detokenizer found a stop string


class Attempt(NamedTuple):
    """One start of an engine request on a replica, at the monotonic second ``at``. ``end`` is "" while the attempt runs."""

    at: float
    replica: str
    reason: str
    end: str


@dataclass(slots=True)
class Totals:
    """Sums over engine requests. The lists hold the first `MAX_ATTEMPTS_LISTED` attempts, or a few more."""

    num_attempts: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    """Tokens before those of the answers, as `long_context` counts them."""
    step_part: float = 0.0
    """The requests' part of their engines' steps (`RequestState.step_part`)."""
    num_answered: int = 0
    """Engine requests of which an engine has read the whole prompt."""
    computed_tokens: int = 0
    """Prompt tokens of these engine requests that were in no prefix cache. Each choice and each beam counts."""
    cached_tokens: int | None = None
    """Prompt tokens that were in a prefix cache. Only those engine requests count whose prompt `EngineRequests.prompt_tokens` counts."""
    replicas: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    routes: list[tuple[str, float, Route]] = field(default_factory=list)
    """Of each of these attempts: the reason for its replica, its monotonic start, and the numbers behind the choice."""
    moves: list[tuple[int, Move]] = field(default_factory=list)
    """Moves, each with the number of its attempt in these lists."""
    gaps_s: list[float] = field(default_factory=list)
    reason: str = ""
    """Why the last engine request ended."""
    queued_s: float | None = None
    """The longest wait of an engine request for a replica."""
    first_token_at: float | None = None

    def add(self, request: RequestState, outcome: str, *, counts_prompt: bool) -> None:
        """Add one engine request. A request that still runs gets the ``outcome`` of the HTTP request as its end."""
        trail = request.trail
        cached = trail.cached_tokens and min(trail.cached_tokens, request.prompt_tokens)
        # A pooling request has no tokens; an engine has answered it if the engine's finish reason is its end.
        if request.emitted_ids or (trail.ends[-1:] == [trail.end] and trail.end not in ENGINES_OWN_ENDS):
            self.num_answered += 1
            self.computed_tokens += request.prompt_tokens - (cached or 0)
        if counts_prompt and cached is not None:
            self.cached_tokens = (self.cached_tokens or 0) + cached
        self.reason = end = _ENDS.get(trail.end, trail.end) or outcome
        self.num_attempts += len(trail.replicas)
        self.output_tokens += len(request.emitted_ids)
        self.context_tokens += long_context(request.prompt_tokens, len(request.emitted_ids))
        self.step_part += request.step_part
        if len(self.replicas) < MAX_ATTEMPTS_LISTED:
            self.moves += [(len(self.replicas) + move.attempt, move) for move in trail.moves]
            self.routes += zip(trail.reasons, trail.starts, trail.routes, strict=True)
            self.replicas += trail.replicas
            self.ends += trail.ends if len(trail.ends) == len(trail.replicas) else [*trail.ends, end]
        self.gaps_s += trail.gaps_s
        if trail.started_at is not None:
            self.queued_s = max(self.queued_s or 0.0, trail.started_at - request.arrived_at)
        if trail.first_token_at is not None:
            self.first_token_at = min(self.first_token_at or trail.first_token_at, trail.first_token_at)

    def copy(self) -> "Totals":
        """Return totals to which more can be added without changing these."""
        routes, moves = [*self.routes], [*self.moves]
        return replace(self, replicas=[*self.replicas], ends=[*self.ends], routes=routes, moves=moves, gaps_s=[*self.gaps_s])


class EngineRequests:
    """The engine requests of one HTTP request, in the order in which they arrived."""

    __slots__ = ("_counted", "_folded", "_folded_ends", "_prompts", "answer_id", "first", "kept", "num", "prompt_tokens")

    def __init__(self) -> None:
        self.first: RequestState | None = None
        """The first engine request; no other one starts before it."""
        self.kept: list[RequestState] = []
        """The engine requests. Beyond 64, the oldest is folded into the totals if it has ended."""
        self.num = 0
        """How many engine requests there were, including those that a canary gave up."""
        self.answer_id = ""
        """vLLM's id of the answer, "" before the first engine request."""
        self.prompt_tokens = 0
        """Tokens of the prompts. The choices of one prompt count it once, and each of several beam searches counts its prompt once."""
        self._prompts: set[str] = set()
        self._counted: set[str] = set()  # ids of the engine requests whose prompts are in ``prompt_tokens``
        self._folded: Totals | None = None
        self._folded_ends: set[str] = set()

    def add(self, request: RequestState, answer_id: str, *, num_searches: int = 1) -> None:
        """Take in a new engine request.

        Args:
            answer_id: vLLM's id of the answer; the choices of one prompt share it.
            num_searches: How many beam searches the HTTP request consists of, if it is one of beam searches.
        """
        if self._is_new_prompt(answer_id, num_searches):
            self._prompts.add(answer_id)
            self._counted.add(request.request_id)
            self.prompt_tokens += request.prompt_tokens
        self.answer_id = self.answer_id or answer_id
        if self.first is None:
            self.first = request
        self.num += 1
        self.kept.append(request)
        if len(self.kept) > _FOLD_AT and self.kept[0].trail.end:
            self._fold(self.kept.pop(0), "")

    @property
    def output_tokens(self) -> int:
        """Tokens from the engines so far, as in `Totals`."""
        folded = 0 if self._folded is None else self._folded.output_tokens
        return folded + sum(len(request.emitted_ids) for request in self.kept)

    def _is_new_prompt(self, answer_id: str, num_searches: int) -> bool:
        """Return whether the next engine request of this answer has a prompt that no earlier one had."""
        if _BEAM.search(answer_id):
            # Its prompt is that of its search and the beam's tokens so far. The ids of several searches are alike, but all searches begin
            # at once, so that the first requests are their first steps, each with the prompt alone.
            return len(self._counted) < num_searches
        return answer_id not in self._prompts

    def give_up(self) -> None:
        """Forget everything but the attempts: they gave no answer, and another front end answers from the start."""
        for request in self.kept:
            self._fold(request, "given_up")
        self.kept.clear()
        self._prompts.clear()
        self._counted.clear()
        self._folded_ends.clear()
        self.prompt_tokens, self.answer_id, self.first = 0, "", None
        if self._folded is not None:
            self._folded.output_tokens, self._folded.reason, self._folded.first_token_at = 0, "", None
            self._folded.num_answered, self._folded.computed_tokens, self._folded.cached_tokens = 0, 0, None
            self._folded.step_part, self._folded.context_tokens = 0.0, 0

    @property
    def started(self) -> bool:
        """Whether any of the engine requests was given to a replica."""
        return bool(self._folded and self._folded.num_attempts) or any(request.trail.replicas for request in self.kept)

    def engines_ends(self) -> set[str]:
        """Return the reasons for which engines ended the requests; "" stands for a request that no engine has ended."""
        return self._folded_ends | {request.trail.end for request in self.kept}

    def totals(self, outcome: str) -> Totals:
        """Return the sums over all engine requests; one that still runs gets ``outcome`` as its end."""
        totals = Totals() if self._folded is None else self._folded.copy()
        for request in self.kept:
            totals.add(request, outcome, counts_prompt=request.request_id in self._counted)
        return totals

    def marks(self) -> Iterator[tuple[str, float | None]]:
        """Yield each phase of the first engine request with the second of its end, None while it lasts. See `Exchange.phases`."""
        trail = None if self.first is None else self.first.trail
        yield "intake", None if self.first is None else self.first.arrived_at
        if trail is not None:
            yield "queue", trail.started_at
            yield "engine_queue", trail.scheduled_at
            yield "prefill", trail.first_token_at
            yield "decode", max(request.trail.last_token_at for request in self.kept)

    def attempts(self) -> list[Attempt]:
        """Return the attempts of the first engine requests, at most `MAX_ATTEMPTS_LISTED`, grouped by engine request."""
        found: list[Attempt] = []
        for trail in (request.trail for request in self.kept[:MAX_ATTEMPTS_LISTED]):
            ends = [*trail.ends, "", ""]  # a running attempt has no end yet
            found += map(Attempt, trail.starts, trail.replicas, trail.reasons, ends)
        return found[:MAX_ATTEMPTS_LISTED]

    def gaps(self) -> list[tuple[float, float]]:
        """Return begin and end of each silence that a change of replica left in the answer, at most `MAX_ATTEMPTS_LISTED`."""
        return [gap for request in self.kept for gap in request.trail.gaps][:MAX_ATTEMPTS_LISTED]

    def _fold(self, request: RequestState, outcome: str) -> None:
        if self._folded is None:
            self._folded = Totals()
        self._folded.add(request, outcome, counts_prompt=request.request_id in self._counted)
        self._folded_ends.add(request.trail.end)
