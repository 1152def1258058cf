"""Every route refuses a request without a key, and one with a wrong key, a key or token that is not valid, or one without the right."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from serve_app.batch.service import BatchService
from serve_app.config import BatchSettings
from serve_app.config.model import CanarySettings
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.http.tokens import Tokens
from serve_app.ingress.routes.app import VLLM_ROUTES, WITHOUT_KEY, AppLimits, IngressApp
from serve_app.ingress.routes.sagemaker import INVOCATIONS
from tests.doubles.fleet import MODEL, in_loop, settings
from tests.ingress.fake_fronts import App, Front, call, echo, error, front, ingress, post
from tests.ingress.issuer import Issuer, issuing
from tests.ingress.tenants import digest, of_file, of_keys
from tests.ports import free_port

KEYS = {
    "whole": "sk-of-red-with-all-rights",
    "infer": "sk-of-red-for-models-alone",
    "batch": "sk-of-red-for-batches-alone",
    "expired": "sk-of-red-that-has-expired",
    "revoked": "sk-of-red-that-was-revoked",
    "other": "sk-of-blue-with-all-rights",
    "wrong": "sk-of-nobody",
}
FILE = f"""
tenants:
  red:
    keys:
      - {{id: r1, sha256: {digest(KEYS["whole"])}, expires: 2027-01-31}}
      - {{id: r2, sha256: {digest(KEYS["infer"])}, scopes: [infer]}}
      - {{id: r3, sha256: {digest(KEYS["batch"])}, scopes: [batch]}}
      - {{id: r4, sha256: {digest(KEYS["expired"])}, expires: 2026-12-31}}
      - {{id: r5, sha256: {digest(KEYS["revoked"])}, revoked: 2026-12-30}}
    models: [chat]
    limits: {{max_tokens: 10}}
  blue:
    keys: [{{id: b1, sha256: {digest(KEYS["other"])}}}]
    models: [embed]
"""
READING = ("/v1/models", "/v1/models/chat", "/version", "/fleet", "/fleet/requests")
STORED = (
    "/v1/files",
    "/v1/files/file-1",
    "/v1/files/file-1/content",
    "/v1/batches",
    "/v1/batches/batch_1",
    "/v1/batches/batch_1/cancel",
)
ASKING = (*sorted(VLLM_ROUTES), "/generate", INVOCATIONS)
SPOOFED = {
    "X-Tenant": "red",
    "X-User": "red",
    "X-Forwarded-User": "red",
    "OpenAI-Organization": "red",
    "OpenAI-Project": "red",
    "X-Gateway-Inference-Fairness-Id": "red",
    "Cookie": f"key={KEYS['whole']}",
    "Api-Key": KEYS["whole"],
}


def canary_of(model: str) -> FrontEnd:
    changes = {"name": f"{model}-next", "canary": CanarySettings(of=model, share=0.5)}
    client = SimpleNamespace(is_ready=lambda: True)
    return cast(FrontEnd, Front(settings().models[MODEL].model_copy(update=changes), client, App(f"{model}-next", echo)))


def with_names(made: FrontEnd, *, aliases: tuple[str, ...] = (), adapters: tuple[str, ...] = ()) -> FrontEnd:
    made.model = made.model.model_copy(update={"aliases": aliases})
    cast(Any, made).adapters = dict.fromkeys(adapters)
    return made


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """An issuer whose tokens are of the tenant red by default."""
    with issuing() as made:
        yield made


@pytest.fixture
def reached() -> list[str]:
    """The paths of the requests that a model's own app has got."""
    return []


