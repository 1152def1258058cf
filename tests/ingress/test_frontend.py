"""vLLM's own front end works around a fleet client, without any replica."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from serve_app.checkpoints import make_tiny_embedding, make_tiny_llama
from serve_app.config import parse_settings
from serve_app.errors import FrontEndStartFailed
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd, build_front_end, serves
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from tests.doubles.fake_engine import CAPABILITIES
from tests.doubles.fleet import in_loop

pytestmark = pytest.mark.engine


@in_loop
async def test_routes_follow_the_tasks_that_the_replicas_report(tmp_path: Path) -> None:
    model: Any = {
        "model": str(make_tiny_embedding(tmp_path / "model")),
        "engine_args": {"max_model_len": 64},
    }
    values = parse_settings({"models": {"embedding": model}})
    client = FleetClient(values, values.models["embedding"], ingress_id="ingress-1", token=b"", tls=None)
    front = await build_front_end(values.models["embedding"], model["model"], client, GrammarCompiler())
    guessed = await front.app()
    assert serves(guessed, "/v1/embeddings")

    client.links.capabilities = msgspec.structs.replace(CAPABILITIES, tasks=("token_classify",))
    assert not serves(await front.app(), "/v1/embeddings")

    client.links.capabilities = msgspec.structs.replace(CAPABILITIES, tasks=("embed",))
    again = await front.app()
    assert serves(again, "/v1/embeddings")
    assert again is not guessed
    assert await front.app() is again


def front_of(folder: Path, **more: Any) -> Coroutine[Any, Any, FrontEnd]:
    values = parse_settings({"models": {"chat": {"model": str(folder), **more}}})
    model = values.models["chat"]
    client = FleetClient(values, model, ingress_id="ingress-1", token=b"", tls=None)
    return build_front_end(model, str(folder), client, GrammarCompiler())


@in_loop
async def test_what_vllm_refuses_is_one_sentence_with_the_models_name(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    with pytest.raises(FrontEndStartFailed) as long:
        await front_of(folder, engine_args={"max_model_len": 20480})
    said = (
        "the front end of 'chat' did not start: User-specified max_model_len (20480) is greater than the derived max_model_len "
    )
    assert (str(long.value).startswith(said), "\n" in str(long.value)) == (True, False)
    with pytest.raises(FrontEndStartFailed, match="did not start: VLLMValidationError: The supplied chat template"):
        await front_of(folder, engine_args={"max_model_len": 64}, frontend_args={"chat_template": "/nowhere.jinja"})


@in_loop
async def test_a_tool_without_a_parser_is_refused_by_the_keys_of_our_configuration(tmp_path: Path) -> None:
    app = await (await front_of(make_tiny_llama(tmp_path / "model"), engine_args={"max_model_len": 64})).app()
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    there = " in models.chat.frontend_args of this server's configuration"
    said = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://ingress") as client:
        for choice in ("auto", "required"):
            response = await client.post("/v1/chat/completions", json={**body, "tool_choice": choice})
            said[choice] = (response.status_code, response.json()["error"]["message"])
    auto = f'"auto" tool choice requires enable_auto_tool_choice: true and tool_call_parser to be set{there}'
    assert said == {"auto": (400, auto), "required": (400, f'tool_choice="required" requires tool_call_parser to be set{there}')}
