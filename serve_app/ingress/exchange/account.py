"""What became of one HTTP request: facts as they come, and at its end its one outcome.

The ledger, traces and receipts are made of it. A request that none of them asks for has no account.
"""

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from serve_app.books.ledger_lines import MAX_ATTEMPTS_LISTED, Line
from serve_app.core.request import RequestState
from serve_app.errors import ServingError
from serve_app.ingress.exchange.outcomes import Answer, Ending, ending
from serve_app.ingress.http.body_fields import MAX_REQUEST_ID_CHARS, BodyFields

_FOLD_AT = 64  # engine requests that are looked at again at the end; a beam search makes thousands
_BEAM = re.compile(r"-beam-\d+$")  # the end of each engine request's id in a beam search: vLLM's, and that of generate.py
_ENDS = {"complete": "stop"}  # the front end's own end of an answer: the detokenizer has found a stop string


class Phase(NamedTuple):
    """A part of a request's time; monotonic seconds."""

    name: str
    began_at: float
    ended_at: float


class Attempt(NamedTuple):
    """A start of an engine request on a replica, at the monotonic second ``at``. ``end`` is "" while it runs."""

    at: float
    replica: str
    reason: str
    end: str


class CallersTrace(NamedTuple):
    """What the head of a request says of the trace that it belongs to, as it stands there, and from which address."""

    parent: str
    states: list[str]
    client: str


