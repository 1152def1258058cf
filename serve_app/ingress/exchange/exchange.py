"""One HTTP request at the ingress: what it asked, its engine requests, what the client was sent, and how it ended.

The app makes one `Exchange` for each request that asks a model. `HeldAnswer` writes into it what goes to the client, and the fleet client
the error by which the fleet ended the request: vLLM returns a streaming response before it asks the engine, so that error cannot go through
vLLM. Ledger, traces, receipts, metrics and the canary read it. It knows no sender and nothing of vLLM.
"""

import time
from contextvars import ContextVar
from typing import NamedTuple

from serve_app.errors import ServingError
from serve_app.ingress.exchange.engine_requests import EngineRequests
from serve_app.ingress.exchange.outcomes import Ending, Sent, ending
from serve_app.ingress.http.body_fields import MAX_REQUEST_ID_CHARS, BodyFields


class Phase(NamedTuple):
    """A part of a request's time; monotonic seconds."""

    name: str
    began_at: float
    ended_at: float


class CallersTrace(NamedTuple):
    """The trace that a request's head names, as the head writes it, and the address from which the request came."""

    parent: str
    states: list[str]
    client: str


class Exchange:
    """One HTTP request, from the end of its head to its one ending.

    Args:
        path: The route that the client asked.
        key: The name of the request's API key, None where no key is asked for.
        background: It is a line of a batch, which gets only places that no other request wants.
    """

    __slots__ = (
        "arrived_at",
        "background",
        "callers_trace",
        "ended",
        "ended_at",
        "error",
        "error_status",
        "gone",
        "id",
        "key",
        "model",
        "number",
        "path",
        "requests",
        "stalled",
        "status",
        "stream",
        "time",
    )

    def __init__(self, path: str, key: str | None = None, *, background: bool = False) -> None:
        self.path, self.key, self.background = path, key, background
        self.time, self.arrived_at = time.time(), time.monotonic()
        """When the head had been read: seconds since the epoch, and monotonic ones."""
        self.number = 0
        """Its number in the ledger of this ingress."""
        self.id = ""
        """The client's id of the request, "" where the client gave none."""
        self.stream = False
        self.callers_trace: CallersTrace | None = None
        self.model = ""
        """The model whose front end answers, "" before one is known."""
        self.requests = EngineRequests()
        self.status = 0
        """The HTTP status that was sent, 0 before one was."""
        self.ended = False
        """The whole answer was sent."""
        self.error_status = 0
        """The status of an error that was sent inside of a stream, 500 where the error has none; 0: no such error was sent."""
        self.gone: Sent | None = None
        """What the client had been sent when it disconnected before the end."""
        self.stalled = False
        """The client read nothing for too long, and the ingress dropped its connection."""
        self.error: ServingError | None = None
        """Why the fleet or the ingress ended the request."""
        self.ended_at = self.arrived_at

    def asked(self, fields: BodyFields | None) -> None:
        """Note what the body says, before it is judged: an id that will be refused may not be UTF-8."""
        if fields is None:
            return
        self.stream = fields.stream is True
        given = fields.request_id
        if not self.id and isinstance(given, str) and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS:
            self.id = given

    @property
    def sent(self) -> Sent:
        """What the client was sent so far."""
        return Sent(self.status, self.ended, self.error_status)

    def client_gone(self) -> None:
        """Note that the client disconnected. A client that disconnects after the full answer or after an error is not counted as gone."""
        if self.error is None and self.gone is None and not self.ended:
            self.gone = self.sent

    def begin_again(self) -> None:
        """Forget a try of which the client was sent nothing: another front end answers."""
        self.error = None
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
    def answer_id(self) -> str:
        """The client's id of the request, else vLLM's of the answer, else ""."""
        return self.id or self.requests.answer_id

    @property
    def engines_id(self) -> str:
        """The engine's id of the first engine request, which holds the client's; "-" without one."""
        return "-" if self.requests.first is None else self.requests.first.request_id

    def phases(self, ended_at: float) -> list[Phase]:
        """Return the phases of the request, each beginning where the one before it ends; the last ends at ``ended_at``.

        They are those of the first engine request: ``intake`` until it came, ``queue`` until it was given to a replica,
        ``engine_queue`` until the engine scheduled it (left out where the engine does not report that), ``prefill`` until its first
        token. Then ``decode`` to the last token of all engine requests, and ``finish``. A request that ended early has the first of them.
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


current_exchange: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""The HTTP request that the running code answers; None outside of one."""
