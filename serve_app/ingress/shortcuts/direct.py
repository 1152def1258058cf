"""Direct routes call vLLM's handlers of chat and completions without the web framework around them.

Between a body and vLLM's handler, vLLM's app runs Starlette's middlewares, FastAPI's routing and dependencies, and two tasks that wait for
the client to disconnect. They take 0.8 ms of CPU a request and change nothing in the answer. Here the body becomes vLLM's own request, and
vLLM's own handler answers it.

Three rules keep the answers equal. A request whose headers ask for more, or that vLLM's pydantic model refuses, goes to vLLM's app, which
makes the error. An exception of the handler goes through vLLM's exception handlers, by Starlette's own middlewares. Direct routes exist
only if the routes and middlewares of the model's app are those that this module knows.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.elastic_ep.middleware import ScalingMiddleware
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from serve_app.ingress.front_end.log_probabilities import JSONInSlices
from serve_app.ingress.http.connection import GONE
from serve_app.ingress.http.first_errors import FirstErrors, of_model

_KNOWN_MIDDLEWARE = frozenset({CORSMiddleware, PrometheusInstrumentatorMiddleware, ScalingMiddleware})
"""Middlewares that a direct route may leave out. CORS does nothing without the header Origin; the instrumentator counts, as `metrics` does
here; the last one refuses requests while an engine of vLLM's own scales, which no engine of a fleet does."""

_JSON = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})
_ELSEWHERE = frozenset({b"origin", b"endpoint-load-metrics-format"})
"""Request headers that change the headers of the answer."""

_VARY = {"vary": "Origin"}
"""The header that vLLM's CORS middleware adds to each answer, although no other origin is allowed here."""

_SSE: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"vary", b"Origin")],
}

_ERROR = "serve_app.error"

_Handler = Callable[[BaseModel, Request], Awaitable[AsyncGenerator[str, None] | BaseModel]]


@dataclass(frozen=True)
class DirectRoute:
    """One route of one model's app."""

    app: FastAPI
    errors: ASGIApp
    requests: FirstErrors
    """The validator of bodies."""
    handle: _Handler

    def answer_to(self, scope: Scope, body: bytes, note_gone: Callable[[], None]) -> "DirectAnswer | None":
        """Return the app that answers the request; None if vLLM's app has to answer it.

        Args:
            note_gone: Called when the client disconnects before the end of the answer.
        """
        if not _is_plain(scope):
            return None
        try:
            values = json.loads(body)
            if not isinstance(values, dict):
                return None
            return DirectAnswer(self, self.requests.validate_python(values), note_gone)
        except Exception:  # whatever a validator of vLLM raises: vLLM's app validates again, and reports it
            return None


class DirectAnswer:
    """The ASGI app of one request whose body was read."""

    def __init__(self, route: DirectRoute, request: BaseModel, note_gone: Callable[[], None]) -> None:
        self._route = route
        self._request = request
        self._note_gone = note_gone
        self._is_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. When the client disconnects, cancel the handler, as vLLM's app does, and return."""
        task = asyncio.current_task()
        assert task is not None

        def gone() -> None:
            self._is_gone = True
            self._note_gone()
            task.cancel()

        scope["app"] = self._route.app
        scope["state"][GONE] = gone
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_gone:
                raise
        finally:
            scope["state"].pop(GONE, None)
            if self._is_gone:
                task.uncancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp | None = None
        try:
            result = await self._route.handle(self._request, Request(scope, receive))
            if isinstance(result, ErrorResponse):
                response = JSONResponse(result.model_dump(), result.error.code, _VARY)
            elif isinstance(result, BaseModel):
                response = JSONInSlices(result.model_dump(), headers=_VARY)
                await response.make()
        except Exception as error:  # also half a surrogate pair in an answer, which cannot be UTF-8
            await self._route.errors({**scope, _ERROR: error}, receive, send)
            return
        if self._is_gone:  # vLLM's handler has turned the cancellation into an error
            return
        if response is not None:
            await response(scope, receive, send)
        elif not isinstance(result, BaseModel):
            await send(_SSE)
            async for event in result:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def direct_routes(app: FastAPI, args: argparse.Namespace) -> dict[str, DirectRoute]:
    """Return by path the routes of ``app`` that can be answered directly."""
    if args.enable_server_load_tracking or args.allowed_origins or {each.cls for each in app.user_middleware} - _KNOWN_MIDDLEWARE:
        return {}
    state = app.state
    chat, completion = getattr(state, "openai_serving_chat", None), getattr(state, "openai_serving_completion", None)
    routes, errors = {}, _errors_of(app)
    if chat is not None and _is_vllms(app, "/v1/chat/completions", create_chat_completion):
        routes["/v1/chat/completions"] = DirectRoute(app, errors, of_model(ChatCompletionRequest), chat.create_chat_completion)
    if completion is not None and _is_vllms(app, "/v1/completions", create_completion):
        routes["/v1/completions"] = DirectRoute(app, errors, of_model(CompletionRequest), completion.create_completion)
    return routes


def _is_vllms(app: FastAPI, path: str, endpoint: Callable[..., Any]) -> bool:
    """Return whether vLLM's own function is the only handler of ``path``: a plugin may add routes."""
    return [getattr(route, "endpoint", None) for route in app.routes if getattr(route, "path", None) == path] == [endpoint]


def _is_plain(scope: Scope) -> bool:
    """Return whether the headers ask for a plain answer to JSON, and the server reports when the client disconnects."""
    if GONE not in scope.get("state", ()):  # the server is not ours, or the client has disconnected already
        return False
    num_types = 0
    for name, value in scope["headers"]:
        if name == b"content-type":
            if value not in _JSON:
                return False
            num_types += 1
        elif name in _ELSEWHERE:
            return False
    return num_types == 1


def _errors_of(app: FastAPI) -> ASGIApp:
    """Return an app that raises the error in its scope, so that vLLM's exception handlers answer.

    An error that has only the handler of all exceptions is raised again after the answer, as by vLLM's app.
    """

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise scope[_ERROR]

    cors_class: Any = CORSMiddleware
    cors = [each for each in app.user_middleware if each.cls is cors_class]
    errors: Any = Starlette(middleware=cors, exception_handlers=app.exception_handlers)
    errors.state, errors.router = app.state, fail
    return errors
