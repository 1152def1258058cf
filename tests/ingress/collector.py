"""An OpenTelemetry collector for tests: it takes OTLP over HTTP, decodes it by OpenTelemetry's own messages, and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


def attributes(pairs: Any) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource by name."""
    found: dict[str, Any] = {}
    for pair in pairs:
        assert isinstance(pair, KeyValue)
        found[pair.key] = _value(pair.value)
    return found


@dataclass
class Collector:
    """``status`` is what it answers with; while ``answers`` is not set it answers nothing."""

    url: str = ""
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(of_resource.resource.attributes))
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]

    def traces(self) -> dict[str, list[Span]]:
        """Return the spans by the client's id of their request, each trace's by the time at which they began."""
        roots = {attributes(span.attributes).get("serve_app.request_id"): span for span in self.spans if span.kind}
        roots = {name: span for name, span in roots.items() if span.kind == Span.SPAN_KIND_SERVER}
        by_start = sorted(self.spans, key=lambda span: span.start_time_unix_nano)
        return {
            str(name): [root, *(span for span in by_start if span.trace_id == root.trace_id and span is not root)]
            for name, root in roots.items()
        }


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on loopback."""
    under_test = Collector()
    under_test.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            under_test.answers.wait(10)
            if under_test.status == 200:
                under_test.take(body)
            self.send_response(under_test.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        under_test.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield under_test
        finally:
            under_test.answers.set()
            server.shutdown()
            thread.join()