class Account:
    """One HTTP request. ``key`` is the name of its API key, ``number`` that of the request in the ledger of this ingress."""

    def __init__(self, number: int, path: str, key: str | None) -> None:
        self.number = number
        self.id = ""
        self.model: str | None = None
        self.refusal: ServingError | None = None
        self.first: RequestState | None = None
        """The first engine request."""
        self.callers_trace: CallersTrace | None = None
        self.wants_receipt = False
        self.time, self.arrived_at = time.time(), time.monotonic()
        """When the head had been read: seconds since the epoch, and monotonic ones."""
        self.ended_at = self.arrived_at
        """When ``line`` was made."""
        self._path, self._key, self._stream = path, key, False
        self._gone: Answer | None = None
        self._answer_id = ""
        self._prompts: set[str] = set()
        self._engine_requests: list[RequestState] = []
        self._num_engine_requests = self._num_attempts = self._prompt_tokens = self._output_tokens = 0
        self._replicas: list[str] = []
        self._ends: list[str] = []
        self._engines_ends: set[str] = set()
        self._gaps_s: list[float] = []
        self._reason = ""
        self._queued_s: float | None = None
        self._first_token_at: float | None = None

    def asked(self, fields: BodyFields | None) -> None:
        """Note what the body says, before it is judged: an id that is refused may have no UTF-8."""
        if fields is None:
            return
        self._stream = fields.stream is True
        told = fields.request_id
        if not self.id and isinstance(told, str) and told.isprintable() and len(told) <= MAX_REQUEST_ID_CHARS:
            self.id = told

    def add(self, request: RequestState, answer_id: str) -> None:
        """An engine request has come of it. ``answer_id`` is vLLM's for the answer; the choices of one prompt share it."""
        if _BEAM.search(answer_id):  # its prompt is that of the whole search and what the beam has so far
            self._prompt_tokens = self._prompt_tokens or request.prompt_tokens
        elif answer_id not in self._prompts:
            self._prompts.add(answer_id)
            self._prompt_tokens += request.prompt_tokens
        self._answer_id = self._answer_id or answer_id
        self.first = self.first or request
        self._num_engine_requests += 1
        self._engine_requests.append(request)
        if len(self._engine_requests) > _FOLD_AT and self._engine_requests[0].trail.end:
            self._fold(self._engine_requests.pop(0), "")

    def begin_again(self) -> None:
        """The attempts so far came to nothing, and all begins again at another front end."""
        for request in self._engine_requests:
            self._fold(request, "given_up")
        self._engine_requests.clear()
        self._prompts.clear()
        self._engines_ends.clear()
        self._prompt_tokens = self._output_tokens = 0
        self._answer_id = self._reason = ""
        self._first_token_at = self.first = None

    def client_gone(self, answer: Answer) -> None:
        """The client went away when it had been sent ``answer``; after the whole answer that is nothing to note."""
        if self._gone is None and not answer.ended:
            self._gone = answer

    @property
    def answer_id(self) -> str:
        """The client's id of the request, else vLLM's of the answer, else ""."""
        return self.id or self._answer_id

    def phases(self, ended_at: float) -> list[Phase]:
        """Return the phases of the request, each beginning where the one before it ends; the last ends at ``ended_at``.

        They are those of the first engine request: ``intake`` until it came, ``queue`` until it was given to a replica,
        ``engine_queue`` until the engine took it up (left out where the engine does not tell), ``prefill`` until its first token. Then
        ``decode`` to the last token of all engine requests, and ``finish``. A request that ended early has the first of them.
        """
        phases: list[Phase] = []
        began_at = self.arrived_at
        for name, until in self._marks():
            if until is None and name == "engine_queue":
                continue
            end = ended_at if until is None else min(max(until, began_at), ended_at)
            phases.append(Phase(name, began_at, end))
            if until is None:
                return phases
            began_at = end
        return [*phases, Phase("finish", began_at, ended_at)]

    def _marks(self) -> Iterator[tuple[str, float | None]]:
        first, trail = self.first, None if self.first is None else self.first.trail
        yield "intake", None if first is None else first.arrived_at
        if trail is not None:
            yield "queue", trail.started_at
            yield "engine_queue", trail.scheduled_at
            yield "prefill", trail.first_token_at
            yield "decode", max(request.trail.last_token_at for request in self._engine_requests)

    def attempts(self) -> list[Attempt]:
        """Return the attempts of the engine requests, each request's in order, of the first `MAX_ATTEMPTS_LISTED`."""
        found: list[Attempt] = []
        for trail in (request.trail for request in self._engine_requests[:MAX_ATTEMPTS_LISTED]):
            ends = [*trail.ends, "", ""]  # an attempt that runs has none
            found += map(Attempt, trail.starts, trail.replicas, trail.reasons, ends)
        return found[:MAX_ATTEMPTS_LISTED]

    def gaps(self) -> list[tuple[float, float]]:
        """Return when each silence that a change of replica left in the answer began and ended, `MAX_ATTEMPTS_LISTED` at most."""
        return [gap for request in self._engine_requests for gap in request.trail.gaps][:MAX_ATTEMPTS_LISTED]

    def line(self, seq: int, answer: Answer, error: ServingError | None, *, stalled: bool) -> Line:
        """Return the request's line.

        Args:
            error: What ended it, if the fleet or the ingress did.
            stalled: Its client read nothing for too long.
        """
        outcome, status, reason = self._ending(answer, error or self.refusal, stalled=stalled)
        for request in self._engine_requests:
            self._fold(request, outcome)
        self.ended_at = time.monotonic()
        first_at = self._first_token_at
        return Line(
            seq=seq,
            number=self.number,
            time=round(self.time, 3),
            id=self.answer_id,
            key=self._key,
            model=self.model,
            path=self._path,
            stream=self._stream,
            outcome=outcome,
            status=status or None,
            reason=reason or self._reason,
            engine_requests=self._num_engine_requests,
            attempts=self._num_attempts,
            replicas=self._replicas[:MAX_ATTEMPTS_LISTED],
            ends=self._ends[:MAX_ATTEMPTS_LISTED],
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            queued_s=None if self._queued_s is None else round(self._queued_s, 4),
            first_token_s=None if first_at is None else round(first_at - self.arrived_at, 4),
            total_s=round(self.ended_at - self.arrived_at, 4),
            gaps_s=[round(gap_s, 4) for gap_s in self._gaps_s[:MAX_ATTEMPTS_LISTED]],
        )

    def _ending(self, answer: Answer, error: ServingError | None, *, stalled: bool) -> Ending:
        return ending(
            answer,
            error,
            gone=self._gone,
            stalled=stalled,
            started=bool(self._num_attempts) or any(request.trail.replicas for request in self._engine_requests),
            engines_ends=self._engines_ends | {request.trail.end for request in self._engine_requests},
        )

    def _fold(self, request: RequestState, outcome: str) -> None:
        """Add up what the engine request went through; where it runs still, it ends as the whole."""
        trail = request.trail
        end = _ENDS.get(trail.end, trail.end) or outcome
        self._reason = end
        self._engines_ends.add(trail.end)
        self._num_attempts += len(trail.replicas)
        self._output_tokens += len(request.emitted_ids)
        if len(self._replicas) < MAX_ATTEMPTS_LISTED:
            self._replicas += trail.replicas
            self._ends += trail.ends if len(trail.ends) == len(trail.replicas) else [*trail.ends, end]
        self._gaps_s += trail.gaps_s
        if trail.started_at is not None:
            self._queued_s = max(self._queued_s or 0.0, trail.started_at - request.arrived_at)
        if trail.first_token_at is not None:
            self._first_token_at = min(self._first_token_at or trail.first_token_at, trail.first_token_at)
