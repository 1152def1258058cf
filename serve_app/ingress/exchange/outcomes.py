"""How an HTTP request ended, in one word for its ledger line and in one for `serve_app_requests_total`. Pure."""

from collections.abc import Collection
from typing import NamedTuple

from serve_app.books.ledger_lines import Outcome
from serve_app.errors import NoFreePlace, RequestQuarantined, ServingError

WORDS = ("complete", "aborted", "failed", "rejected", "invalid", "blocked", "quarantined", "held_back")
"""All that `Ending.word` returns."""


class Answer(NamedTuple):
    """What went to the client. ``status`` 0: nothing yet."""

    status: int
    ended: bool
    told_status: int
    """The status of the error that was told after the begin of a stream, 500 where it has none; 0: no error was told."""


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
    answer: Answer,
    error: ServingError | None,
    *,
    gone: Answer | None,
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
        return Ending("failed" if started else "rejected", answer.status or error.http_status, error.code)
    if "error" in engines_ends:
        return Ending("failed", answer.status, "engine_error")
    if "abort" in engines_ends:
        return Ending("aborted", answer.status, "engine_abort")
    if answer.status >= 400:
        return Ending("failed" if answer.status >= 500 else "rejected", answer.status, f"http_{answer.status}")
    if 400 <= answer.told_status < 500 and not started:
        return Ending("rejected", answer.told_status, f"http_{answer.told_status}")
    if answer.told_status or not answer.ended:
        return Ending("failed", answer.status, "internal_error")
    return Ending("complete", answer.status, "")