@pytest.fixture
def app(tmp_path: Path, issuer: Issuer, reached: list[str]) -> IngressApp:
    """An ingress of two models; the tenant red may ask `chat`, and blue `embed`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])
        await echo(scope, receive, send)

    chat, embed = front("chat", answer), front("embed", answer)
    fronts = [with_names(chat, aliases=("gpt",), adapters=("pirate",)), with_names(embed, adapters=("law",))]
    by_name = {each.model.name: each for each in (*fronts, canary_of("embed"))}

    async def report() -> dict[str, Any]:
        return {}

    return IngressApp(
        by_name,
        AppLimits(1000),
        version={},
        tenants=of_file(tmp_path / "tenants.yaml", FILE, tokens=Tokens(issuer.settings())),
        sagemaker=True,
        batches=BatchService(BatchSettings(dir=tmp_path / "store")),
        report=report,
    )


def ask(
    app: IngressApp,
    path: str,
    key: str | None = None,
    body: Mapping[str, Any] | None = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Ask with one of `KEYS`, or with a token."""
    method = method or ("POST" if path in ASKING else "GET")
    shown = dict(headers or {}) | ({} if key is None else {"Authorization": f"Bearer {KEYS.get(key, key)}"})
    return asyncio.run(call(app, method, path, headers=shown, json=body if method == "POST" else None))


INVALID = {
    None: "no API key was given",
    "wrong": "the API key is not known",
    "expired": "the API key r4 has expired on 2026-12-31",
    "revoked": "the API key r5 was revoked on 2026-12-30",
}


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "an expired token": ({"exp": 1_700_000_000}, "the token has expired"),
    "a token of another issuer": ({"iss": "https://login.example.org"}, "the token is of another issuer than http://127.0.0.1"),
    "a token for another audience": ({"aud": "another"}, "the token is for another audience than 'serve-app'"),
}
"""Claims of tokens that are not valid, and why."""


@pytest.mark.parametrize("row", [*INVALID, *FORGED])
def test_no_route_answers_without_a_valid_key_or_token(
    app: IngressApp, issuer: Issuer, reached: list[str], row: str | None
) -> None:
    key, said, challenge = row, INVALID.get(row), "Bearer"
    if row in FORGED:
        claims, said = FORGED[row]
        key, challenge = issuer.token(**claims), 'Bearer error="invalid_token"'
    paths = [*READING, *STORED, *ASKING, "/docs", "/v1/x", "/v1/responses/x", "/v1/completions?key=" + KEYS["whole"]]
    for path in paths:
        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            answer = ask(app, path, key, method=method, headers=SPOOFED, body={"model": "chat", "user": "red"})
            assert (path, method, answer.status_code, answer.headers["www-authenticate"]) == (path, method, 401, challenge)
            if method != "HEAD":
                assert said in answer.text
                assert not any(secret in answer.text for secret in (*KEYS.values(), *([key] if row in FORGED else [])))
    assert reached == []


@pytest.mark.parametrize("path", sorted(WITHOUT_KEY))
def test_probes_and_prometheus_need_no_key(app: IngressApp, path: str) -> None:
    assert ask(app, path).status_code == 200


ANSWERS = {"/generate": 400, "/v1/embeddings": 404}
"""Statuses of requests with the right to ask `chat`: the fake engine of /generate takes no prompt, and `chat` makes no embeddings."""


@pytest.mark.parametrize("path", ASKING)
def test_routes_of_models_need_the_scope_infer(app: IngressApp, issuer: Issuer, reached: list[str], path: str) -> None:
    body = {"model": "chat", "prompt": 5}
    said = {"batch": "the API key r3 of the tenant 'red' lacks the scope 'infer'; use a key that has it"}
    said[issuer.token(scope="openid batch")] = "the token of the tenant 'red' lacks the scope 'infer'; use a token that has it"
    for key, message in said.items():
        refused = ask(app, path, key, body, headers=SPOOFED)
        if path.startswith("/v1/messages"):
            assert (refused.status_code, refused.json()["error"]) == (403, {"type": "permission_error", "message": message})
        else:
            assert (refused.status_code, refused.json()) == (403, error(message, "missing_scope", 403))
    assert reached == []
    for key in ("infer", issuer.token(scope="infer"), issuer.token()):
        assert ask(app, path, key, body).status_code == ANSWERS.get(path, 200)


