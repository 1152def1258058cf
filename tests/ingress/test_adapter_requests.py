"""Requests for LoRA adapters reach the engine with their adapter; vLLM's own front end, a fake engine that records its requests."""

from pathlib import Path
from typing import Any

import pytest

from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import serving

pytestmark = pytest.mark.engine


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/responses", {"input": "hello"}),
    ("/generate", {"prompt": "hello"}),
]


@in_loop
async def test_an_engine_is_asked_for_the_adapter_that_the_request_names(model: Path) -> None:
    async with serving(model) as (http, engine, numbers):
        for path, fields in ASKED:
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            for name, number in {**numbers, MODEL: 0}.items():
                answer = await http.post(path, json={"model": name, limit: 2, **fields})
                assert answer.status_code == 200, answer.text
                assert path == "/generate" or answer.json()["model"] == name
                lora = engine.added[-1].lora_request
                assert (0 if lora is None else lora.lora_int_id) == number


@in_loop
async def test_a_beam_search_is_the_adapter_s_in_each_of_its_steps(model: Path) -> None:
    async with serving(model) as (http, engine, numbers):
        await http.post(
            "/generate", json={"model": "pirate", "prompt": "hello", "max_tokens": 2, "use_beam_search": True, "best_of": 2}
        )
        assert {request.lora_request.lora_int_id for request in engine.added} == {numbers["pirate"]}


@in_loop
async def test_adapters_are_listed_with_their_model_and_an_unknown_one_is_answered_with_the_names(model: Path) -> None:
    async with serving(model) as (http, _, _):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [(MODEL, None), ("pirate", MODEL), ("lawyer", MODEL)]
        assert (await http.get("/v1/models/lawyer")).json()["root"] == "/adapters/lawyer"
        unknown = await http.post("/v1/completions", json={"model": "Pirate", "prompt": "a"})
        assert unknown.status_code == 404
        assert "tiny, pirate, lawyer" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_what_would_end_the_engine_never_reaches_it(model: Path, fields: dict[str, Any]) -> None:
    @in_loop
    async def ask() -> None:
        async with serving(model) as (http, engine, _):
            for name in (MODEL, "pirate"):
                answer = await http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1, **fields})
                assert (answer.status_code, engine.added) == (400, [])
                assert answer.json()["error"]["message"].startswith("prompt_logprobs: a model with LoRA adapters has none")

    ask()
