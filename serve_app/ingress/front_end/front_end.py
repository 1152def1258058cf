"""A front end serves one model: vLLM's ``AsyncLLM`` and OpenAI app, built around a ``FleetClient`` instead of a local engine."""

import argparse
import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Scope
from vllm import version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic import api_router as messages_routes
from vllm.entrypoints.anthropic import serving as messages
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completions
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.config import ModelSettings
from serve_app.config.checks import dotted
from serve_app.config.vllm_source import server_arguments_module
from serve_app.core.request_limits import problem_of_params, problem_of_size
from serve_app.engine_args import frontend_engine_args
from serve_app.errors import BadRequest, NotSupported
from serve_app.host.foreign_errors import in_one_line, packages_lacking_by
from serve_app.host.vllm_start import inspect_models_here
from serve_app.ingress.exchange.held_answer import Gather, current_exchange, refuse, write_at_once
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.fleet.intake import adapters_of
from serve_app.ingress.front_end.grammar_checks import GrammarChecks, check_grammars
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.front_end.log_probabilities import make_in_slices
from serve_app.ingress.front_end.media import check_addresses
from serve_app.ingress.front_end.media_failures import start_failure, way_to_get
from serve_app.ingress.front_end.noted_prompts import note_beam_searches, note_prompts
from serve_app.ingress.front_end.stat_logger import SharedPrometheusStatLogger
from serve_app.ingress.http.first_errors import stop_at_first_errors
from serve_app.links.fingerprint import model_fingerprint, public_version

logger = logging.getLogger(__name__)

_TOOL_FLAGS = {"--enable-auto-tool-choice": "enable_auto_tool_choice: true", "--tool-call-parser": "tool_call_parser"}
VLLM_VERSION = public_version(version.__version__)


class _FrontendEngineArgs(AsyncEngineArgs):
    """Engine arguments of a process that computes nothing, so it looks for no quantized kernels."""

    def create_model_config(self) -> Any:
        config = super().create_model_config()
        config.quantization = None
        return config


class _LeavesOutRefusals(logging.Filter):
    """Leaves out the tracebacks that vLLM's routes log for errors of clients, which could fill the disk."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        return not isinstance(error, Exception) or create_error_response(error).error.code >= 500


_leaves_out_refusals = _LeavesOutRefusals()


class AnswersDirectly(Protocol):
    """A route that answers some requests without vLLM's app."""

    def answer_to(self, scope: Scope, body: bytes, note_gone: Callable[[], None]) -> ASGIApp | None:
        """Return the app that answers the request; None if vLLM's has to. ``note_gone`` is called if the client disconnects early."""


class Shortcuts(NamedTuple):
    """The shortcuts of one of vLLM's apps make its answers cheaper. Without any shortcut, every answer is the same."""

    direct: Mapping[str, AnswersDirectly] = {}
    """Direct routes by path."""
    repeats: frozenset[str] = frozenset()
    """Paths with streams whose events differ only in their text."""
    gather: Gather = write_at_once
    """The function that gathers the writes of an answer."""


class FrontEnd:
    """The front end of one model at the ingress."""

    def __init__(self, model: ModelSettings, client: FleetClient, engine: AsyncLLM, args: argparse.Namespace) -> None:
        self.model = model
        self.client = client
        self.engine = engine
        self.max_logprobs: int = engine.model_config.max_logprobs
        self.shortcuts = Shortcuts()
        self.args = args
        """vLLM's parsed command line."""
        self.adapters = adapters_of(model)
        """Adapters by the name for which requests ask."""
        self.grammars: GrammarChecks | None = None
        self.tasks: tuple[str, ...] = ()
        """What the model is for, by vLLM's words: generate, embed, ..."""
        self._app: FastAPI | None = None
        self._shortcuts_of: Callable[[FastAPI], Shortcuts] = lambda _: Shortcuts()

    async def app(self) -> FastAPI:
        """Return vLLM's app for the tasks that the replicas report. It is built again when these change."""
        tasks = await self.client.get_supported_tasks_async()
        if self._app is None or tasks != self.tasks:
            app = build_app(self.args, tasks, self.engine.model_config)
            _refuse_what_has_no_handler(app)
            stop_at_first_errors(app)
            for route in (messages_routes, messages, chat, completions):
                route.logger.addFilter(_leaves_out_refusals)
            await init_app_state(self.engine, app.state, self.args, tasks)
            note_beam_searches(app.state, self.engine.model_config.max_model_len)
            # vLLM's own method would ask an engine to load each adapter, but replicas load them before they take requests.
            app.state.openai_serving_models.lora_requests.update(self.adapters)
            renderer = app.state.online_renderer
            renderer.create_error_response = partial(_error_in_our_keys, renderer.create_error_response, self.model.name)
            # vLLM's error handlers stop the server through this attribute when the engine is dead, and a fleet is never dead.
            app.state.server = SimpleNamespace(should_exit=False)
            self._app, self.tasks = app, tasks
            self.shortcuts = self._shortcuts_of(app)
        return self._app

    def take(self, shortcuts_of: Callable[[FastAPI], Shortcuts]) -> None:
        """Use the shortcuts that this function finds in vLLM's app, and in each app that replaces it. Called before the first `app`."""
        self._shortcuts_of = shortcuts_of