@pytest.mark.parametrize("path", STORED)
def test_files_and_batches_need_the_scope_batch(app: IngressApp, issuer: Issuer, path: str) -> None:
    said = {
        "infer": "the API key r2 of the tenant 'red' lacks",
        issuer.token(scope="infer"): "the token of the tenant 'red' lacks",
    }
    for method in ("GET", "POST", "DELETE"):
        for key, message in said.items():
            refused = ask(app, path, key, method=method, headers=SPOOFED)
            assert refused.status_code == 403
            assert refused.json()["error"]["message"].startswith(f"{message} the scope 'batch'; ")
        for key in ("batch", issuer.token(scope="batch"), issuer.token()):
            assert ask(app, path, key, method=method).status_code != 403


@pytest.mark.parametrize("path", READING)
def test_any_valid_key_or_token_reads(app: IngressApp, issuer: Issuer, path: str) -> None:
    for key in ("whole", "infer", "batch", issuer.token(), issuer.token(scope="openid infer")):
        assert ask(app, path, key).status_code == 200


@pytest.mark.parametrize("path", ASKING)
def test_a_model_of_another_tenant_does_not_exist(app: IngressApp, issuer: Issuer, reached: list[str], path: str) -> None:
    for model in ("embed", "law", "embed-next", "no-such-model"):
        for key in ("whole", issuer.token()):
            body = {"model": model, "user": "blue", "input" if model == "law" else "prompt": "x"}
            refused = ask(app, path, key, body, headers=SPOOFED)
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == f"the model '{model}' does not exist; served here: chat, gpt, pirate"
    assert reached == []


def spellings(path: str) -> list[str]:
    """Return other ways to write a path in a request line, some of which proxies and frameworks take for the path itself."""
    before = [
        "/",
        "//ingress",
        "http://ingress",
        "/.",
        "/healthz/",
        "/healthz/..",
        "/healthz/%2e%2e",
        "/healthz%2f..",
        "/healthz%00",
        "/v1/%2e%2e",
        "/%2f",
    ]
    after = ["/", "//", ";a", "%00", "%20", "?a=/healthz", "#/healthz"]
    others = [path.upper(), path.replace("/", "//"), path.replace("/", "%2f"), path[:-1] + f"%{ord(path[-1]):02x}"]
    return [path, *(each + path for each in before), *(path + each for each in after), *others]


@asynccontextmanager
async def listening(app: IngressApp) -> AsyncIterator[int]:
    """Yield the port at which the ingress's own HTTP server listens."""
    values = settings(ingress={"port": free_port()}).ingress
    listener = Listener(app, values)
    await listener.start()
    try:
        yield values.port
    finally:
        await listener.stop()


async def statuses(port: int, paths: Sequence[str], key: str | None, body: bytes, method: str) -> dict[str, int]:
    """Send these paths as they are, one connection each; return the statuses."""
    found, shown = {}, "" if key is None else f"authorization: Bearer {KEYS.get(key, key)}\r\n"
    for path in paths:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"{method} {path} HTTP/1.1\r\nhost: ingress\r\n{shown}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(30):
            found[path] = int((await reader.read()).split(b" ", 2)[1])
        writer.close()
    return found


OF_RED, OF_BLUE = b'{"model": "chat", "prompt": "x"}', b'{"model": "embed", "prompt": "x"}'
ROWS: dict[str, tuple[Sequence[str], bytes, str, set[int]]] = {
    "none": ((*READING, *STORED, *ASKING), OF_RED, "POST", {400, 401}),
    "expired token": (ASKING, OF_RED, "POST", {400, 401}),
    "batch": (ASKING, OF_RED, "POST", {400, 403, 404}),
    "token batch": (ASKING, OF_RED, "POST", {400, 403, 404}),
    "infer": (STORED, b"", "GET", {400, 403, 404}),
    "other model": (ASKING, OF_BLUE, "POST", {400, 404}),
    "other tenant": (ASKING, OF_RED, "POST", {400, 404}),
}
"""Routes, body, method, and the statuses that may come: without a key, with one that is not valid, or without the right."""


