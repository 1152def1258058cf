"""The engine requests of one HTTP request: which there were, where they ran, and their totals for the ledger. Pure.

A prompt list, ``n`` > 1 and each step of a beam search make several engine requests of one HTTP request.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.books.ledger_lines import MAX_ATTEMPTS_LISTED
from serve_app.core.request import RequestState

_FOLD_AT = 64
"""Engine requests whose states are kept to the end; of older ones that have ended only the totals are. A beam search makes thousands."""
_BEAM = re.compile(r"-beam-\d+$")  # how the id of each engine request of a beam search ends: vLLM's, and that of beam_search.py
_ENDS = {"complete": "stop"}  # the front end's own end of an answer: the detokenizer has found a stop string


class Attempt(NamedTuple):
    """A start of an engine request on a replica, at the monotonic second ``at``. ``end`` is "" while it runs."""

    at: float
    replica: str
    reason: str
    end: str


@dataclass(slots=True)
class Totals:
    """Sums over engine requests; lists hold the first `MAX_ATTEMPTS_LISTED` attempts or so."""

    num_attempts: int = 0
    output_tokens: int = 0
    replicas: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    reason: str = ""
    """Why the last engine request ended."""
    queued_s: float | None = None
    """The longest wait of an engine request for a replica."""
    first_token_at: float | None = None

    def add(self, request: RequestState, outcome: str) -> None:
        """Add one engine request; if it still runs, it ends with ``outcome``, as the HTTP request does."""
        trail = request.trail
        self.reason = end = _ENDS.get(trail.end, trail.end) or outcome
        self.num_attempts += len(trail.replicas)
        self.output_tokens += len(request.emitted_ids)
        if len(self.replicas) < MAX_ATTEMPTS_LISTED:
            self.replicas += trail.replicas
            self.ends += trail.ends if len(trail.ends) == len(trail.replicas) else [*trail.ends, end]
        self.gaps_s += trail.gaps_s
        if trail.started_at is not None:
            self.queued_s = max(self.queued_s or 0.0, trail.started_at - request.arrived_at)
        if trail.first_token_at is not None:
            self.first_token_at = min(self.first_token_at or trail.first_token_at, trail.first_token_at)

    def copy(self) -> "Totals":
        return Totals(
            self.num_attempts,
            self.output_tokens,
            [*self.replicas],
            [*self.ends],
            [*self.gaps_s],
            self.reason,
            self.queued_s,
            self.first_token_at,
        )


class EngineRequests:
    """Those of one HTTP request, in the order in which they arrived."""

    __slots__ = ("_folded", "_folded_ends", "_prompts", "answer_id", "first", "kept", "num", "prompt_tokens")

    def __init__(self) -> None:
        self.first: RequestState | None = None
        """The first engine request; others are not started before it."""
        self.kept: list[RequestState] = []
        """All of them, or of more than 64 those that still run and the newest."""
        self.num = 0
        """How many there were, those that a canary gave up included."""
        self.answer_id = ""
        """vLLM's id of the answer, "" before the first engine request."""
        self.prompt_tokens = 0
        """Tokens of the prompts. The choices of one prompt count it once, and a beam search counts its prompt once."""
        self._prompts: set[str] = set()
        self._folded: Totals | None = None
        self._folded_ends: set[str] = set()

    def add(self, request: RequestState, answer_id: str) -> None:
        """Take in a new engine request. ``answer_id`` is vLLM's id of the answer; the choices of one prompt share it."""
        if _BEAM.search(answer_id):  # its prompt is that of the whole search and what the beam has so far
            self.prompt_tokens = self.prompt_tokens or request.prompt_tokens
        elif answer_id not in self._prompts:
            self._prompts.add(answer_id)
            self.prompt_tokens += request.prompt_tokens
        self.answer_id = self.answer_id or answer_id
        if self.first is None:
            self.first = request
        self.num += 1
        self.kept.append(request)
        if len(self.kept) > _FOLD_AT and self.kept[0].trail.end:
            self._fold(self.kept.pop(0), "")

    def give_up(self) -> None:
        """Forget all but the attempts: they came to nothing, and another front end answers from the start."""
        for request in self.kept:
            self._fold(request, "given_up")
        self.kept.clear()
        self._prompts.clear()
        self._folded_ends.clear()
        self.prompt_tokens, self.answer_id, self.first = 0, "", None
        if self._folded is not None:
            self._folded.output_tokens, self._folded.reason, self._folded.first_token_at = 0, "", None

    @property
    def started(self) -> bool:
        """Whether a replica was given one of them."""
        return bool(self._folded and self._folded.num_attempts) or any(request.trail.replicas for request in self.kept)

    def engines_ends(self) -> set[str]:
        """Return why engines ended them; "" stands for those that no engine has ended."""
        return self._folded_ends | {request.trail.end for request in self.kept}

    def totals(self, outcome: str) -> Totals:
        """Return the sums over all of them; those that still run end with ``outcome``."""
        totals = Totals() if self._folded is None else self._folded.copy()
        for request in self.kept:
            totals.add(request, outcome)
        return totals

    def marks(self) -> Iterator[tuple[str, float | None]]:
        """Yield the phases of the first of them with the second at which each ended, None while it lasts; see `Exchange.phases`."""
        trail = None if self.first is None else self.first.trail
        yield "intake", None if self.first is None else self.first.arrived_at
        if trail is not None:
            yield "queue", trail.started_at
            yield "engine_queue", trail.scheduled_at
            yield "prefill", trail.first_token_at
            yield "decode", max(request.trail.last_token_at for request in self.kept)

    def attempts(self) -> list[Attempt]:
        """Return the attempts, those of each engine request in order, of the first `MAX_ATTEMPTS_LISTED`."""
        found: list[Attempt] = []
        for trail in (request.trail for request in self.kept[:MAX_ATTEMPTS_LISTED]):
            ends = [*trail.ends, "", ""]  # an attempt that runs has none
            found += map(Attempt, trail.starts, trail.replicas, trail.reasons, ends)
        return found[:MAX_ATTEMPTS_LISTED]

    def gaps(self) -> list[tuple[float, float]]:
        """Return when each silence that a change of replica left in the answer began and ended, `MAX_ATTEMPTS_LISTED` at most."""
        return [gap for request in self.kept for gap in request.trail.gaps][:MAX_ATTEMPTS_LISTED]

    def _fold(self, request: RequestState, outcome: str) -> None:
        if self._folded is None:
            self._folded = Totals()
        self._folded.add(request, outcome)
        self._folded_ends.add(request.trail.end)
