"""The outer application over fake front ends: small ASGI apps in the place of vLLM's."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import REGISTRY
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import LeaseBoardSilent
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.app import VLLM_ROUTES, AppLimits, IngressApp, tokenizer_bytes
from serve_app.ingress.frontend import FrontEnd
from serve_app.testing.fleet import MODEL, in_loop, settings, until

MAX_BODY_BYTES = 1000


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path and the body."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    answer = {"path": scope["path"], "body": message["body"].decode(), "more": message["more_body"]}
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


class Models:
    """vLLM's OpenAIServingModels: the cards of one front end."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def show_available_models(self) -> Any:
        return SimpleNamespace(model_dump=lambda: {"object": "list", "data": [{"id": self.name}]})


class App:
    """A front end's app: an ASGI callable with vLLM's state."""

    def __init__(self, name: str, asgi: ASGIApp) -> None:
        self.state = SimpleNamespace(openai_serving_models=Models(name))
        self.routes = [SimpleNamespace(path=path) for path in VLLM_ROUTES if name != "chat" or path != "/v1/embeddings"]
        self._asgi = asgi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)


ENGINE = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))


@dataclass
class Front:
    """A front end, in the eyes of the outer application."""

    model: Any
    client: Any
    asgi: App
    engine: Any = field(default_factory=lambda: ENGINE)
    max_logprobs: int = 20
    adapters: Mapping[str, Any] = field(default_factory=dict)
    repeats: frozenset[str] = frozenset()
    direct: Mapping[str, Any] = field(default_factory=dict)

    async def app(self) -> App:
        return self.asgi


def front(name: str, asgi: ASGIApp = echo, *, ready: bool = True, required: bool = True) -> FrontEnd:
    model = settings().models[MODEL].model_copy(update={"name": name, "required": required})
    return cast(FrontEnd, Front(model, SimpleNamespace(is_ready=lambda: ready), App(name, asgi)))


def ingress(*fronts: FrontEnd, keys: ApiKeys | None = None, sagemaker: bool = False) -> IngressApp:
    version = {"version": "0.32.0", "serve_app": "0.1.0"}
    by_name = {f.model.name: f for f in fronts or (front("tiny"),)}
    return IngressApp(by_name, AppLimits(MAX_BODY_BYTES), version=version, keys=keys, sagemaker=sagemaker)


async def call(app: IngressApp, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://ingress") as client:
        response = await client.request(method, path, **kwargs)
    assert app.streams == 0
    return response


def error(message: str, kind: str, code: int, param: str | None = None, **more: object) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def get(app: IngressApp, path: str) -> tuple[int, Any]:
    response = asyncio.run(call(app, "GET", path))
    return response.status_code, response.json()


def post(app: IngressApp, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
    return asyncio.run(call(app, "POST", path, **kwargs))


def counted(model: str) -> dict[str, float]:
    """What `serve_app_requests_total` says of the model, by outcome."""
    samples = [s for m in REGISTRY.collect() if m.name == "serve_app_requests" for s in m.samples if s.name.endswith("_total")]
    return {s.labels["outcome"]: s.value for s in samples if s.labels["model"] == model}


# Counts.


@in_loop
async def test_each_request_to_a_model_is_counted_once_whatever_becomes_of_it_and_no_other_is() -> None:
    app = ingress(front("counted"))
    unknown = counted("").get("invalid", 0.0)
    for path in ("/v1/completions", "/v1/chat/completions"):
        await call(app, "POST", path, json={"model": "counted"})
    await call(app, "POST", "/v1/completions", json={"model": "of nobody"})
    await call(app, "GET", "/v1/models")
    await call(app, "GET", "/v1/completions")
    assert (counted("counted"), counted("")["invalid"] - unknown) == ({"complete": 2.0}, 1.0)


# SageMaker.


@pytest.mark.parametrize(
    ("field", "route"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "/v1/chat/completions"),
        ({"prompt": "a", "model": "tiny"}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
    ],
)
def test_an_invocation_is_answered_by_the_route_that_its_body_is_for(field: dict[str, Any], route: str) -> None:
    response = post(ingress(sagemaker=True), "/invocations", json=field)
    answer = response.json()
    assert (response.status_code, answer["path"], json.loads(answer["body"])) == (200, route, field)


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"no JSON", b"[" * 100_000])
def test_an_invocation_that_is_for_no_route_says_which_fields_tell_one(body: bytes) -> None:
    response = post(ingress(sagemaker=True), "/invocations", content=body[:MAX_BODY_BYTES])
    said = "body: is no JSON object with one of the fields messages, prompt, input, by which /invocations chooses a route"
    assert (response.status_code, response.json()) == (400, error(said, "BadRequestError", 400, "body"))


