"""Each engine request has the cache salt and the limits of its tenant, by whichever route it came; vLLM's own front end, a fake engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreRequest

from serve_app.checkpoints import make_tiny_llama
from serve_app.core import request_limits
from serve_app.core.tenants import Tenant
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.fleet.intake import bind_or_refuse, prefix_of
from tests.doubles.fleet import MODEL, in_loop, settings
from tests.ingress.serving import serving
from tests.ingress.tenants import caller, digest, of_file

KEYS = {
    "red": "sk-of-the-tenant-red",
    "blue": "sk-of-the-tenant-blue",
    "shared": "sk-of-a-tenant-that-shares",
    "free": "sk-of-another",
}
RIGHTS: dict[str, dict[str, Any]] = {
    "red": {"limits": {"max_tokens": 4, "max_context": 40}},
    "blue": {},
    "shared": {"share_prefix_cache": True},
    "free": {"share_prefix_cache": True},
}
FILE = json.dumps(
    {"tenants": {name: {"keys": [{"id": name, "sha256": digest(key)}], **RIGHTS[name]} for name, key in KEYS.items()}}
)
WAYS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]},
    "/v1/completions": {"prompt": ["hi", "ho"], "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/generate": {"prompt": "hi"},
}
SALTED = ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses")
"""Routes whose bodies may have a ``cache_salt``."""


def shown(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


@in_loop
async def test_each_route_gives_an_engine_the_salt_of_the_tenant_and_no_more_tokens_than_it_may_get(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", FILE)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        for path, ask in WAYS.items():
            for name in KEYS:
                for own in (None, "own") if path in SALTED else (None,):
                    engine.added.clear()
                    given = {"model": MODEL, **ask} | ({} if own is None else {"cache_salt": own})
                    if name != "red" and path != "/v1/messages":
                        given["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 3
                    answer = await http.post(path, json=given, headers=shown(name))
                    assert answer.status_code == 200, (path, answer.text)
                    tenant = Tenant(name, shares_prefix_cache=name in ("shared", "free"))
                    assert {each.cache_salt for each in engine.added} == {tenant.cache_salt(own)}
                    most = 4 if name == "red" or path == "/v1/messages" else 3
                    assert {each.sampling_params.max_tokens for each in engine.added if each.sampling_params} == {most}


@in_loop
async def test_an_answer_ends_by_its_length_at_the_limit_of_the_tenant(tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_file(tmp_path / "tenants.yaml", FILE)) as (http, engine, _):
        ask = {"model": MODEL, **WAYS["/v1/chat/completions"], "ignore_eos": True}
        choice = (await http.post("/v1/chat/completions", json=ask, headers=shown("red"))).json()
        assert (choice["choices"][0]["finish_reason"], choice["usage"]["completion_tokens"]) == ("length", 4)
        as_text = {"model": MODEL, "prompt": [5] * 38, "max_tokens": 4, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=as_text, headers=shown("red"))).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)
        engine.added.clear()
        for length in (40, 60):
            for stream in (False, True):
                long = {"model": MODEL, "prompt": [5] * length, "max_tokens": 4, "stream": stream}
                refused = await http.post("/v1/completions", json=long, headers=shown("red"))
                said = f"prompt: has {length} tokens, and the tenant 'red' has max_context 40, which an answer of 1 token or more shares"
                assert (refused.status_code, refused.json()["error"]["message"].partition(";")[0]) == (400, said)
        floor = {"model": MODEL, **WAYS["/v1/completions"], "min_tokens": 9}
        refused = await http.post("/v1/completions", json=floor, headers=shown("red"))
        assert (refused.status_code, engine.added) == (400, [])
        assert "min_tokens: is 9, more than max_tokens, 4" in refused.text
        for value in ("9", 9.0):
            refused = await http.post("/v1/completions", json={**floor, "max_tokens": value}, headers=shown("red"))
            assert (refused.status_code, engine.added) == (400, []), "it is a number to vLLM"
            assert "max_tokens: is 9, and the tenant 'red' has max_tokens 4" in refused.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@in_loop
async def test_a_beam_search_is_as_long_as_the_tenant_may_ask(path: str, tmp_path: Path) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_file(tmp_path / "tenants.yaml", FILE)) as (http, engine, _):
        for max_tokens in (None, "9", 5):
            ask = {"model": MODEL, **WAYS[path], "use_beam_search": True, "n": 2, "max_tokens": max_tokens}
            refused = await http.post(path, json=ask, headers=shown("red"))
            assert (refused.status_code, refused.json()["error"]["param"], engine.added) == (400, "max_tokens", [])


@in_loop
async def test_log_probabilities_are_counted_for_the_tokens_that_the_tenant_may_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound of its own, a chat asks for all tokens that fit after its prompt."""
    monkeypatch.setattr(request_limits, "MAX_LOGPROBS", 1000)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=of_file(tmp_path / "tenants.yaml", FILE)) as (http, engine, _):
        ask = {"model": MODEL, **WAYS["/v1/chat/completions"], "n": 2, "logprobs": True, "top_logprobs": 5}
        refused = await http.post("/v1/chat/completions", json=ask, headers=shown("blue"))
        assert (refused.status_code, engine.added, "log probabilities, limit 1000" in refused.text) == (400, [], True)
        await http.post("/v1/chat/completions", json=ask, headers=shown("red"))  # the fake engine has none for its answer
        assert [each.sampling_params.max_tokens for each in engine.added] == [4, 4]


