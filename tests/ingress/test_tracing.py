"""Traces arrive at a real OTLP endpoint, from an ingress with vLLM's own front end and fake engines."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from prometheus_client import REGISTRY
from pydantic import ValidationError

from serve_app.config import TracingSettings
from serve_app.config.timeouts import SHUTDOWN_MARGIN_S
from serve_app.ingress.books.span_export import CLOSE_S, OUTCOMES, SpanExport
from serve_app.ingress.runtime import LAST_WORDS_S
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.collector import Collector, attributes, collector
from tests.ingress.test_ledger import KEY, SECRET_TEXT, Ingress, serving

pytestmark = pytest.mark.engine

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@pytest.fixture
def endpoint() -> Iterator[Collector]:
    with collector() as running:
        yield running


def counted(series: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"serve_app_{series}_total", labels) or 0.0


async def ask(ingress: Ingress, request_id: str, *, tokens: int = 2, headers: dict[str, str] | None = None) -> str:
    """Return the answer to a request of so many tokens, computed in one step."""
    told = {"authorization": f"Bearer {KEY}", "x-request-id": request_id, **(headers or {})}
    body = {"model": MODEL, "prompt": SECRET_TEXT, "temperature": 0, "max_tokens": tokens}
    asked = asyncio.create_task(ingress.http.post("/v1/completions", json=body, headers=told))
    engine = ingress.replicas["a"].engine
    await until(lambda: engine.running)
    engine.step(tokens)
    response = await asked
    assert response.status_code == 200
    return str(response.json()["choices"][0]["text"])


async def lose_the_replica(ingress: Ingress) -> str:
    """Let a stream of four tokens go on at another replica after two; return the answer's text."""
    answer = asyncio.create_task(ingress.post(request_id="resumed", max_tokens=4, stream=True))
    await until(lambda: any(replica.engine.running for replica in ingress.replicas.values()))
    first = ingress.holder()
    (other,) = ingress.replicas.keys() - {first}
    before = ingress.front.client.fleet.tally.output_tokens
    ingress.replicas[first].engine.step(2)
    await until(lambda: ingress.front.client.fleet.tally.output_tokens == before + 2)
    ingress.replicas[first].stop_listening()
    await until(lambda: ingress.replicas[other].engine.running)
    ingress.replicas[other].engine.step(2)
    return (await answer).text


@in_loop
async def test_a_trace_has_the_phases_of_its_request_and_no_word_of_its_text(
    model: Path, tmp_path: Path, endpoint: Collector
) -> None:
    async with serving(model, tmp_path, tracing={"endpoint": endpoint.url, "share": 1}) as ingress:
        await ingress.join("a")
        text = await ask(ingress, "plain")
        ((line,), _) = await ingress.stop()
    (spans,) = endpoint.traces().values()
    root, *phases = spans
    assert (root.name, root.kind, root.status.code) == ("POST /v1/completions", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert [span.name for span in phases] == ["intake", "queue", "prefill", "decode", "finish"]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == ends[:-1]
    assert ends[-1] == root.end_time_unix_nano
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(line.total_s * 1e9, abs=1e5)
    told = attributes(root.attributes)
    assert told.pop("serve_app.expected_prefix_hit_tokens") == 0
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": 2,
        "serve_app.request_id": "plain",
        "serve_app.api_key": line.key,
        "serve_app.tenant": line.tenant,
        "serve_app.stream": False,
        "serve_app.outcome": "complete",
        "serve_app.reason": "length",
        "serve_app.attempts": 1,
        "serve_app.engine_requests": 1,
        "serve_app.kept": "share",
    }
    (route,) = root.events
    assert (route.name, attributes(route.attributes)["serve_app.replica"]) == ("route", "a")
    assert endpoint.resources[0]["service.instance.id"] == "ingress-1"
    sent = b"".join(endpoint.bodies)
    assert not any(secret.encode() in sent for secret in (SECRET_TEXT, KEY, text))


@in_loop
async def test_failed_resumed_and_slow_requests_are_kept_and_of_the_rest_the_share(
    model: Path, tmp_path: Path, endpoint: Collector
) -> None:
    before = {why: counted("traced_requests", kept=why) for why in ("error", "resumed", "slow", "share", "no")}
    tracing = {"endpoint": endpoint.url, "share": 0, "slow_first_token_s": 1.0}
    async with serving(model, tmp_path, tracing=tracing, timeouts={"no_replica_s": 0.1}) as ingress:
        assert (await ingress.post(request_id="no-replica", max_tokens=2)).status_code == 503
        assert (await ingress.post(request_id="clients-fault", max_tokens=-1)).status_code == 400
        await ingress.join("a")
        await ask(ingress, "ordinary")
        slow = asyncio.create_task(ingress.post(request_id="slow", max_tokens=1))
        engine = ingress.replicas["a"].engine
        await until(lambda: engine.running)
        asyncio.get_running_loop().call_later(1.0, engine.step)
        await slow
        await ingress.join("b")
        assert "data: [DONE]" in await lose_the_replica(ingress)
        await ingress.stop()
    traces = endpoint.traces()
    assert traces.keys() == {"no-replica", "slow", "resumed"}
    root, *phases = traces["no-replica"]
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "no_replica")
    assert attributes(root.attributes)["error.type"] == "no_replica"
    assert [span.name for span in phases] == ["intake", "queue"]
    root, *phases = traces["resumed"]
    (decode,) = (span for span in phases if span.name == "decode")
    (resume,) = (span for span in phases if span.name == "resume")
    assert resume.parent_span_id == decode.span_id
    assert decode.start_time_unix_nano <= resume.start_time_unix_nano <= resume.end_time_unix_nano <= decode.end_time_unix_nano
    routes = [attributes(event.attributes) for event in root.events]
    assert {route["serve_app.replica"] for route in routes} == {"a", "b"}
    assert [route["serve_app.end"] for route in routes] == ["broke_off", "length"]
    kept = {why: counted("traced_requests", kept=why) - was for why, was in before.items()}
    assert kept == {"error": 1, "resumed": 1, "slow": 1, "share": 0, "no": 2}