def test_ping_is_as_ready_as_readyz_and_needs_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("0123456789abcdef\n")
    keys = ApiKeys(tmp_path / "keys")
    assert get(ingress(sagemaker=True, keys=keys), "/ping") == (200, {"status": "ready"})
    assert get(ingress(front("tiny", ready=False), sagemaker=True), "/ping")[0] == 503
    assert post(ingress(sagemaker=True, keys=keys), "/invocations", json={"prompt": "a"}).status_code == 401


def test_sagemakers_routes_are_not_there_unless_configured() -> None:
    assert get(ingress(), "/ping")[0] == 404
    assert post(ingress(), "/invocations", json={"prompt": "a"}).status_code == 404


# Routes.


@in_loop
async def test_a_route_that_is_not_for_this_kind_of_model_is_named_with_the_model() -> None:
    response = await call(ingress(front("chat")), "POST", "/v1/embeddings", json={"model": "chat", "input": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "/v1/embeddings for the model 'chat' does not exist here"


@pytest.mark.parametrize("path", sorted(VLLM_ROUTES))
def test_a_route_of_vllms_reaches_its_app_with_the_whole_body(path: str) -> None:
    answer = post(ingress(), path, content=b'{"model": "tiny", "x": 1}')
    assert answer.json() == {"path": path, "body": '{"model": "tiny", "x": 1}', "more": False}


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/load_lora_adapter", "/pause", "/v1/completions/"])
def test_what_is_not_on_the_list_does_not_exist(path: str) -> None:
    for method in ("GET", "POST"):
        response = asyncio.run(call(ingress(), method, path))
        assert response.status_code == 404
        assert response.json() == error(f"{path} does not exist here", "NotFoundError", 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("DELETE", "/generate", "POST"), ("POST", "/v1/models", "GET, HEAD")],
)
def test_another_method_is_told_which_are_allowed(method: str, path: str, allowed: str) -> None:
    response = asyncio.run(call(ingress(), method, path))
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json() == error(f"allowed methods: {allowed}", "Method Not Allowed", 405)


def test_stored_responses_are_not_supported_and_say_so() -> None:
    status, body = get(ingress(), "/v1/responses/resp_1")
    message = "GET /v1/responses/resp_1 is not supported; this server keeps no responses between requests"
    assert (status, body) == (400, error(message, "BadRequestError", 400))


@in_loop
async def test_the_fleet_is_asked_for_once_however_many_people_look() -> None:
    num_asked = 0

    async def report() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        return {"members": [{"replica_id": "a"}], "decisions": []}

    app = IngressApp({"tiny": front("tiny")}, AppLimits(MAX_BODY_BYTES), version={}, report=report)
    answers = await asyncio.gather(*(call(app, "GET", "/fleet") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json().items() >= {"members": [{"replica_id": "a"}], "decisions": []}.items()
    assert num_asked == 1


@in_loop
async def test_a_fleet_that_cannot_be_told_is_503_and_other_routes_go_on() -> None:
    async def report() -> dict[str, Any]:
        raise LeaseBoardSilent(retry_after_s=2.0)

    app = IngressApp({"tiny": front("tiny")}, AppLimits(MAX_BODY_BYTES), version={}, report=report)
    refused = await call(app, "GET", "/fleet")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert refused.json()["error"]["type"] == "lease_board_silent"
    assert (await call(app, "GET", "/v1/models")).status_code == 200


def test_without_a_board_there_is_no_fleet_to_tell() -> None:
    assert get(ingress(), "/fleet")[0] == 404


def test_version_and_models_are_of_all_front_ends() -> None:
    app = ingress(front("tiny"), front("big"))
    assert get(app, "/version") == (200, {"version": "0.32.0", "serve_app": "0.1.0"})
    assert get(app, "/v1/models") == (200, {"object": "list", "data": [{"id": "tiny"}, {"id": "big"}]})


def test_a_model_is_told_by_its_id_and_an_unknown_one_is_404() -> None:
    app = ingress(front("tiny"), front("org/big"))
    assert get(app, "/v1/models/org/big") == (200, {"id": "org/big"})
    status, body = get(app, "/v1/models/small")
    assert (status, body["error"]["code"]) == (404, 404)
    assert "tiny, org/big" in body["error"]["message"]
    assert asyncio.run(call(app, "POST", "/v1/models/tiny")).status_code == 404


def test_metrics_are_prometheus_text() -> None:
    response = asyncio.run(call(ingress(), "GET", "/metrics"))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")


# Readiness.


def test_an_ingress_is_alive_whatever_its_replicas() -> None:
    assert get(ingress(front("tiny", ready=False)), "/healthz") == (200, {"status": "ok", "fleet": ""})
    response = asyncio.run(call(ingress(front("tiny", ready=False)), "GET", "/health"))
    assert (response.status_code, response.content) == (200, b""), "as vLLM's"


def test_an_ingress_is_ready_when_every_required_model_has_a_replica() -> None:
    optional = front("optional", ready=False, required=False)
    assert get(ingress(front("tiny"), optional), "/readyz") == (200, {"status": "ready"})
    waiting = {"status": "waiting", "models_without_a_replica": ["big"]}
    assert get(ingress(front("tiny"), front("big", ready=False)), "/readyz") == (503, waiting)


def test_a_draining_ingress_is_not_ready_and_still_answers() -> None:
    app = ingress()
    app.draining = True
    assert get(app, "/readyz") == (503, {"status": "draining"})
    assert post(app, content=b"{}").status_code == 200


# Which model.


async def name_of_big(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'"big"'})


def test_the_bodys_model_picks_the_front_end() -> None:
    app = ingress(front("tiny"), front("big", name_of_big))
    assert post(app, content=b'{"model": "big"}').json() == "big"
    assert post(app, content=b'{"model": "tiny"}').json()["path"] == "/v1/completions"


def test_an_unknown_model_is_told_what_is_served() -> None:
    response = post(ingress(front("tiny"), front("big")), content=b'{"model": "huge"}')
    message = "the model 'huge' does not exist; served here: tiny, big"
    assert (response.status_code, response.json()) == (404, error(message, "NotFoundError", 404, "model"))


def test_without_a_model_the_only_one_is_meant_and_of_several_none() -> None:
    assert post(ingress(), content=b"{}").status_code == 200
    response = post(ingress(front("tiny"), front("big")), content=b"{}")
    assert (response.status_code, response.json()) == (
        400,
        error("model: name one of tiny, big", "BadRequestError", 400, "model"),
    )


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": 5}', b"[]", b"[" * 400, b'{"model": "\xff"}'])
def test_a_body_that_tells_no_model_gets_vllms_own_error_from_the_first_front_end(body: bytes) -> None:
    app = ingress(front("big", name_of_big), front("tiny"))
    assert post(app, content=body).json() == "big"


# Limits.


def test_an_announced_body_over_the_limit_is_refused_unread() -> None:
    response = post(ingress(), content=b"x" * (MAX_BODY_BYTES + 1))
    message = "the request has at least 1001 bytes, limit 1000"
    assert (response.status_code, response.json()) == (413, error(message, response.json()["error"]["type"], 413))


def test_a_chunked_body_is_refused_as_soon_as_it_is_over_the_limit() -> None:
    given = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(100):
            given += 1
            yield b"x" * 400

    response = post(ingress(), content=chunks())
    assert response.status_code == 413
    assert "has at least 1200 bytes, limit 1000" in response.json()["error"]["message"]
    assert given < 100


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_tokenizers_routes_take_less_so_that_no_chat_waits_long_for_it(path: str) -> None:
    limits = AppLimits(4 << 20)
    app = IngressApp({"tiny": front("tiny")}, limits, version={})
    small, large = (json.dumps({"prompt": "a" * size}).encode() for size in (tokenizer_bytes(2048) - 50, tokenizer_bytes(2048)))
    assert post(app, path, content=small).status_code == 200
    refused = post(app, path, content=large)
    assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")
    assert str(tokenizer_bytes(2048)) in refused.json()["error"]["message"]
    assert post(app, "/v1/completions", content=large).status_code == 200


def test_a_model_with_a_long_context_has_a_longer_limit_for_them() -> None:
    assert tokenizer_bytes(1 << 20) > 8 * (1 << 20)


def test_a_chunked_body_within_the_limit_arrives_whole() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"model": ', b'"tiny"', b"}"):
            yield part

    assert post(ingress(), content=chunks()).json()["body"] == '{"model": "tiny"}'


# Clients that go away.


def asgi_call(app: IngressApp, receive: Callable[[], Awaitable[Message]], sent: list[Message]) -> Awaitable[None]:
    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    return app(scope, receive, send)


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("never set")


@in_loop
async def test_a_client_that_goes_away_before_its_body_is_read_gets_nothing() -> None:
    messages: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    app = ingress()
    await asgi_call(app, receive, sent)
    assert (sent, app.streams) == ([], 0)


@in_loop
async def test_a_request_that_is_cancelled_while_its_body_is_read_or_answered_is_no_longer_counted() -> None:
    reached = asyncio.Event()

    async def answers_never(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reached.set()
        await receive()

    async def no_body() -> Message:
        reached.set()
        return await nothing()

    messages: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def body_and_no_more() -> Message:
        return messages.pop() if messages else await nothing()

    app = ingress(front("tiny", answers_never))
    for receive in (no_body, body_and_no_more):
        reached.clear()
        task = asyncio.ensure_future(asgi_call(app, receive, []))
        await until(reached.is_set)
        assert app.streams == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert app.streams == 0


@in_loop
async def test_an_app_sees_a_disconnect_after_the_body_it_was_given() -> None:
    seen: list[str] = []

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    messages: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    await asgi_call(ingress(front("tiny", reader)), receive, [])
    assert seen == ["http.request", "http.disconnect"]


# API keys.


@pytest.fixture
def locked(tmp_path: Path) -> IngressApp:
    """An ingress that asks for the key `0123456789abcdef`."""
    (tmp_path / "keys").write_text("0123456789abcdef")
    return ingress(keys=ApiKeys(tmp_path / "keys"))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/tiny",
        "/version",
        "/v1/completions",
        "/generate",
        "/v1/responses/x",
        "/docs",
        "/metrics/",
        "/fleet",
    ],
)
def test_without_a_key_every_route_answers_401_as_openai_does(locked: IngressApp, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = asyncio.run(call(locked, method, path))
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        said = "no API key was given; send the header `Authorization: Bearer KEY` with a key of this server"
        assert response.json() == error(said, "invalid_api_key", 401)


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz", "/metrics"])
def test_probes_and_prometheus_need_no_key(locked: IngressApp, path: str) -> None:
    assert asyncio.run(call(locked, "GET", path)).status_code == 200


def test_a_request_with_a_key_is_served_and_the_key_is_looked_for_nowhere_else(locked: IngressApp) -> None:
    body = {"model": "tiny"}
    assert post(locked, json=body, headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 200
    assert post(locked, json=body, headers={"X-Api-Key": "0123456789abcdef"}).status_code == 401
    assert post(locked, "/v1/completions?api_key=0123456789abcdef", json=body).status_code == 401