@pytest.mark.parametrize("row", ROWS)
@in_loop
async def test_no_spelling_of_a_path_leads_past_the_key(app: IngressApp, issuer: Issuer, reached: list[str], row: str) -> None:
    routes, body, method, refused = ROWS[row]
    tokens = {"expired token": issuer.token(exp=1_700_000_000), "token batch": issuer.token(scope="batch")}
    key = {"none": None, "other model": "whole", "other tenant": "other", **tokens}.get(row, row)
    async with listening(app) as port:
        for route in routes:
            found = await statuses(port, spellings(route), key, body, method)
            assert {path: status for path, status in found.items() if status not in refused} == {}
            assert found[route] != 400
        assert reached == []
        assert await statuses(port, ["/v1/completions"], "whole", OF_RED, "POST") == {"/v1/completions": 200}
        assert reached == ["/v1/completions"]


def test_a_model_includes_its_aliases_adapters_and_canary(app: IngressApp) -> None:
    for key, models in {"whole": ("chat", "gpt", "pirate"), "other": ("embed", "law", "embed-next")}.items():
        assert [ask(app, "/v1/completions", key, {"model": model}).status_code for model in models] == [200] * len(models)


def test_a_tenant_sees_the_ways_of_its_own_requests_alone(app: IngressApp) -> None:
    for model in ("embed", "no-such-model"):
        assert ask(app, "/v1/completions", "infer", {"model": model, "prompt": "secret"}).status_code == 404
    shown = ask(app, "/fleet/requests", "whole")
    ways = [[way[name] for name in ("tenant", "key", "state", "hops")] for way in shown.json()["others"]]
    assert ways == [["red", "r2", "invalid", []]] * 2
    assert "secret" not in shown.text
    assert ask(app, "/fleet/requests", "other").json().items() >= {"moved": [], "others": []}.items()


def test_the_only_model_of_a_tenant_need_not_be_named(app: IngressApp) -> None:
    assert ask(app, "/v1/completions", "whole", {"prompt": "x"}).status_code == 200


def test_models_are_listed_by_tenant(app: IngressApp) -> None:
    for key, models in {"whole": ["chat"], "batch": ["chat"], "other": ["embed"]}.items():
        assert [card["id"] for card in ask(app, "/v1/models", key).json()["data"]] == models
    assert ask(app, "/v1/models/embed", "other").json() == {"id": "embed"}
    refused = ask(app, "/v1/models/embed", "whole")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        404,
        "the model 'embed' does not exist; served here: chat",
    )


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_body_that_asks_for_more_than_the_tenant_gets_is_refused(app: IngressApp, path: str, field: str) -> None:
    assert ask(app, path, "whole", {"model": "chat", field: 10}).status_code == 200
    refused = ask(app, path, "whole", {"model": "chat", field: 11})
    assert refused.status_code == 400
    assert f"{field}: is 11, and the tenant 'red' has max_tokens 10; ask for that or less" in refused.text


def test_a_header_of_identity_changes_nothing(app: IngressApp) -> None:
    for headers in ({}, SPOOFED, SPOOFED | {"X-Tenant": "blue"}):
        answer = ask(app, "/v1/models", "other", headers=headers)
        assert [card["id"] for card in answer.json()["data"]] == ["embed"]


def test_the_key_is_looked_for_in_two_headers_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("0123456789abcdef")
    locked, body = ingress(tenants=of_keys(tmp_path / "keys")), {"model": "tiny"}
    assert post(locked, json=body, headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 200
    assert post(locked, json=body, headers={"X-Api-Key": "0123456789abcdef"}).status_code == 200, "as Anthropic's clients send it"
    both = {"X-Api-Key": "0123456789abcdef", "Authorization": "Bearer x"}
    assert post(locked, json=body, headers=both).status_code == 401
    assert post(locked, "/v1/completions?api_key=0123456789abcdef", json=body).status_code == 401


def test_a_request_without_a_key_is_answered_as_openai_does(app: IngressApp) -> None:
    said = "no API key was given; send the header `Authorization: Bearer KEY` with a key of this server"
    assert ask(app, "/v1/completions").json() == error(said, "invalid_api_key", 401)
