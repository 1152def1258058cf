"""Answers of direct routes equal those of vLLM's app in status, headers and body; real HTTP, a fake engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from serve_app.errors import QueueFull
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.http.error_answers import FleetError
from serve_app.ingress.shortcuts.direct import DirectAnswer
from tests.doubles.fleet import MODEL, FakeReplica, in_loop, until
from tests.ingress.streams import CHANGING, CHAT, COMPLETIONS, Ingress, Play, serving
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]

JSON = {"content-type": "application/json"}
STREAM = {"stream": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

GOOD: list[dict[str, Any]] = [
    {},
    STREAM,
    {**STREAM, "stream_options": {"include_usage": True}},
    {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 2, "temperature": 0.7, "seed": 1},
    {"max_tokens": 1},
    {"max_tokens": None},
    {"stop": ["a", "e"]},
    {**STREAM, "stop": "o", "include_stop_str_in_output": True},
    {"stop_token_ids": [7, 8]},
    {"logit_bias": {"5": 1.5}},
    {"min_tokens": 2, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.1},
    {"return_token_ids": True},
    {"request_id": "mine"},
    {"user": "someone", "an_unknown_field": {"of": ["any", "kind"]}},
    {"guided_json": {}},
    {"model": None},
    {"response_format": {"type": "json_object"}},
    {"priority": 3, "cache_salt": "salt", "vllm_xargs": {"a": 1}},
    {"stream": "yes", "temperature": "0"},
]
"""Fields over a plain body that vLLM takes, on both routes."""

BAD: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 2},
    {"n": 0},
    {"n": "many"},
    {"max_tokens": -1},
    {"max_tokens": 2.5},
    {"min_tokens": 9, "max_tokens": 3},
    {"stop": 5},
    {"stop": [""]},
    {"stream": "perhaps"},
    {"stream_options": {"include_usage": True}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"99999": 1}},
    {"seed": 1 << 70},
    {"model": 7},
    {"model": ["tiny"]},
    {"response_format": {"type": "poem"}},
    {"truncate_prompt_tokens": -5},
    {"bad_words": [""]},
    {"use_beam_search": True, "stream": True},
    {"allowed_token_ids": []},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"prompt_logprobs": -2},
    {"prompt_logprobs": 1, "stream": True},
]

OF_CHAT: list[dict[str, Any]] = [
    {
        "tools": [{"type": "function", "function": {"name": "\ud800"}}],
        "tool_choice": {"type": "function", "function": {"name": "\ud800"}},
    },
    {"messages": []},
    {"messages": None},
    {"messages": "hello"},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]},
    {"messages": [{"role": "user", "content": "ünïcödé 🙂 漢字"}, {"role": "assistant", "content": "a"}]},
    {"messages": [{"role": "user", "content": "long " * 2000}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": False, "top_logprobs": 2},
    {"top_logprobs": 99, "logprobs": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": []},
    {"tool_choice": "auto"},
    {"max_completion_tokens": 2},
    {"echo": True, "add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"chat_template": "{{ messages[0].content }}"},
    {"response_format": SCHEMA},
    {"reasoning_effort": "most"},
]
OF_COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": None},
    {"prompt": [1, 2, 3]},
    {"prompt": [1, -2]},
    {"prompt": [99999]},
    {"prompt": ["one", "two"]},
    {"prompt": []},
    {"prompt": {"a": 1}},
    {"prompt": "ünïcödé 🙂 漢字"},
    {"prompt": "long " * 2000},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"logprobs": 1},
    {"logprobs": -5},
    {"suffix": "behind"},
    {"prompt_embeds": "AAAA"},
]
BODIES = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"{}",
    b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": "a", "messages": [], "temperature": NaN}',
    b'{"model": "tiny", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "prompt": "\xff"}',
    b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}',
    b'{"model": "tiny", "prompt": "a", "prompt": "b", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}',
    b'{"a": ' + b"[" * 3000,
]
HEADERS: list[dict[str, str]] = [
    {},
    {"content-type": "text/plain"},
    {"content-type": "application/json; charset=utf-8"},
    {"content-type": "Application/JSON"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "application/vnd.api+json"},
    {"content-type": "application/x-www-form-urlencoded"},
    {**JSON, "origin": "http://elsewhere"},
    {**JSON, "endpoint-load-metrics-format": "TEXT"},
    {**JSON, "x-request-id": "of-the-head"},
    {**JSON, "x-vllm-priority": "nine", "x-data-parallel-rank": "none", "traceparent": "00-1-1-01"},
]


def plain(path: str) -> dict[str, Any]:
    asked = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": MODEL, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **asked}


@contextlib.asynccontextmanager
async def stepping(ingress: Ingress) -> AsyncIterator[FakeReplica]:
    """An engine that computes whenever it has something to."""
    replica = await ingress.join()

    async def run() -> None:
        while True:
            await asyncio.sleep(0.002)
            if replica.engine.running:
                replica.engine.step()

    task = asyncio.create_task(run())
    try:
        yield replica
    finally:
        task.cancel()
        await asyncio.wait([task])


class Both:
    """Sends each request twice: as usual, and past `direct`. ``num_direct``: how many of the first were answered by it."""

    def __init__(self, ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_direct = 0
        self._front = ingress.front
        self._client = httpx.AsyncClient(base_url=ingress.url, timeout=30)
        answer = DirectAnswer._answer

        async def counted(*args: Any) -> None:
            self.num_direct += 1
            await answer(*args)

        monkeypatch.setattr(DirectAnswer, "_answer", counted)

    @contextlib.contextmanager
    def by_vllms_app(self) -> Any:
        shortcuts = self._front.shortcuts
        self._front.shortcuts = shortcuts._replace(direct={})
        yield
        self._front.shortcuts = shortcuts

    async def post(self, path: str, content: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], list[bytes]]:
        response = await self._client.post(path, content=content, headers=headers)
        told = {name: value for name, value in response.headers.items() if name != "date"}
        told.pop("content-length", None)  # ids differ in length
        events = [CHANGING.sub(b"", event) for event in response.content.split(b"\n\n")]
        return response.status_code, told, sorted(events)  # those of several choices come in any order

    async def alike(self, path: str, content: bytes, headers: dict[str, str] = JSON) -> int:
        """Return the status, which both have."""
        before = self.num_direct
        ours = await self.post(path, content, headers)
        after = self.num_direct
        with self.by_vllms_app():
            theirs = await self.post(path, content, headers)
        assert self.num_direct == after, "vLLM's app answered"
        assert ours == theirs, (path, content[:200], headers)
        self.was_direct = after > before
        return ours[0]


@in_loop
async def test_what_vllm_takes_is_answered_alike(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18121) as ingress, stepping(ingress):
        both = Both(ingress, monkeypatch)
        for path in (COMPLETIONS, CHAT):
            for fields in GOOD:
                status = await both.alike(path, json.dumps(plain(path) | fields).encode())
                assert (status, both.was_direct) == (200, True), (path, fields)


@in_loop
async def test_what_vllm_refuses_is_refused_alike(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18122) as ingress, stepping(ingress):
        both = Both(ingress, monkeypatch)
        for path, own in ((COMPLETIONS, OF_COMPLETIONS), (CHAT, OF_CHAT)):
            refused = [await both.alike(path, json.dumps(plain(path) | fields).encode()) for fields in BAD]
            assert sum(status >= 400 for status in refused) > len(BAD) // 2
            for fields in own:
                await both.alike(path, json.dumps(plain(path) | fields).encode())
            for content in BODIES:
                await both.alike(path, content)
        deep = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "[" * 5000}}
        called = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [deep]}]}
        assert (await both.post(CHAT, json.dumps(plain(CHAT) | called).encode(), JSON))[0] == 400  # 500 by vLLM's app


@in_loop
async def test_headers_that_change_the_answer_change_it_alike(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18123) as ingress, stepping(ingress):
        both, direct = Both(ingress, monkeypatch), []
        for path in (COMPLETIONS, CHAT):
            for headers in HEADERS:
                await both.alike(path, json.dumps(plain(path)).encode(), headers)
                direct.append(both.was_direct)
        assert direct == [number in (2, 9, 10) for number in range(len(HEADERS))] * 2


@in_loop
async def test_what_goes_wrong_behind_the_handler_is_reported_alike(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any) -> None:
        exchange = current_exchange()
        assert exchange is not None
        exchange.error = QueueFull(waiting=3, limit=3, retry_after_s=4.6)
        raise FleetError(exchange.error)

    async def bug(*_: Any) -> None:
        raise LookupError("a bug")

    async def unmade(*_: Any) -> None:
        raise NotImplementedError("not yet")

    async with serving(model, monkeypatch, 18124) as ingress, stepping(ingress):
        both = Both(ingress, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(FleetClient, "add_request_async", full)
            for path in (COMPLETIONS, CHAT):
                for fields in ({}, STREAM):
                    assert await both.alike(path, json.dumps(plain(path) | fields).encode()) == 503
                    assert both.was_direct
        for fails, status in ((bug, 500), (unmade, 501)):
            with monkeypatch.context() as patch:
                patch.setattr(OpenAIServingChat, "_create_chat_completion", fails)
                assert await both.alike(CHAT, json.dumps(plain(CHAT)).encode()) == status
                assert both.was_direct


@in_loop
async def test_a_client_that_goes_is_aborted_whatever_it_waits_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []
    monkeypatch.setattr(Exchange, "client_gone", lambda exchange: noted.append(exchange.answered))
    async with serving(model, monkeypatch, 18125) as ingress:
        replica = await ingress.join()
        for stream in (False, True):
            play = Play(ingress, CHAT, stream=stream)
            await until(lambda: replica.engine.running)
            play.task.cancel()
            await until(lambda: replica.engine.aborted)
            replica.engine.aborted.clear()
            await until(lambda: not ingress.front.engine.output_processor.request_states)
    assert noted == [False, False], "for the ledger, each once"


@in_loop
async def test_http_series_count_each_request_once_whoever_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> list[float]:
        of_path = {"handler": CHAT, "method": "POST"}
        rows: list[tuple[str, dict[str, str]]] = [
            ("http_requests_total", {**of_path, "status": "2xx"}),
            ("http_requests_total", {**of_path, "status": "4xx"}),
            ("http_request_duration_seconds_count", of_path),
            ("http_request_duration_highr_seconds_count", {}),
            ("http_request_size_bytes_sum", {"handler": CHAT}),
            ("http_response_size_bytes_count", {"handler": CHAT}),
        ]
        return [REGISTRY.get_sample_value(name, labels) or 0.0 for name, labels in rows]

    async with serving(model, monkeypatch, 18126) as ingress, stepping(ingress):
        both = Both(ingress, monkeypatch)
        good, bad = (json.dumps(plain(CHAT) | fields).encode() for fields in (STREAM, {"n": "many"}))
        for content, status in ((good, [1.0, 0.0]), (bad, [0.0, 1.0])):
            for way in (contextlib.nullcontext, both.by_vllms_app):
                before = counts()
                with way():
                    await both.post(CHAT, content, JSON)
                added = [after - was for after, was in zip(counts(), before, strict=True)]
                assert added == [*status, 1.0, 1.0, float(len(content)), 1.0]