@pytest.mark.parametrize("tenant", [Tenant("a", max_context=3), Tenant("a", max_context=3, max_tokens=1)])
def test_a_prompt_to_embed_has_salt_and_limit_too(tenant: Tenant) -> None:
    exchange, model = Exchange("/v1/embeddings", caller(tenant)), settings().models[MODEL]
    for ids in ([1, 2, 3], [1, 2, 3, 4]):
        request = EngineCoreRequest("r", ids, None, None, PoolingParams(), 0.0, None, None, None)
        refused = bind_or_refuse(request, exchange, model, 1000)
        if len(ids) == 3:
            assert (refused, request.cache_salt) == (None, tenant.cache_salt(None))
        else:
            assert str(refused) == "prompt: has 4 tokens, and the tenant 'a' has max_context 3; shorten it"


def test_without_a_tenant_a_request_stays_as_it_is() -> None:
    request = EngineCoreRequest("r", [1], None, None, PoolingParams(), 0.0, None, "own", None)
    assert bind_or_refuse(request, Exchange("/v1/embeddings"), settings().models[MODEL], 1000) is None
    assert bind_or_refuse(request, None, settings().models[MODEL], 1000) is None
    assert request.cache_salt == "own"


def test_the_prefix_by_which_a_request_is_routed_has_the_salt() -> None:
    cache = SimpleNamespace(enable_prefix_caching=True, block_size=2)

    def hashes(tenant: Tenant | None) -> Any:
        request = EngineCoreRequest("r", [1, 2, 3, 4], None, None, PoolingParams(), 0.0, None, None, None)
        exchange = None if tenant is None else Exchange("/v1/embeddings", caller(tenant))
        assert bind_or_refuse(request, exchange, settings().models[MODEL], 1000) is None
        return tuple(prefix_of(request, cache).hashes)

    assert hashes(Tenant("a")) == hashes(Tenant("a"))
    assert len({hashes(None), hashes(Tenant("a")), hashes(Tenant("b"))}) == 3
    assert hashes(None) == hashes(Tenant("a", shares_prefix_cache=True))


@pytest.mark.parametrize("path", SALTED)
@in_loop
async def test_a_long_salt_of_a_client_is_refused_and_not_kept(path: str, tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", FILE)
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        for size in (129, 1025):
            ask = {"model": MODEL, "cache_salt": "x" * size, **WAYS[path]}
            answer = await http.post(path, json=ask, headers=shown("blue"))
            assert answer.status_code == 400
            assert "cache_salt" in answer.json()["error"]["message"]
        assert engine.added == []
