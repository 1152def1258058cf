"""An exchange is one HTTP request at the ingress: what it asked, its engine requests, what the client was sent, and how it ended.

The app makes one `Exchange` for each request that asks a model. `HeldAnswer` notes in it what was sent to the client. The fleet client
notes the error by which the fleet ended the request: vLLM returns a streaming response before it asks the engine, so that error cannot go
through vLLM. Ledger, traces, receipts and metrics read the exchange; a canary that gives up has it begin again. The exchange itself sends
nothing and knows nothing of vLLM.
"""

import time
from typing import NamedTuple

from serve_app.core.quotas import Prompt
from serve_app.core.request import RequestState
from serve_app.core.tenants import Caller
from serve_app.errors import ServingError
from serve_app.ingress.exchange.engine_requests import EngineRequests
from serve_app.ingress.exchange.outcomes import Ending, Sent, ending
from serve_app.ingress.http.body_fields import MAX_REQUEST_ID_CHARS, BodyFields


class Phase(NamedTuple):
    """A part of a request's time, in monotonic seconds."""

    name: str
    began_at: float
    ended_at: float


class CallersTrace(NamedTuple):
    """The trace that a request's head names, in the words of the head, and the address from which the request came."""

    parent: str
    states: list[str]
    client: str


class Exchange:
    """One HTTP request, from the end of its head to its one ending.

    Args:
        path: The route that the client asked.
        caller: The tenant and key of the request; None where no key is required.
        background: The request is a line of a batch, which gets only places that no other request wants.
    """

    __slots__ = (
        "answered",
        "arrived_at",
        "background",
        "caller",
        "callers_trace",
        "ended_at",
        "error",
        "error_status",
        "gone",
        "headers",
        "id",
        "model",
        "num_logprobs",
        "number",
        "path",
        "prompts",
        "requests",
        "stalled",
        "status",
        "stream",
        "time",
    )

    def __init__(self, path: str, caller: Caller | None = None, *, background: bool = False) -> None:
        self.path, self.caller, self.background = path, caller, background
        self.time, self.arrived_at = time.time(), time.monotonic()
        """When the head had been read, in seconds since the epoch and in monotonic seconds."""
        self.number = 0
        """The number of the request in the ledger of this ingress."""
        self.id = ""
        """The client's id of the request, "" where the client gave none."""
        self.stream = False
        self.prompts: list[Prompt] = []
        """The prompts of the request, and their answers. All that one body asks for is known before the first engine request. Without a
        caller, only beam searches are listed."""
        self.headers: list[tuple[bytes, bytes]] = []
        """What the head of the answer has beside the headers of the route: the rest of the tenant's quotas."""
        self.callers_trace: CallersTrace | None = None
        self.model = ""
        """The model whose front end answers, "" before one is known."""
        self.requests = EngineRequests()
        self.num_logprobs = 0
        """The most log probabilities that prompts and answers may have."""
        self.status = 0
        """The HTTP status that was sent; 0 before a head was sent."""
        self.answered = False
        """Whether the whole answer was sent."""
        self.error_status = 0
        """The status of an error that was sent inside of a stream, 500 if the error has none; 0 if no such error was sent."""
        self.gone: Sent | None = None
        """What the client had been sent when it disconnected before the end; None if it did not."""
        self.stalled = False
        """Whether the ingress dropped the connection because the client read nothing for too long."""
        self.error: ServingError | None = None
        """The error that ended the request; set by `fail`, forgotten by `begin_again`."""
        self.ended_at = self.arrived_at
        """When `end` was called, in monotonic seconds."""

    def asked(self, fields: BodyFields | None) -> None:
        """Note stream and id before the body is checked. An id that will be refused is left out, because it may not be UTF-8."""
        if fields is None:
            return
        self.stream = fields.stream is True
        given = fields.request_id
        if not self.id and isinstance(given, str) and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS:
            self.id = given

    @property
    def key(self) -> str | None:
        """The id of the request's API key; None where no key is required."""
        return None if self.caller is None else self.caller.key.id

    @property
    def tenant(self) -> str | None:
        """The name of the request's tenant; None where no key is required."""
        return None if self.caller is None else self.caller.tenant.name

    @property
    def is_beam_search(self) -> bool:
        return bool(self.prompts) and self.prompts[0].is_beam_search

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self.ended_at > self.arrived_at

    @property
    def sent(self) -> Sent:
        """What the client has been sent so far."""
        return Sent(self.status, self.answered, self.error_status)

    def add_engine_request(self, request: RequestState, answer_id: str) -> None:
        """Take in a new engine request of this HTTP request. ``answer_id``: vLLM's id of the answer."""
        self.requests.add(request, answer_id, num_searches=len(self.prompts) if self.is_beam_search else 1)

    def fail(self, error: ServingError) -> None:
        """Note the error that ends the request. Only the first counts, and none after the whole answer was sent."""
        if self.error is None and not self.answered:
            self.error = error

    def client_gone(self) -> None:
        """Note that the client disconnected. A client that disconnects after the full answer or after an error is not counted as gone."""
        if self.error is None and self.gone is None and not self.answered:
            self.gone = self.sent

    def begin_again(self) -> None:
        """Forget a failed attempt of which the client was sent nothing: another front end answers from the start."""
        self.error = None
        self.prompts.clear()
        self.requests.give_up()

    def end(self) -> Ending:
        """Return how the request ended, and note the time."""
        self.ended_at = time.monotonic()
        return ending(
            self.sent,
            self.error,
            gone=self.gone,
            stalled=self.stalled,
            started=self.requests.started,
            engines_ends=self.requests.engines_ends(),
        )

    @property
    def shown_id(self) -> str:
        """The client's id of the request; without one, vLLM's id of the answer; before that is known, ""."""
        return self.id or self.requests.answer_id

    @property
    def engines_id(self) -> str:
        """The engine's id of the first engine request, which contains the client's id; "-" if there is no engine request."""
        return "-" if self.requests.first is None else self.requests.first.request_id

    def phases(self, ended_at: float) -> list[Phase]:
        """Return the phases of the request. Each begins at the end of the one before it, and the last ends at ``ended_at``.

        The first phases are those of the first engine request: ``intake`` until it arrived, ``queue`` until it was given to a replica,
        ``engine_queue`` until the engine scheduled it (left out where the engine does not report that), ``prefill`` until its first
        token. ``decode`` lasts until the last token of all engine requests, then ``finish`` follows. A request that ended early has only
        the phases that it reached.
        """
        phases: list[Phase] = []
        began_at = self.arrived_at
        for name, until in self.requests.marks():
            if until is None and name == "engine_queue":
                continue
            end = ended_at if until is None else min(max(until, began_at), ended_at)
            phases.append(Phase(name, began_at, end))
            if until is None:
                return phases
            began_at = end
        return [*phases, Phase("finish", began_at, ended_at)]
