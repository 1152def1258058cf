"""Fake front ends are small ASGI apps in the place of vLLM's, with the outer application over them and requests to it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ingress.fleet.output_path import OutputPath
from serve_app.ingress.front_end.front_end import FrontEnd, Shortcuts
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.routes.app import VLLM_ROUTES, AppLimits, IngressApp
from tests.doubles.fleet import MODEL, settings

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
    shortcuts: Shortcuts = field(default_factory=Shortcuts)
    tasks: tuple[str, ...] = ("generate",)

    async def app(self) -> App:
        return self.asgi


def front(name: str, asgi: ASGIApp = echo, *, ready: bool = True, required: bool = True) -> FrontEnd:
    model = settings().models[MODEL].model_copy(update={"name": name, "required": required})
    client = SimpleNamespace(is_ready=lambda: ready, output_path=OutputPath(lambda _: None, None), intake=SimpleNamespace())
    return cast(FrontEnd, Front(model, client, App(name, asgi)))


def ingress(
    *fronts: FrontEnd, tenants: Tenants | None = None, sagemaker: bool = False, cors_origins: Sequence[str] = ()
) -> IngressApp:
    version = {"version": "0.32.0", "serve_app": "0.1.0"}
    by_name = {f.model.name: f for f in fronts or (front("tiny"),)}
    return IngressApp(
        by_name, AppLimits(MAX_BODY_BYTES), version=version, tenants=tenants, sagemaker=sagemaker, cors_origins=cors_origins
    )


async def call(app: IngressApp, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://ingress") as client:
        response = await client.request(method, path, **kwargs)
    assert app.num_running == 0
    return response


def error(message: str, kind: str, code: int, param: str | None = None, **more: object) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def get(app: IngressApp, path: str) -> tuple[int, Any]:
    response = asyncio.run(call(app, "GET", path))
    return response.status_code, response.json()


def post(app: IngressApp, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
    return asyncio.run(call(app, "POST", path, **kwargs))


async def name_of_big(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'"big"'})
