"""Anthropic's Messages: vLLM's own handlers over a fleet of fake engines, with errors in the form of that API."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.errors import QueueFull, ReplicaLost
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer
from serve_app.ingress.http.error_answers import answer_of
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import serving

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def events(text: str) -> list[tuple[str, Any]]:
    """Return name and data of each event."""
    parts = [part.split("\n") for part in text.split("\n\n") if part.startswith("event: ")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


@in_loop
async def test_a_message_is_answered_whole_and_as_a_stream_and_its_tokens_are_counted(tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, _, _):
        whole = (await http.post("/v1/messages", json=ASK)).json()
        assert (whole["type"], whole["role"], whole["stop_reason"], whole["usage"]["output_tokens"]) == (
            *("message", "assistant", "max_tokens"),
            5,
        )
        streamed = events((await http.post("/v1/messages", json=ASK | {"stream": True})).text)
        assert [streamed[0][0], streamed[-1][0]] == ["message_start", "message_stop"]
        texts = [data["delta"]["text"] for name, data in streamed if name == "content_block_delta"]
        assert "".join(texts) == whole["content"][0]["text"]
        counted = (await http.post("/v1/messages/count_tokens", json={k: ASK[k] for k in ("model", "messages")})).json()
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_refusal_has_the_form_of_anthropics_errors_and_no_traceback(
    stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, engine, _):
        unknown = await http.post("/v1/messages", json=ASK | {"model": "claude", "stream": stream})
        assert (unknown.status_code, unknown.json()["type"], unknown.json()["error"]["type"]) == (404, "error", "not_found_error")
        asked = ASK | {"stream": stream, "stop_sequences": ["x"], "kv_transfer_params": {"do_remote_prefill": True}}
        refused = await http.post("/v1/messages", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert refused.json()["error"]["message"].startswith("kv_transfer_params: ")
        assert engine.added == []
        assert "Traceback" not in caplog.text


def test_a_full_fleet_is_overloaded_in_anthropics_words() -> None:
    answer = answer_of(QueueFull(waiting=5, limit=5, retry_after_s=2.0), "/v1/messages")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    message = "5 requests are waiting, limit 5 (ingress.max_waiting_requests); retry in 2.0 s"
    assert answer.body == {"type": "error", "error": {"type": "overloaded_error", "message": message, "retry_after_s": 2}}


@in_loop
async def test_an_error_after_the_begin_of_a_stream_is_an_event_of_that_api() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    held = HeldAnswer(send, Exchange("/v1/messages"))
    await held({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await held(
        {"type": "http.response.body", "body": b'event: message_start\ndata: {"type": "message_start"}\n\n', "more_body": True}
    )
    held.exchange.fail(ReplicaLost(request="r", reason="its engine died"))
    assert await held.end()
    ((name, data),) = events(sent[-1]["body"].decode())
    assert (name, data["type"], data["error"]["type"], sent[-1]["more_body"]) == ("error", "error", "api_error", False)
