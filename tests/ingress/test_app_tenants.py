"""Every route refuses a request without a key, and one with a wrong key, a key that is not valid any more, or a key without the right."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve_app.batch.service import BatchService
from serve_app.config import BatchSettings
from serve_app.config.model import CanarySettings
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.routes.app import VLLM_ROUTES, WITHOUT_KEY, AppLimits, IngressApp
from serve_app.ingress.routes.sagemaker import INVOCATIONS
from tests.doubles.fleet import MODEL, settings
from tests.ingress.fake_fronts import App, Front, call, echo, error, front, ingress, post
from tests.ingress.tenants import digest, of_file, of_keys

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
READING = ("/v1/models", "/v1/models/chat", "/version", "/fleet")
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


@pytest.fixture
def app(tmp_path: Path) -> IngressApp:
    """An ingress of two models; the tenant red may ask `chat`, and blue `embed`."""
    fronts = [with_names(front("chat"), aliases=("gpt",), adapters=("pirate",)), with_names(front("embed"), adapters=("law",))]
    by_name = {each.model.name: each for each in (*fronts, canary_of("embed"))}

    async def report() -> dict[str, Any]:
        return {}

    return IngressApp(
        by_name,
        AppLimits(1000),
        version={},
        tenants=of_file(tmp_path / "tenants.yaml", FILE),
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
    method = method or ("POST" if path in ASKING else "GET")
    shown = dict(headers or {}) | ({} if key is None else {"Authorization": f"Bearer {KEYS[key]}"})
    return asyncio.run(call(app, method, path, headers=shown, json=body if method == "POST" else None))


INVALID = {
    None: "no API key was given",
    "wrong": "the API key is not known",
    "expired": "the API key r4 has expired on 2026-12-31",
    "revoked": "the API key r5 was revoked on 2026-12-30",
}


@pytest.mark.parametrize("key", INVALID)
def test_no_route_answers_without_a_valid_key(app: IngressApp, key: str | None) -> None:
    tricks = [
        "/v1/models/",
        "//v1/files",
        "/v1/files/",
        "/v1/%2e%2e/healthz",
        "/healthz/",
        "/HEALTHZ",
        "/metrics/x",
        "/docs",
        "/v1/x",
    ]
    paths = [
        *READING,
        *STORED,
        *ASKING,
        *tricks,
        "/v1/responses/x",
        "/v1/completions?key=" + KEYS["whole"],
        "/v1/chat%2fcompletions",
    ]
    for path in paths:
        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            answer = ask(app, path, key, method=method, headers=SPOOFED, body={"model": "chat", "user": "red"})
            assert (path, method, answer.status_code, answer.headers["www-authenticate"]) == (path, method, 401, "Bearer")
            if method != "HEAD":
                assert INVALID[key] in answer.text
                assert not any(secret in answer.text for secret in KEYS.values())


@pytest.mark.parametrize("path", sorted(WITHOUT_KEY))
def test_probes_and_prometheus_need_no_key(app: IngressApp, path: str) -> None:
    assert ask(app, path).status_code == 200


@pytest.mark.parametrize("path", [path for path in ASKING if path not in ("/invocations", "/v1/embeddings")])
def test_routes_of_models_need_the_scope_infer(app: IngressApp, path: str) -> None:
    assert ask(app, path, "infer", {"model": "chat"}).status_code == (400 if path == "/generate" else 200), "it has no prompt"
    refused = ask(app, path, "batch", {"model": "chat"}, headers=SPOOFED)
    said = "the API key r3 of the tenant 'red' lacks the scope 'infer'; use a key that has it"
    if path.startswith("/v1/messages"):
        assert (refused.status_code, refused.json()["error"]) == (403, {"type": "permission_error", "message": said})
    else:
        assert (refused.status_code, refused.json()) == (403, error(said, "missing_scope", 403))


@pytest.mark.parametrize("path", STORED)
def test_files_and_batches_need_the_scope_batch(app: IngressApp, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        refused = ask(app, path, "infer", method=method, headers=SPOOFED)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"].startswith("the API key r2 of the tenant 'red' lacks the scope 'batch'; ")
        assert ask(app, path, "batch", method=method).status_code != 403


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize("key", ["whole", "infer", "batch"])
def test_any_valid_key_reads(app: IngressApp, path: str, key: str) -> None:
    assert ask(app, path, key).status_code == 200


@pytest.mark.parametrize("path", [path for path in ASKING if path != INVOCATIONS])
def test_a_model_of_another_tenant_does_not_exist(app: IngressApp, path: str) -> None:
    for model in ("embed", "law", "embed-next", "no-such-model"):
        refused = ask(app, path, "whole", {"model": model, "user": "blue"}, headers=SPOOFED)
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == f"the model '{model}' does not exist; served here: chat, gpt, pirate"


def test_a_model_includes_its_aliases_adapters_and_canary(app: IngressApp) -> None:
    for key, models in {"whole": ("chat", "gpt", "pirate"), "other": ("embed", "law", "embed-next")}.items():
        assert [ask(app, "/v1/completions", key, {"model": model}).status_code for model in models] == [200] * len(models)


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
