"""Callers with a token of OIDC ask, store files and run batches over HTTP as callers with an API key do."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import REGISTRY

from serve_app.batch import worker
from serve_app.batch.records import Owner
from serve_app.checkpoints import make_tiny_llama
from serve_app.config.tenants_file import parse_tenants
from serve_app.core.tenants import Tenant
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.http.tokens import Tokens
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress import batch_serving
from tests.ingress.batch_serving import Model, answers, assert_hidden, begin, ended, jsonl, line
from tests.ingress.fake_fronts import call, error, ingress
from tests.ingress.issuer import Issuer, issuing, rsa_key
from tests.ingress.serving import serving
from tests.ingress.tenants import digest

KEY, DOTTED = "sk-of-the-tenant-red", "sk.with.dots"
ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


def file_of(*tenants: str) -> str:
    keys = [{"id": "r1", "sha256": digest(KEY)}, {"id": "r2", "sha256": digest(DOTTED), "expires": "2026-01-01"}]
    return json.dumps({"tenants": {name: {"keys": keys} if name == "red" else {} for name in tenants}})


def tenants_of(folder: Path, issuer: Issuer | None, *names: str) -> Tenants:
    path = folder / "tenants.yaml"
    path.write_text(file_of(*(names or ("red", "blue"))))
    tokens = None if issuer is None else Tokens(issuer.settings())
    return Tenants(path, lambda _: parse_tenants(path.read_text()).keyring(shared=False), tokens=tokens)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


def num_requests(tenant: str, key: str) -> float:
    labels = {"tenant": tenant, "key": key, "model": MODEL, "outcome": "complete"}
    return REGISTRY.get_sample_value("serve_app_key_requests_total", labels) or 0.0


@in_loop
async def test_a_token_asks_for_its_tenant_and_no_series_names_its_subject(tmp_path: Path, issuer: Issuer) -> None:
    counted = num_requests("red", "oidc"), num_requests("blue", "oidc"), num_requests("red", "r1")
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants_of(tmp_path, issuer)) as (http, engine, _):
        red, blue = issuer.token(), issuer.token(groups="blue", sub="a-subject-of-blue")
        for headers in (bearer(red), {"X-Api-Key": red}, bearer(blue), bearer(KEY), {"X-Api-Key": KEY}):
            answer = await http.post("/v1/completions", json=ASK, headers=headers)
            assert answer.status_code == 200, answer.text
        salts = [each.cache_salt for each in engine.added]
        assert salts == [Tenant(name).cache_salt(None) for name in ("red", "red", "blue", "red", "red")]
        shown = await http.get("/metrics")
    assert (num_requests("red", "oidc"), num_requests("blue", "oidc"), num_requests("red", "r1")) == (
        counted[0] + 2,
        counted[1] + 1,
        counted[2] + 2,
    )
    assert not any(text in shown.text for text in ("someone", "a-subject-of-blue", red[-20:]))


def forged(issuer: Issuer) -> dict[str, tuple[str, str]]:
    """Return tokens that are refused with 401, and why."""
    return {
        "expired": (issuer.token(exp=int(time.time()) - 60), "the token has expired"),
        "audience": (issuer.token(aud="another"), "the token is for another audience than 'serve-app'"),
        "issuer": (issuer.token(iss="https://login.example.org"), f"the token is of another issuer than {issuer.url}"),
        "signature": (issuer.token(rsa_key("forger")), "the signature of the token is not valid"),
        "HS256": (issuer.signed_by_hmac(b"x" * 32), "the token's algorithm 'HS256' is none of RS256, PS256, ES256, EdDSA"),
        "none": (issuer.unsigned(), "the token's algorithm 'none' is none of RS256, PS256, ES256, EdDSA"),
        "key": (issuer.token(kid="two"), "the token is signed with a key that its issuer does not publish"),
        "dots": ("sk.unknown.key", "what was given is no API key of this server, and no token (JWT)"),
    }


@pytest.mark.parametrize("name", ["expired", "audience", "issuer", "signature", "HS256", "none", "key", "dots"])
def test_a_token_that_is_not_valid_gets_401(name: str, tmp_path: Path, issuer: Issuer) -> None:
    token, said = forged(issuer)[name]
    app = ingress(tenants=tenants_of(tmp_path, issuer))
    for path in ("/v1/completions", "/v1/models", "/v1/files", "/nowhere"):
        for headers in (bearer(token), {"X-Api-Key": token}):
            answer = asyncio.run(call(app, "POST", path, json={"model": MODEL}, headers=headers))
            message = f"{said}; ask the issuer for another token, or use an API key"
            assert (answer.status_code, answer.json()) == (401, error(message, "invalid_token", 401))
            assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"groups": ["red", "blue"]}, "names 2 tenants of this server, and one is needed"),
        ({"groups": ["staff"]}, "names no tenant of this server"),
        ({"groups": None}, "is missing"),
        ({"groups": {"red": 1}}, "is neither a text nor a list of texts"),
    ],
)
def test_a_token_without_one_tenant_gets_403_that_names_none(
    claims: dict[str, Any], said: str, tmp_path: Path, issuer: Issuer
) -> None:
    app = ingress(tenants=tenants_of(tmp_path, issuer))
    answer = asyncio.run(call(app, "POST", "/v1/completions", json={"model": MODEL}, headers=bearer(issuer.token(**claims))))
    message = f"the token's claim 'groups' {said}; ask the operator of this server which value gives you access"
    assert (answer.status_code, answer.json()) == (403, error(message, "no_tenant", 403))


def test_a_token_without_the_scope_gets_403(tmp_path: Path, issuer: Issuer) -> None:
    app = ingress(tenants=tenants_of(tmp_path, issuer))
    headers = bearer(issuer.token(scope="openid batch"))
    answer = asyncio.run(call(app, "POST", "/v1/completions", json={"model": MODEL}, headers=headers))
    message = "the token of the tenant 'red' lacks the scope 'infer'; use a token that has it"
    assert (answer.status_code, answer.json()) == (403, error(message, "missing_scope", 403))


def test_tokens_wait_for_the_issuer_and_keys_do_not(tmp_path: Path, issuer: Issuer) -> None:
    issuer.status = 500
    app = ingress(tenants=tenants_of(tmp_path, issuer))
    answer = asyncio.run(call(app, "POST", "/v1/completions", json={"model": "tiny"}, headers=bearer(issuer.token())))
    said = "the issuer's keys are not known yet, so no token can be checked; retry in 10 s"
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert answer.json() == error(said, "issuer_away", 503, retry_after_s=10)
    assert asyncio.run(call(app, "GET", "/v1/models", headers=bearer(KEY))).status_code == 200


def test_a_key_with_two_dots_stays_a_key(tmp_path: Path, issuer: Issuer) -> None:
    answer = asyncio.run(call(ingress(tenants=tenants_of(tmp_path, issuer)), "GET", "/v1/models", headers=bearer(DOTTED)))
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_api_key")
    assert "the API key r2 has expired on 2026-01-01" in answer.text
    assert issuer.asked == []


def test_without_oidc_a_token_is_an_unknown_key(tmp_path: Path, issuer: Issuer) -> None:
    app = ingress(tenants=tenants_of(tmp_path, None))
    answer = asyncio.run(call(app, "GET", "/v1/models", headers=bearer(issuer.token())))
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_api_key")
    assert issuer.asked == []


def test_a_tenant_that_leaves_the_file_ends_its_verified_tokens(tmp_path: Path, issuer: Issuer) -> None:
    tenants = tenants_of(tmp_path, issuer)
    app, token = ingress(tenants=tenants), issuer.token()

    async def ask() -> list[int]:
        statuses = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://i", headers=bearer(token)) as http:
            statuses.append((await http.get("/v1/models")).status_code)
            (tmp_path / "tenants.yaml").write_text(file_of("blue"))
            tenants.follow_changes()
            statuses.append((await http.get("/v1/models")).status_code)
        return statuses

    assert asyncio.run(ask()) == [200, 403]


@in_loop
async def test_batches_of_a_token_belong_to_the_tenant_and_outlive_the_token(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_UNKNOWN_S", 0.1)
    model, tenants = Model(), tenants_of(tmp_path, issuer)
    async with batch_serving.serving(tmp_path, tenants=tenants, model=model, concurrency=1) as served:
        made_by, colleague = served.client(issuer.token(exp=int(time.time()) - 28)), served.client(issuer.token(sub="another"))
        model.statuses["busy"] = [503] * 10_000
        batch = await begin(made_by, jsonl(line(1, "busy"), line(2)))
        await asyncio.sleep(2.5)
        with pytest.raises(openai.AuthenticationError, match="the token has expired"):
            await made_by.batches.retrieve(batch.id)
        model.statuses.clear()
        for client in (colleague, served.client(KEY)):
            found = await ended(client, batch)
            assert await answers(client, found) == [("id-1", "BUSY"), ("id-2", "PROMPT 2")]
        await assert_hidden(served.client(issuer.token(groups="blue")), found)
        with pytest.raises(openai.PermissionDeniedError, match="lacks the scope 'batch'"):
            await served.client(issuer.token(scope="infer")).batches.retrieve(batch.id)
        assert [served.app.state_of_key(Owner(name, "oidc")) for name in ("red", "blue", "green")] == [
            "valid",
            "valid",
            "unknown",
        ]
        model.statuses["busy"] = [503] * 10_000
        later = await begin(colleague, jsonl(line(1, "busy")))
        (tmp_path / "next").write_text(file_of("blue"))
        (tmp_path / "next").replace(tmp_path / "tenants.yaml")
        while f"{later.id} is cancelled: its API key is no longer valid for batches" not in caplog.text:
            await asyncio.sleep(0.1)


@in_loop
async def test_without_oidc_a_batch_of_a_token_has_no_key(tmp_path: Path) -> None:
    async with batch_serving.serving(tmp_path, tenants=tenants_of(tmp_path, None)) as served:
        assert served.app.state_of_key(Owner("red", "oidc")) == "unknown"
