"""`TracingSettings` says where traces go, and which requests are traced."""

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import wrong


def _checked_endpoint(url: str) -> str:
    example = "for example http://collector:4318/v1/traces"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises if the port is not a number
    except ValueError as exc:
        raise wrong("", f"is {url!r}, which is not a URL: {exc}", example) from None
    if parts.username is not None or parts.password is not None:
        # The message does not show the value, because it holds a secret.
        raise wrong("", "holds a user name or a password", "set OTEL_EXPORTER_OTLP_HEADERS in the ingress's environment instead")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong("", f"is {url!r}, which is not a URL of http or https", example)
    if parts.path in ("", "/"):
        raise wrong("", f"is {url!r}, which has no path", f"write {parts.scheme}://{parts.netloc}/v1/traces")
    if parts.query or parts.fragment:
        raise wrong("", f"is {url!r}, which has something behind its path", example)
    return url


def _checked_network(network: str) -> str:
    try:
        ipaddress.ip_network(network)
    except ValueError as exc:
        raise wrong(
            "", f"is {network!r}, which is not a network: {exc}", "for example 10.0.0.0/8, or one address: 10.1.2.3"
        ) from None
    return network


class TracingSettings(Section):
    """Traces by OpenTelemetry: spans of a request's phases, sent by OTLP over HTTP, without any of its text."""

    endpoint: Annotated[str, AfterValidator(_checked_endpoint)]
    """URL of the collector with its path, such as http://collector:4318/v1/traces."""
    share: Real = Field(default=0.05, ge=0, le=1)
    """Share of ordinary requests whose traces are kept. Traces of requests that failed, were slow, or were resumed are always kept."""
    slow_s: Real = Field(default=60.0, gt=0)
    """A request counts as slow if its answer ends so many seconds after its head, or later."""
    slow_first_token_s: Real = Field(default=5.0, gt=0)
    """A request counts as slow if its first token comes so many seconds after its head, or later."""
    trusted_networks: tuple[Annotated[str, AfterValidator(_checked_network)], ...] = ()
    """Networks whose clients may set the trace to continue (`traceparent`), and whether it is kept. Other clients' traces become links."""
    max_queued_spans: Int = Field(default=4096, ge=256, le=1_000_000)
    """Most spans that wait for the collector in one ingress, about 2 kB each. Further spans are dropped and counted."""
    timeout_s: Real = Field(default=3.0, gt=0, le=3)
    """Seconds for which one batch of spans is tried, including retries. Then its spans are dropped and counted. A stopping ingress has 5
    seconds for its last spans, and waits for the batch under way: a longer try would lose the spans queued behind it."""
