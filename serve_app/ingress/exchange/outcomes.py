"""Outcomes say how an HTTP request ended: one word for its ledger line, a finer one for `serve_app_requests_total`. Pure."""

from collections.abc import Collection
from typing import NamedTuple

from serve_app.books.ledger_lines import Outcome
from serve_app.errors import NoFreePlace, RequestQuarantined, ServingError

WORDS = ("complete", "aborted", "failed", "rejected", "invalid", "blocked", "quarantined", "held_back")
"""All that `Ending.word` returns."""


class Sent(NamedTuple):
    """What the client was sent. ``status`` 0: nothing yet; ``ended``: the whole answer."""

    status: int
    ended: bool
    error_status: int
    """The status of an error that was sent inside of a stream, 500 where the error has none; 0: no such error was sent."""


class Ending(NamedTuple):
    """The outcome with the HTTP status, 0 for none, and the reason, empty for the engine's own."""

    outcome: Outcome
    status: int
    reason: str

    def word(self) -> str:
        """Return the outcome as the series has it: finer than the ledger's, by the reason and by whose fault it was."""
        if self.reason == RequestQuarantined.code:
            return "quarantined" if self.outcome == "failed" else "blocked"
        if self.reason == NoFreePlace.code:
            return "held_back"
        is_clients_fault = self.outcome == "rejected" and 400 <= self.status < 500
        return "invalid" if is_clients_fault else self.outcome


def ending(
    sent: Sent,
    error: ServingError | None,
    *,
    gone: Sent | None,
    stalled: bool,
    started: bool,
    engines_ends: Collection[str],
) -> Ending:
    """Return how a request ended.

    Args:
        error: What ended it, if the fleet or the ingress did.
        gone: What the client had been sent when it went away; None if it stayed.
        stalled: The client read nothing for too long, and its connection was dropped.
        started: A replica was given one of its engine requests.
        engines_ends: Why the engine ended its engine requests; "" for those that it did not end.
    """
    if gone is not None:
        return Ending("aborted", gone.status, "client_stalled" if stalled else "client_gone")
    if error is not None:
        return Ending("failed" if started else "rejected", sent.status or error.http_status, error.code)
    if "error" in engines_ends:
        return Ending("failed", sent.status, "engine_error")
    if "abort" in engines_ends:
        return Ending("aborted", sent.status, "engine_abort")
    if sent.status >= 400:
        return Ending("failed" if sent.status >= 500 else "rejected", sent.status, f"http_{sent.status}")
    if 400 <= sent.error_status < 500 and not started:
        return Ending("rejected", sent.error_status, f"http_{sent.error_status}")
    if sent.error_status or not sent.ended:
        return Ending("failed", sent.status, "internal_error")
    return Ending("complete", sent.status, "")
