"""A tracer makes the trace of an HTTP request at the end of the request, from the times in its `Exchange`, and only if it will be kept.

    POST /v1/chat/completions     SERVER; an event `route` for each attempt
      intake  queue  engine_queue  prefill  decode  finish      one after the other
                                              resume            each silence that a change of replica left in the answer

A tracer does nothing per token, and for a trace that is not kept it makes only this decision. `span_export.py` sends. docs/tracing.md
describes the attributes; none holds text of a prompt or an answer, a token, or an API key.
"""

import ipaddress
import random

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from serve_app import VERSION
from serve_app.books.ledger_lines import LedgerLine
from serve_app.config import TracingSettings
from serve_app.core.events import LinkEnd
from serve_app.ingress.books.request_metrics import TRACED
from serve_app.ingress.books.span_export import SpanExport
from serve_app.ingress.exchange.exchange import CallersTrace, Exchange
from serve_app.ingress.exchange.outcomes import Ending

KEPT = ("error", "resumed", "slow", "caller", "share", "no")
"""Why a trace is kept; `caller`: a trusted caller keeps its own part of the trace."""

_ERRORS = frozenset({"failed", "rejected", "quarantined"})  # without errors of clients, which could fill the collector
_LOSSES = frozenset(end.name.lower() for end in LinkEnd)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracer:
    """The traces of one ingress.

    Args:
        service: The name of the service in the collector.
        ingress_id: The instance of the service.
    """

    def __init__(self, settings: TracingSettings, *, service: str, ingress_id: str) -> None:
        self._settings = settings
        self._trusted = [ipaddress.ip_network(network) for network in settings.trusted_networks]
        resource = {"service.name": service, "service.instance.id": ingress_id, "service.version": VERSION}
        self._provider = TracerProvider(ALWAYS_ON, Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(SpanExport(settings))
        self._tracer = self._provider.get_tracer("serve_app", VERSION)
        for why in KEPT:
            TRACED.labels(why)

    def begin(self, exchange: Exchange, scope: Scope) -> None:
        """Note the caller's trace, if the request's head names one."""
        parents = [value for name, value in scope["headers"] if name == b"traceparent"]
        if len(parents) == 1:  # W3C: if there are several, none is valid
            states = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
            client = scope.get("client")
            exchange.callers_trace = CallersTrace(parents[0].decode("latin-1"), states, client[0] if client else "")

    def end(self, exchange: Exchange, line: LedgerLine) -> None:
        """Make and queue the spans of a request that has ended, if its trace is kept."""
        caller = None if (named := exchange.callers_trace) is None else _context_of(named)
        trusted = caller is not None and named is not None and self._trusts(named.client)
        why = self._why(line, caller if trusted else None)
        TRACED.labels(why).inc()
        if why != "no":
            self._make_spans(exchange, line, why, caller, trusted=trusted)

    def close(self) -> None:
        """Send what is queued; takes seconds at most."""
        self._provider.shutdown()

    def _trusts(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client)
        except ValueError:  # a line of a batch has no client
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._trusted)

    def _why(self, line: LedgerLine, caller: SpanContext | None) -> str:
        limits = self._settings
        if Ending(line.outcome, line.status or 0, line.reason).word() in _ERRORS:
            return "error"
        if line.gaps_s or not _LOSSES.isdisjoint(line.ends):
            return "resumed"
        if line.total_s >= limits.slow_s or (line.first_token_s or 0.0) >= limits.slow_first_token_s:
            return "slow"
        if caller is not None:
            return "caller" if caller.trace_flags.sampled else "no"
        return "share" if random.random() < limits.share else "no"

    def _make_spans(self, exchange: Exchange, line: LedgerLine, why: str, caller: SpanContext | None, *, trusted: bool) -> None:
        def ns(at: float) -> int:
            return int((exchange.time + at - exchange.arrived_at) * 1e9)

        root = self._tracer.start_span(
            f"POST {line.path}",
            _under(trace.NonRecordingSpan(caller)) if caller is not None and trusted else Context(),
            SpanKind.SERVER,
            _attributes(exchange, line, why),
            [Link(caller)] if caller is not None and not trusted else [],
            ns(exchange.arrived_at),
        )
        for attempt in exchange.requests.attempts():
            attributes = {
                "serve_app.replica": attempt.replica,
                "serve_app.route_reason": attempt.reason,
                "serve_app.end": attempt.end,
            }
            root.add_event("route", attributes, ns(attempt.at))
        for name, began_at, ended_at in exchange.phases(exchange.ended_at):
            span = self._tracer.start_span(name, _under(root), start_time=ns(began_at))
            for lost_at, resumed_at in exchange.requests.gaps() if name == "decode" else ():
                self._tracer.start_span("resume", _under(span), start_time=ns(lost_at)).end(ns(resumed_at))
            span.end(ns(ended_at))
        if line.outcome == "failed" or (line.status or 0) >= 500:
            root.set_status(Status(StatusCode.ERROR, line.reason))
        root.end(ns(exchange.ended_at))


def _under(span: Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _context_of(named: CallersTrace) -> SpanContext | None:
    """Return the span that the caller names; None if the header is not in W3C's form."""
    found = _PROPAGATOR.extract({"traceparent": [named.parent], "tracestate": list(named.states)}, Context())
    context = trace.get_current_span(found).get_span_context()
    return context if context.is_valid else None


def _attributes(exchange: Exchange, line: LedgerLine, why: str) -> dict[str, AttributeValue]:
    """Return OpenTelemetry's attributes for HTTP and generative AI, and ours. They count output tokens but contain none."""
    trail = None if exchange.requests.first is None else exchange.requests.first.trail
    attributes: dict[str, AttributeValue | None] = {
        "http.request.method": "POST",
        "http.route": line.path,
        "http.response.status_code": line.status,
        "error.type": None if line.outcome == "complete" else line.reason,
        "gen_ai.operation.name": _OPERATIONS.get(line.path),
        "gen_ai.request.model": line.model,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": line.output_tokens,
        "serve_app.request_id": line.id,
        "serve_app.api_key": line.key,
        "serve_app.tenant": line.tenant,
        "serve_app.stream": line.stream,
        "serve_app.outcome": line.outcome,
        "serve_app.reason": line.reason,
        "serve_app.attempts": line.attempts,
        "serve_app.engine_requests": line.engine_requests,
        "serve_app.expected_prefix_hit_tokens": None if trail is None else trail.expected_hit_tokens,
        "serve_app.prefix_hit_tokens": None if trail is None else trail.cached_tokens,
        "serve_app.kept": why,
    }
    return {name: value for name, value in attributes.items() if value is not None}
