"""No way into an ingress brings a request to an engine that its worker would refuse; vLLM's own front end, a fake engine."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from serve_app.checkpoints import make_tiny_llama
from serve_app.core import request_limits
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import serving

WAYS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"prompt": "hi"},
}
POISON: dict[str, tuple[str, dict[str, Any]]] = {
    "logit_bias": ("has 1025 entries, limit 1024", {"logit_bias": {str(i): 1.0 for i in range(1025)}}),
    "allowed_token_ids": ("has 1025 tokens, limit 1024", {"allowed_token_ids": [*range(1025)]}),
    "stop_token_ids": ("limit 128 beside min_tokens", {"min_tokens": 1, "stop_token_ids": [*range(129)]}),
    "bad_words": ("limit 1024", {"bad_words": [" ".join("abcdefghij" for _ in range(200))]}),
    "repetition_detection": (
        "may compare too many tokens in each step",
        {"repetition_detection": {"max_pattern_size": 10**9, "min_pattern_size": 1, "min_count": 2}},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_worker_is_never_given_what_it_would_refuse(stream: bool, tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny", vocab_size=1283)) as (http, engine, _):
        for path, ask in WAYS.items():
            for name, (said, poison) in POISON.items():
                answer = await http.post(path, json={"model": MODEL, **ask, **poison, "max_tokens": 3, "stream": stream})
                error = answer.json()["error"]
                assert (path, answer.status_code, error["code"]) == (path, 400, 400)
                assert error["message"].startswith(f"{name}: ")
                assert said in error["message"]
        responses = {"model": MODEL, "input": "hi", "stream": stream, **POISON["logit_bias"][1]}
        assert "logit_bias: has 1025 entries" in (await http.post("/v1/responses", json=responses)).text
        assert engine.added == []


@in_loop
async def test_a_client_cannot_say_where_kv_goes(tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, engine, _):
        chat = {"model": MODEL, **WAYS["/v1/chat/completions"], "max_tokens": 3}
        for asked in (
            {"kv_transfer_params": {"do_remote_prefill": True}},
            {"vllm_xargs": {"kv_transfer_params": "x"}},
            {"ec_transfer_params": {"a": 1}},
        ):
            answer = await http.post("/v1/chat/completions", json=chat | asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "ec_transfer_params" if "ec_transfer_params" in asked else "kv_transfer_params",
            )
        assert engine.added == []
        assert (await http.post("/v1/chat/completions", json=chat | {"kv_transfer_params": None})).status_code == 200


@in_loop
async def test_long_bad_words_are_refused_before_they_are_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(*_: Any) -> None:
        raise AssertionError("5 MB were tokenized in the event loop")

    monkeypatch.setattr("vllm.sampling_params.SamplingParams.update_from_tokenizer", tokenize)
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, _, _):
        for path in ("/v1/chat/completions", "/generate"):
            body = {"model": MODEL, **WAYS[path], "max_tokens": 3, "bad_words": ["the cat " * 625_000]}
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (
                400,
                f"bad_words: has 5000000 characters, limit {request_limits.MAX_BAD_WORD_CHARS}",
            )


@in_loop
async def test_a_client_that_has_gone_gets_no_engine_request_even_if_its_cancellation_was_lost(tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, engine, _):
        add = http._transport.app.front_ends[MODEL].engine.add_request  # type: ignore[attr-defined]

        async def handler() -> None:
            with contextlib.suppress(asyncio.CancelledError):  # as Python 3.11's wait_for, at the moment of its result
                await asyncio.sleep(10)
            await add("r", {"type": "token", "prompt_token_ids": [5]}, SamplingParams(max_tokens=3))

        task = asyncio.create_task(handler())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.added == []


@in_loop
async def test_a_length_penalty_that_no_float_can_take_is_refused(tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, _, _):
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {"model": MODEL, **WAYS[path], "max_tokens": 4, "use_beam_search": True, "n": 2, "length_penalty": -1e308}
            answer = await http.post(path, json=body)
            assert (answer.status_code, "length_penalty is -1e+308" in answer.text) == (400, True)