def _error_in_our_keys(create: Callable[..., Any], name: str, message: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what vLLM's method does, but replace flags of `vllm serve` in a refusal by the configuration keys for them."""
    if isinstance(message, str) and any(flag in message for flag in _TOOL_FLAGS):
        for flag, key in _TOOL_FLAGS.items():
            message = message.replace(flag, key)
        message += f" in {dotted(('models', name, 'frontend_args'))} of this server's configuration"
    return create(message, *args, **kwargs)


def _refuse_what_has_no_handler(app: FastAPI) -> None:
    """Add handlers for exceptions that vLLM's app does not handle, so that they become errors of vLLM's form.

    FastAPI raises Starlette's HTTPException for a body that Python cannot parse, and vLLM handles FastAPI's own HTTPException only. JSON
    inside the JSON, like the arguments of a tool call, becomes 400 if it is too deep for Python's parser; vLLM answers 500.
    """
    refuse: Any = app.exception_handlers[ValueError]
    say: Any = app.exception_handlers[HTTPException]

    async def refuse_unparsed(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, StarletteHTTPException)
        # Leave out Python's advice after ";", which is to change the server's limits.
        cause = "" if exc.__cause__ is None else f": {str(exc.__cause__).partition(';')[0]}"
        return cast(Response, await say(request, HTTPException(exc.status_code, f"{exc.detail}{cause}")))

    async def refuse_depth(request: Request, _: Exception) -> Response:
        said = "Some JSON text in the request, like the arguments of a tool call, is nested too deeply"
        return cast(Response, await refuse(request, ValueError(said)))

    _add_handler(app, RecursionError, refuse_depth)
    _add_handler(app, StarletteHTTPException, refuse_unparsed)


def _add_handler(app: FastAPI, kind: type[Exception], handler: Callable[[Request, Exception], Awaitable[Response]]) -> None:
    """Do what Starlette's method does, even if the app's middlewares are built already, as by SageMaker's bootstrap in vLLM."""
    app.add_exception_handler(kind, handler)
    layer: Any = app.middleware_stack
    while layer is not None and not isinstance(layer, ExceptionMiddleware):
        layer = getattr(layer, "app", None)
    if layer is not None:
        layer.add_exception_handler(kind, handler)


def serves(app: FastAPI, path: str) -> bool:
    """Return whether the app of this model has the route: vLLM leaves out ``/v1/embeddings`` for a chat model."""
    return any(getattr(route, "path", None) == path for route in app.routes)


Install = Callable[[FrontEnd], None]


async def build_front_end(
    model: ModelSettings, model_path: str, client: FleetClient, compiler: GrammarCompiler, install: Install | None = None
) -> FrontEnd:
    """Build the front end; takes seconds (tokenizer, chat template) and starts no engine.

    Args:
        compiler: The compiler that checks grammars, shared by all models; its owner closes it.
        install: Installs shortcuts, before vLLM's renderer sees a prompt.

    Raises:
        FrontEndStartFailed: vLLM refuses an argument, or a file of the checkpoint.
    """
    try:
        return await _build(model, frontend_engine_args(model, model_path), client, compiler, install)
    except Exception as exc:  # vLLM raises many types: KeyError for an unknown parser, OSError for a missing tokenizer
        raise start_failure(model.name, exc) from exc


async def _build(
    model: ModelSettings, engine_args: dict[str, Any], client: FleetClient, compiler: GrammarCompiler, install: Install | None
) -> FrontEnd:
    args = _namespace(model, engine_args)
    inspect_models_here()
    check_addresses()
    vllm_config = _FrontendEngineArgs(**engine_args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    engine = _async_llm(vllm_config, client)
    client.bind(
        vllm_config=vllm_config,
        output_processor=engine.output_processor,
        fingerprint=model_fingerprint(vllm_config.model_config),
        vllm_version=VLLM_VERSION,
    )
    for stat_logger in engine.logger_manager.stat_loggers:
        if isinstance(stat_logger, SharedPrometheusStatLogger):
            stat_logger.stats_beside = client.take_stats
    front = FrontEnd(model, client, engine, args)
    _check_parameters(engine)
    _refuse_what_lacks_a_package(engine.renderer, model.name)
    make_in_slices(engine)
    note_prompts(engine)
    if install is not None:
        install(front)
    front.grammars = check_grammars(engine, vllm_config, compiler)
    await front.app()  # an error in building the app is reported now
    return front


def _check_parameters(engine: Any) -> None:
    """Let ``engine`` refuse parameters before it works on them: tokenizing 5 MB of ``bad_words`` held the event loop for 13 s.

    A prompt that is no text yet is checked with them, because the cost of ``n`` and of log probabilities grows with its length.

    A request of a client that has gone is given up here, too: Python 3.11's `asyncio.wait_for`, in which vLLM renders chats, loses a
    cancellation that comes at the moment of its result.
    """
    add, vocab_size = engine.add_request, engine.model_config.get_vocab_size()

    async def add_request(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        if (problem := problem_of_params(params)) is not None:
            refuse(BadRequest(*problem))
        if isinstance(params, SamplingParams) and isinstance(prompt, dict):
            _check_size(params, len(prompt.get("prompt_token_ids") or ()), vocab_size)
        return await add(request_id, prompt, params, *args, **kwargs)

    engine.add_request = add_request


def _check_size(params: SamplingParams, prompt_tokens: int, vocab_size: int) -> None:
    exchange, max_tokens = current_exchange(), params.max_tokens
    if exchange is not None and exchange.caller is not None:
        try:
            max_tokens = exchange.caller.tenant.max_output_tokens(prompt_tokens, max_tokens)
        except BadRequest as exc:
            refuse(exc)
    found = problem_of_size(params, max_tokens or 0, prompt_tokens, 0 if exchange is None else exchange.num_logprobs, vocab_size)
    if isinstance(found, tuple):
        refuse(BadRequest(*found))
    if exchange is not None:
        exchange.num_logprobs = found


def _refuse_what_lacks_a_package(renderer: Any, model: str) -> None:
    """Let vLLM's ``renderer`` refuse a request for which it cannot import a package, and log each such package once.

    vLLM imports some code of media at a request only.
    """
    logged = set[str]()
    for name in ("render_chat_async", "render_cmpl_async"):
        setattr(renderer, name, partial(_render, getattr(renderer, name), model, logged))


async def _render(by_vllm: Callable[..., Awaitable[Any]], model: str, logged: set[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return await by_vllm(*args, **kwargs)
    except Exception as exc:
        if not (lacking := packages_lacking_by(exc)):
            raise
        said = in_one_line(exc)
    packages = " and ".join(lacking)
    way_out = way_to_get(lacking)
    if packages not in logged:
        logged.add(packages)
        logger.warning("requests for %s get 400, since they need the package %s: %s; %s", model, packages, said, way_out)
    needed = f"a request like this one, for which the ingress needs the Python package {packages},"
    refuse(NotSupported(needed, f"the ingress lacks it: ask the operator to {way_out}"))


def _async_llm(vllm_config: Any, client: FleetClient) -> AsyncLLM:
    """Build ``AsyncLLM`` with ``client``. Its constructor calls a static factory, which is replaced during this call."""
    original = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = SimpleNamespace(make_async_mp_client=lambda **_: client)
    try:
        return AsyncLLM.from_vllm_config(
            vllm_config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[SharedPrometheusStatLogger]
        )
    finally:
        async_llm.EngineCoreClient = original


def _namespace(model: ModelSettings, engine_args: dict[str, Any]) -> argparse.Namespace:
    """Return the parsed command line of ``vllm serve``, with our settings over its defaults."""
    arguments: Any = importlib.import_module(server_arguments_module())
    args: argparse.Namespace = arguments.make_arg_parser(FlexibleArgumentParser()).parse_args([])
    ours = {
        "allowed_origins": [],  # no CORS: a browser app that needs CORS is behind its own gateway
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        "enable_flash_late_interaction": False,  # a worker would keep the query for documents, which may come to another engine
        # Answers contain the first name.
        "served_model_name": [model.name, *model.aliases] if model.canary is None else [model.canary.of, model.name],
    }
    for name, value in {**engine_args, **ours, **model.frontend_args}.items():
        setattr(args, name, value)
    return args
