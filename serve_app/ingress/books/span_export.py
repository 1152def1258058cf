"""Span export sends finished spans to a collector, through a bounded queue, the SDK's thread and its OTLP exporter, and counts them.

No request waits for a collector. While the collector is unreachable or slow, spans fill the queue, and a span that finds no room is
dropped.
"""

import logging
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from serve_app.config import TracingSettings
from serve_app.ingress.books.request_metrics import SPANS

OUTCOMES = ("exported", "failed", "dropped")
_BATCH = 64  # spans; the thread encodes a batch in about 2 ms, for which it may hold the interpreter against the event loop
_REST_MS = 1000.0
# Seconds to send queued spans at the end: 4,096 spans take 1 s. Together with one `timeout_s`, it must fit into the time that runtime.py
# leaves.
CLOSE_S = 1.5
_LOG_EVERY_S = 60.0


class _NowAndThen(logging.Filter):
    """A filter that passes one error a minute: the exporter logs several lines for each batch that fails."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or (now := time.monotonic()) < self._next_at:
            return False
        self._next_at = now + _LOG_EVERY_S
        return True


class _Exporter(trace_exporter.OTLPSpanExporter):
    """An exporter that counts spans. ``num_done`` of them have left the queue; only the SDK's thread changes that number."""

    num_done = 0
    close_at = float("inf")
    """Monotonic time after which no spans are sent."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            if time.monotonic() < self.close_at:
                result = super().export(spans)
        finally:
            self.num_done += len(spans)
            SPANS.labels("exported" if result is SpanExportResult.SUCCESS else "failed").inc(len(spans))
        return result


class SpanExport(BatchSpanProcessor):
    """The span processor of a tracer provider. ``on_end`` never waits."""

    def __init__(self, settings: TracingSettings) -> None:
        for outcome in OUTCOMES:
            SPANS.labels(outcome)
        logging.getLogger(trace_exporter.__name__).addFilter(_NowAndThen())
        self._exporter = _Exporter(settings.endpoint, timeout=settings.timeout_s)
        self._max_queued = settings.max_queued_spans
        self._num_put = 0
        super().__init__(
            self._exporter,
            max_queue_size=settings.max_queued_spans,
            schedule_delay_millis=_REST_MS,
            max_export_batch_size=_BATCH,
        )

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_put - self._exporter.num_done >= self._max_queued:
            SPANS.labels("dropped").inc()
            return
        self._num_put += 1
        super().on_end(span)

    def shutdown(self) -> None:
        """Send the waiting spans, for some seconds at most, and end."""
        self._exporter.close_at = time.monotonic() + CLOSE_S
        super().shutdown()  # type: ignore[no-untyped-call]  # the SDK's method has no types
