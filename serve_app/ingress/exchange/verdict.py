"""Why the fleet has ended an HTTP request, told past vLLM: it returns a streaming response before it asks the engine.

The outer app puts one ``Verdict`` per HTTP request into a context variable, ``HeldAnswer`` holds the status line back until the first byte
of the body; the fleet client writes an error here when it ends a request before that.
"""

from contextvars import ContextVar
from typing import TYPE_CHECKING

from serve_app.core.request import RequestState
from serve_app.errors import ServingError
from serve_app.ingress.exchange.account import Account
from serve_app.ingress.exchange.outcomes import Answer, Ending, ending

if TYPE_CHECKING:
    from serve_app.ingress.exchange.held_answer import HeldAnswer

MAX_WATCHED = 4
"""Engine requests of one HTTP request that are watched; a beam search makes thousands."""


class Verdict:
    """All engine requests of one HTTP request (prompt lists, n>1, steps of a beam search) share it."""

    __slots__ = ("account", "background", "engine_requests", "error", "first", "gone", "model", "num_requests", "repeatable")

    def __init__(self, account: Account | None = None, *, background: bool = False) -> None:
        self.error: ServingError | None = None
        self.background = background
        """It is a batch's, which has only places that nobody else wants."""
        self.account = account
        """For the ledger, traces and a receipt; None where nobody wants one."""
        self.model = ""
        """The front end that answers; "" before one is known."""
        self.first: RequestState | None = None
        """The first engine request of the HTTP request; others of it are not started before this one."""
        self.gone: Answer | None = None
        """What the client had been sent when it went away."""
        self.repeatable: HeldAnswer | None = None
        """The answer, if its middle may be written by `streaming`."""
        self.num_requests = 0
        """Engine requests that have come of it; counted where ``repeatable`` is."""
        self.engine_requests: list[RequestState] | None = None
        """The first of them, where somebody watches."""

    def began(self, request: RequestState, answer_id: str) -> None:
        """An engine request has come of it; ``answer_id`` is vLLM's for the answer."""
        if self.first is None:
            self.first = request
        if self.account is not None:
            self.account.add(request, answer_id)
        if self.engine_requests is not None and len(self.engine_requests) < MAX_WATCHED:
            self.engine_requests.append(request)

    @property
    def request_id(self) -> str:
        """The engine's id of its first engine request, which holds the client's; "-" where there is none."""
        return "-" if self.first is None else self.first.request_id

    def client_gone(self, answer: Answer) -> None:
        """The client went away when it had been sent ``answer``; after the whole answer, or an error, that is nothing to note."""
        if self.error is None and self.gone is None and not answer.ended:
            self.gone = answer
            if self.account is not None:
                self.account.client_gone(answer)

    def ending(self, answer: Answer, refusal: ServingError | None) -> Ending:
        """Return how the HTTP request ended. ``refusal`` is what the ingress refused it with, if it did."""
        trail = None if self.first is None else self.first.trail
        return ending(
            answer,
            self.error or refusal,
            gone=self.gone,
            stalled=False,
            started=trail is not None and bool(trail.replicas),
            engines_ends=() if trail is None else (trail.end,),
        )

    def begin_again(self) -> None:
        """Nothing of an answer has begun, and another front end answers."""
        self.error, self.num_requests, self.engine_requests, self.first = None, 0, None, None
        if self.account is not None:
            self.account.begin_again()


current_verdict: ContextVar[Verdict | None] = ContextVar("verdict", default=None)
