"""Series of HTTP requests, each counted once, at its end."""

import time
from collections.abc import Iterable

from serve_app.books import series
from serve_app.errors import IngressOverloaded, NoReplica, QueueFull, ReplicaLost, ServerStopping, TooManyConnections
from serve_app.ingress.books.key_latencies import KeyLatencies
from serve_app.ingress.exchange.outcomes import WORDS, Ending
from serve_app.ingress.exchange.verdict import Verdict

_requests = series.counter("requests")
_errors = series.counter("request_errors")
_by_key = series.counter("key_requests")
_queue = series.histogram("queue_seconds", series.WAIT_BOUNDS_S)
TRACED = series.counter("traced_requests")
SPANS = series.counter("spans")
"""Both without samples where no traces are made."""

_NO_ERROR = ("complete", "aborted")
"""Outcomes that are as the client wanted, or of its own making."""


_WATCHED = (NoReplica, QueueFull, TooManyConnections, IngressOverloaded, ReplicaLost, ServerStopping)
"""Errors that are there at zero: Prometheus sees no increase in a series that begins with 1."""


def begin_at_zero(models: Iterable[str]) -> None:
    """Show every outcome and the errors that alerts ask for, before the first of them."""
    for model in models:
        for word in WORDS:
            _requests.labels(model, word)
        for error in _WATCHED:
            _errors.labels(model, error.code)


def count_request(verdict: Verdict, ending: Ending, key: str | None, latencies: KeyLatencies) -> None:
    """Count an HTTP request that ends now. ``key`` is the name of its API key, None where none is asked for."""
    outcome = ending.word()
    _requests.labels(verdict.model, outcome).inc()
    if outcome not in _NO_ERROR:
        _errors.labels(verdict.model, ending.reason).inc()
    if key is not None:
        _by_key.labels(key, verdict.model, outcome).inc()
        latencies.note(key, verdict, outcome, now=time.monotonic())
    if verdict.first is not None and (started_at := verdict.first.trail.started_at) is not None:
        _queue.labels(verdict.model).observe(started_at - verdict.first.arrived_at)
