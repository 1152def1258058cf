"""Outcomes name how an HTTP request ended: one word for its ledger line, a finer word for `serve_app_requests_total`. Pure."""

from collections.abc import Collection
from typing import NamedTuple

from serve_app.books.ledger_lines import Outcome
from serve_app.errors import NoFreePlace, QuotaExceeded, RequestQuarantined, ServingError

WORDS = ("complete", "aborted", "failed", "rejected", "invalid", "blocked", "quarantined", "held_back", "over_quota")
"""All words that `Ending.word` returns."""


class Sent(NamedTuple):
    """What the client was sent. ``status`` is 0 if nothing was; ``ended`` if the whole answer was."""

    status: int
    ended: bool
    error_status: int
    """The status of an error that was sent inside of a stream, 500 if the error has none; 0 if no such error was sent."""


class Ending(NamedTuple):
    """The outcome with the HTTP status, 0 if none was sent, and the reason, empty where the engine's own reason applies."""

    outcome: Outcome
    status: int
    reason: str

    def word(self) -> str:
        """Return the outcome in the words of the series, which distinguish reasons and whose fault it was, as the ledger's do not."""
        if self.reason == RequestQuarantined.code:
            return "quarantined" if self.outcome == "failed" else "blocked"
        if self.reason == NoFreePlace.code:
            return "held_back"
        if self.reason == QuotaExceeded.code:
            return "over_quota"
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
        error: The error by which the fleet or the ingress ended the request, if one did.
        gone: What the client had been sent when it disconnected; None if it did not disconnect.
        stalled: The connection was dropped because the client read nothing for too long.
        started: One of its engine requests was given to a replica.
        engines_ends: The reasons for which engines ended its engine requests; "" for a request that no engine ended.
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
