"""These probes ask what a configuration names outside of this machine, and try its certificates, for `serve-app doctor`.

Each takes `LIMIT_S` at most. What no probe looks at is reported as a warning, never as ok.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

import requests

from serve_app.cli.findings import Finding
from serve_app.config import BatchSettings, TlsSettings, TracingSettings
from serve_app.config.batch_urls import masked
from serve_app.environment import as_typed
from serve_app.errors import ConfigError
from serve_app.links.tls import try_files

LIMIT_S = 5.0
_ANSWER_S = 4
"""Seconds that a client is given, shorter than `LIMIT_S`, so that its own reason is heard."""
T = TypeVar("T")


def within(limit_s: float, ask: Callable[[], T], late: T) -> T:
    """Return the answer of ``ask``, or ``late`` after ``limit_s``: no timeout of a client limits the resolution of names.

    ``ask`` runs in a daemon thread, which is abandoned. It must not raise.
    """
    answers: list[T] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(limit_s)
    return next(iter(answers), late)


def reason_of(error: BaseException) -> str:
    """Return the words of the operating system, which `requests` hides below its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        below = cause.args[0] if cause.args and isinstance(cause.args[0], BaseException) else None
        reason = getattr(below, "reason", None)  # of an error of TLS a word, not an exception
        cause = reason if isinstance(reason, BaseException) else below or cause.__cause__ or cause.__context__
    return type(error).__name__


def certificates(settings: TlsSettings) -> Finding:
    """Let both sides of a link accept each other by the configured files."""
    late = Finding("protocol.tls", "error", f"the files are not read within {LIMIT_S:g} s", "put them on a disk that answers")
    return within(LIMIT_S, lambda: _tried(settings), late)


def _tried(settings: TlsSettings) -> Finding:
    try:
        try_files(settings)
    except ConfigError as exc:
        return Finding("protocol.tls", "error", exc.problem, exc.hint)
    return Finding("protocol.tls", "ok", "two sides with these certificates accept each other")


def collector(settings: TracingSettings) -> Finding:
    """Send the collector of traces a message without spans."""
    late = f"no answer within {LIMIT_S:g} s"
    problem = within(LIMIT_S, lambda: _problem_of_collector(settings.endpoint), late)
    if problem:
        said = f"{settings.endpoint}: {problem}"
        return Finding(
            "tracing", "warning", said, "correct tracing.endpoint, or start the collector: until then traces are dropped"
        )
    return Finding("tracing", "ok", f"{settings.endpoint} takes spans")


def _problem_of_collector(endpoint: str) -> str:
    from opentelemetry.util.re import parse_env_headers

    # An empty message of OTLP is a right one. The exporter adds the headers of the environment, which may hold a token.
    head = {"content-type": "application/x-protobuf", **parse_env_headers(_of_exporter("HEADERS"), liberal=True)}
    client = [_of_exporter(f"CLIENT_{file}") for file in ("CERTIFICATE", "KEY")]
    cert = (client[0], client[1]) if all(client) else client[0] or None
    try:
        answer = requests.post(
            endpoint, data=b"", headers=head, verify=_of_exporter("CERTIFICATE") or True, cert=cert, timeout=_ANSWER_S
        )
    except requests.RequestException as exc:
        return f"no answer: {reason_of(exc)}"
    except (OSError, ValueError) as exc:  # a file that is not there, a header that cannot be sent
        return str(exc)
    if not answer.ok:
        return f"it answers {answer.status_code}"
    kind = answer.headers.get("content-type", "").partition(";")[0].strip()
    is_right = kind.lower() in ("application/x-protobuf", "application/json")
    return "" if is_right else f"it answers with {kind or 'no content type'}, and a collector with application/x-protobuf"


def _of_exporter(name: str) -> str:
    """Return a variable of OpenTelemetry's exporter, that of traces first; "" if it is not set."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def shared_storage(settings: BatchSettings) -> Iterator[Finding]:
    """Connect to the database of batches. An object store is not asked: its client repeats a failed request for longer than a probe may."""
    try:
        url = settings.database_url()
    except ConfigError:
        return  # the file has a finding of its own
    key = "ingress.batch.database"
    late = f"no answer within {LIMIT_S:g} s"
    problem = within(LIMIT_S, lambda: _problem_of_database(url), late)
    if problem:
        way_out = "correct the URL, or start the database: until then batches are answered with 503"
        yield Finding(key, "warning", f"{masked(url)}: {problem}", way_out)
    else:
        yield Finding(key, "ok", f"{masked(url)} takes connections")
    place = urlsplit(settings.files or "")
    if place.scheme != "file":  # a folder is judged with the other folders
        said = f"{place.scheme}://{place.netloc}{place.path} was not looked at"
        yield Finding("ingress.batch.files", "warning", said, "the first upload shows whether the ingress may write there")


def _problem_of_database(url: str) -> str:
    try:
        import psycopg
    except ImportError:
        return f"not looked at: psycopg is not installed ({as_typed('pip')} install 'serve-app[shared-batches]')"
    try:
        psycopg.connect(url, connect_timeout=_ANSWER_S).close()
    except psycopg.Error as exc:
        return masked(" ".join(str(exc).split())) or type(exc).__name__
    return ""
