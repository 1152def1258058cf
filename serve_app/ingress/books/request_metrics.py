"""Request metrics count each HTTP request once, at its end."""

from collections.abc import Iterable

from serve_app.books import series
from serve_app.core.fair_tags import priority_of_tag
from serve_app.errors import (
    CannotStartInTime,
    IngressOverloaded,
    NoReplica,
    QueueFull,
    ReplicaLost,
    ServerStopping,
    TooManyConnections,
)
from serve_app.ingress.books.key_latencies import KeyLatencies
from serve_app.ingress.books.shown_names import CallerNames
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.outcomes import WORDS, Ending

_requests = series.counter("requests")
_errors = series.counter("request_errors")
_by_key = series.counter("key_requests")
_queue = series.histogram("queue_seconds", series.WAIT_BOUNDS_S)
_ttft = series.histogram("ttft_seconds", series.TTFT_BOUNDS_S)
TRACED = series.counter("traced_requests")
SPANS = series.counter("spans")
"""Both series have no samples if no traces are made."""

_NO_ERROR = ("complete", "aborted")
"""Outcomes that are no error: the client got its answer, or disconnected."""


_WATCHED = (NoReplica, QueueFull, CannotStartInTime, TooManyConnections, IngressOverloaded, ReplicaLost, ServerStopping)
"""Errors that alerts read. Their series begin at zero, because Prometheus sees no increase in a series that begins with 1."""


def begin_at_zero(models: Iterable[str]) -> None:
    """Make the series of every outcome, and of the errors and times that alerts read, before the first request."""
    for model in models:
        for word in WORDS:
            _requests.labels(model, word)
        for error in _WATCHED:
            _errors.labels(model, error.code)
        _ttft.labels(model, "interactive")


def count_request(exchange: Exchange, ending: Ending, latencies: KeyLatencies, names: CallerNames) -> None:
    """Count an HTTP request that has ended now. ``names``: how series show its caller."""
    outcome, model, first = ending.word(), exchange.model, exchange.requests.first
    _requests.labels(model, outcome).inc()
    if outcome not in _NO_ERROR:
        _errors.labels(model, ending.reason).inc()
    if (caller := exchange.caller) is not None:
        _by_key.labels(*names.labels(caller), model, outcome).inc()
        latencies.note(exchange, caller.key.id, outcome)
    if first is not None and (started_at := first.trail.started_at) is not None:
        _queue.labels(model).observe(started_at - first.arrived_at)
    if first is not None and (first_at := first.trail.first_token_at) is not None:
        _ttft.labels(model, priority_of_tag(first.priority)).observe(first_at - first.arrived_at)