@pytest.mark.parametrize(
    ("network", "traceparent", "kept"),
    [
        ("127.0.0.0/8", SAMPLED, "caller"),
        ("127.0.0.0/8", NOT_SAMPLED, None),
        ("10.0.0.0/8", SAMPLED, None),
    ],
)
@in_loop
async def test_only_a_trusted_caller_decides_that_a_trace_is_kept(
    model: Path, tmp_path: Path, endpoint: Collector, network: str, traceparent: str, kept: str | None
) -> None:
    tracing = {"endpoint": endpoint.url, "share": 0, "trusted_networks": [network]}
    async with serving(model, tmp_path, tracing=tracing) as ingress:
        await ingress.join("a")
        await ask(ingress, "called", headers={"traceparent": traceparent, "tracestate": "vendor=1"})
        await ingress.stop()
    roots = [spans[0] for spans in endpoint.traces().values()]
    assert [attributes(root.attributes)["serve_app.kept"] for root in roots] == ([kept] if kept else [])
    for root in roots:
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, CALLER, "vendor=1")
        assert list(root.links) == []


@in_loop
async def test_a_strangers_trace_is_a_link_and_nonsense_is_nothing(model: Path, tmp_path: Path, endpoint: Collector) -> None:
    async with serving(model, tmp_path, tracing={"endpoint": endpoint.url, "share": 1}) as ingress:
        await ingress.join("a")
        await ask(ingress, "stranger", headers={"traceparent": SAMPLED, "tracestate": "vendor=1"})
        await ask(ingress, "nonsense", headers={"traceparent": "00-" + "z" * 32})
        await ingress.stop()
    traces = endpoint.traces()
    (link,) = traces["stranger"][0].links
    assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE, CALLER)
    assert traces["stranger"][0].trace_id.hex() != TRACE
    assert (list(traces["nonsense"][0].links), traces["nonsense"][0].parent_span_id) == ([], b"")


@pytest.mark.parametrize("fault", ["gone", "broken", "silent"])
@in_loop
async def test_no_request_suffers_from_a_collector(model: Path, tmp_path: Path, endpoint: Collector, fault: str) -> None:
    """Each of ten requests makes six spans."""
    tracing: dict[str, Any] = {"endpoint": endpoint.url, "share": 1, "timeout_s": 0.2}
    if fault == "gone":
        tracing["endpoint"] = "http://127.0.0.1:9/v1/traces"
    endpoint.status = 400 if fault == "broken" else 200
    if fault == "silent":
        endpoint.answers.clear()
    before = {outcome: counted("spans", outcome=outcome) for outcome in OUTCOMES}
    async with serving(model, tmp_path, tracing=tracing) as ingress:
        await ingress.join("a")
        for number in range(10):
            await ask(ingress, f"r{number}", tokens=1)
        await ingress.stop()
    fate = {outcome: counted("spans", outcome=outcome) - was for outcome, was in before.items()}
    assert fate == {"exported": 0, "failed": 60, "dropped": 0}


def test_spans_for_which_there_is_no_room_are_dropped_and_counted(endpoint: Collector) -> None:
    before = {outcome: counted("spans", outcome=outcome) for outcome in OUTCOMES}
    endpoint.answers.clear()
    provider = TracerProvider(ALWAYS_ON, shutdown_on_exit=False)
    # Longer than a configuration may say: on a busy machine 400 spans can take seconds, and the first batch must wait meanwhile.
    patient = TracingSettings(endpoint=endpoint.url, max_queued_spans=256).model_copy(update={"timeout_s": 60.0})
    provider.add_span_processor(SpanExport(patient))
    for _ in range(400):
        provider.get_tracer("test").start_span("one").end()
    endpoint.answers.set()
    until = time.monotonic() + 60
    while counted("spans", outcome="exported") < before["exported"] + 256 and time.monotonic() < until:
        time.sleep(0.01)
    provider.shutdown()
    fate = {outcome: counted("spans", outcome=outcome) - was for outcome, was in before.items()}
    assert fate == {"exported": 256, "failed": 0, "dropped": 144}
    assert len(endpoint.spans) == 256


def test_a_stopping_ingress_has_the_time_for_its_last_spans_whatever_is_configured(endpoint: Collector) -> None:
    """After the drain come errors for those who still wait; then a batch of spans may be under way, and the others are behind it."""
    longest = TracingSettings(endpoint=endpoint.url, timeout_s=3)
    assert LAST_WORDS_S + longest.timeout_s + CLOSE_S < SHUTDOWN_MARGIN_S
    with pytest.raises(ValidationError, match="less than or equal to 3"):
        TracingSettings(endpoint=endpoint.url, timeout_s=3.1)
