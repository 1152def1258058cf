"""The app is the ingress's ASGI application: an allow-list of routes in front of one vLLM app per model.

It is pure ASGI. It reads the body of a request once, within a limit. The body's ``model`` selects the front end, and vLLM's app answers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.batch.records import NO_OWNER, KeyState, Owner
from serve_app.batch.service import BatchService, Routes
from serve_app.core.tenants import Caller
from serve_app.errors import (
    BadRequest,
    IngressOverloaded,
    InvalidApiKey,
    NotSupported,
    RequestTooLarge,
    ServerStopping,
    ServingError,
    TooManyConnections,
)
from serve_app.host import descriptors
from serve_app.ingress.books.books import Books
from serve_app.ingress.books.metrics import count_http
from serve_app.ingress.books.receipt import HEADER as RECEIPT
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer, answering
from serve_app.ingress.fleet.quotas import HEADERS as QUOTA_HEADERS
from serve_app.ingress.fleet.quotas import Quotas
from serve_app.ingress.front_end.front_end import FrontEnd, serves
from serve_app.ingress.http.body_fields import RESPONSES_STATE, check_num_values, check_request_id, parse_fields
from serve_app.ingress.http.callers import Tenants, shown_key
from serve_app.ingress.http.connection import CROWDED, STALLED
from serve_app.ingress.http.error_answers import answer_of, behind, describe_error, method_not_allowed, not_found
from serve_app.ingress.http.loop_lag import LoopLag
from serve_app.ingress.routes.bodies import Bodies, replay, tokenizer_bytes
from serve_app.ingress.routes.canary import SHARED_ROUTES
from serve_app.ingress.routes.front_page import FrontPage
from serve_app.ingress.routes.generate import generate_route
from serve_app.ingress.routes.own_answers import MODELS, REQUESTS, FleetReport, OwnAnswers, json_answer
from serve_app.ingress.routes.running import RunningRequests
from serve_app.ingress.routes.sagemaker import INVOCATIONS, PING, route_of
from serve_app.ingress.routes.served_models import ServedModels

logger = logging.getLogger(__name__)

VLLM_ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/tokenize",
        "/detokenize",
    }
)
"""POST routes that vLLM's app answers. vLLM registers many more, but a route that is not listed here does not exist."""

WITHOUT_KEY = frozenset({"/", "/healthz", "/health", "/readyz", "/metrics", PING})
"""Routes that probes, Prometheus and browsers read without a key. They show names, counts, names of tenants, and ids of keys; if
``ingress.key_latencies`` is set, also how long the answers to each key took (TTFT, TPOT, E2E). They show nothing about a single request."""

_TOKENIZERS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})

_A_MODEL = f"{MODELS}/"

_RETRY_AFTER_S = 1.0
"""The Retry-After of an ingress that stops or is overloaded. Other ingresses take the request at once; a client of the only ingress should
not retry sooner."""


@dataclass(frozen=True)
class AppLimits:
    """Limits for one request before vLLM sees it, and for the silence of its stream."""

    max_body_bytes: int
    body_timeout_s: float = 120.0
    """Seconds from the head to the end of the body; 10 MiB in that time are 0.7 Mbit/s."""
    stream_silence_s: float = 5.0
    max_loop_lag_s: float = 2.0


class IngressApp:
    """The ASGI application of one ingress."""

    def __init__(
        self,
        front_ends: Mapping[str, FrontEnd],
        limits: AppLimits,
        *,
        version: Mapping[str, Any],
        tenants: Tenants | None = None,
        quotas: Quotas | None = None,
        fleet_id: str = "",
        books: Books | None = None,
        sagemaker: bool = False,
        generate_end: bytes = b"\n",
        batches: BatchService | None = None,
        report: FleetReport | None = None,
        cors_origins: Sequence[str] = (),
    ) -> None:
        self.draining = False
        self._cors = _cors(self._answer_errors, cors_origins)
        self.books = books or Books()
        self._stopped = False
        self._running = RunningRequests(front_ends)
        self._models = ServedModels(front_ends)
        self.front_ends = front_ends
        self.canaries = self._models.canaries
        self._limits = limits
        self._bodies = Bodies(limits.max_body_bytes, limits.body_timeout_s)
        self.lag = LoopLag(limits.max_loop_lag_s)
        self.tenants, self.quotas = tenants, quotas
        self._generate = {
            name: generate_route(front.engine, max_logprobs=front.max_logprobs, end=generate_end, adapters=front.adapters)
            for name, front in front_ends.items()
        }
        self._post = VLLM_ROUTES | {"/generate"}
        self._own = OwnAnswers(
            self._models.listed, version=version, fleet_id=fleet_id, is_draining=lambda: self.draining, report=report
        )
        self._front_page = FrontPage(needs_keys=tenants is not None)
        self._get = self._own.by_path()
        if sagemaker:
            self._get[PING] = self._own.readyz
            self._post |= {INVOCATIONS}
        self._stored: dict[str, Routes] = {} if batches is None else {"/v1/files": batches.files, "/v1/batches": batches.batches}
        """Routes of stored files and batches, including all paths below them."""

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    def end_all(self) -> None:
        """End every running request with one error, after all text that has arrived for it, and refuse all new requests."""
        self._stopped = True
        self._running.end_all(ServerStopping(retry_after_s=_RETRY_AFTER_S))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_cross = self._cors is not None and any(name == b"origin" for name, _ in scope["headers"])
        await (self._cors if self._cors is not None and is_cross else self._answer_errors)(scope, receive, send)

    async def _answer_errors(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.monotonic()
        try:
            refusal = await self._route(scope, receive, send)
        except ServingError as exc:
            refusal = answer_of(exc, scope["path"]).response()
        if refusal is not None:
            route, method = (scope["path"], scope["method"]) if scope["path"] in self._post else ("none", "none")
            head = {"status": refusal.status_code, "headers": refusal.raw_headers}
            count_http(route, scope["headers"], head, time.monotonic() - began_at, method)
            await refusal(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Answer the request, and return None; or return the answer to a request that no route takes."""
        path, method = scope["path"], scope["method"]
        caller: Caller | None = None
        if self.tenants is not None and path not in WITHOUT_KEY:
            caller = await self.tenants.identify(shown_key(scope["headers"]))
        if (answer := self._get.get(path)) is not None:
            response = await answer() if method in ("GET", "HEAD") else method_not_allowed("GET, HEAD")
            await response(scope, receive, send)
        elif path in self._post:
            if method != "POST":
                return method_not_allowed("POST")
            if caller is not None:
                caller.check_scope("infer")
            await self._serve(Exchange(path, caller), scope, receive, send)
        elif path == MODELS:
            response = await self._own.models(caller) if method in ("GET", "HEAD") else method_not_allowed("GET, HEAD")
            await response(scope, receive, send)
        elif path == REQUESTS:
            if method not in ("GET", "HEAD"):
                return method_not_allowed("GET, HEAD")
            tenant = None if caller is None else caller.tenant.name
            ways = self.books.recent.shown(reversed(self._running), tenant, time.monotonic())
            await json_answer(ways)(scope, receive, send)
        elif path == "/" and method in ("GET", "HEAD"):
            await self._front_page.answer(dict(scope["headers"]))(scope, receive, send)
        elif path.startswith(_A_MODEL) and method in ("GET", "HEAD"):
            await (await self._own.model(path.removeprefix(_A_MODEL), caller))(scope, receive, send)
        elif (stored := self._stored.get("/".join(path.split("/", 3)[:3]))) is not None:
            if caller is not None:
                caller.check_scope("batch")
            owner = NO_OWNER if caller is None else Owner(caller.tenant.name, caller.key.id)
            await self._answer_stored(stored, scope, receive, send, owner)
        elif path.startswith("/v1/responses/") and path != "/v1/responses/input_tokens":
            raise NotSupported(feature=f"{method} {path}", hint=RESPONSES_STATE)
        elif not self._stored and path.startswith(("/v1/files", "/v1/batches")):
            return not_found(path, f"{path[:200]} does not exist here: this server stores no files and batches (ingress.batch)")
        elif path in (PING, INVOCATIONS):
            return not_found(
                path, f"{path} does not exist here: this server has no routes of SageMaker (ingress.sagemaker_routes)"
            )
        else:
            return not_found(path)
        return None

    async def answer_line(self, scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        """Answer a line of the ``owner``'s batch. The line gets only places that no other request wants."""
        try:
            caller = self._caller_of(owner)
            await self._serve(Exchange(scope["path"], caller, background=True), scope, receive, send)
        except ServingError as exc:
            await answer_of(exc).response()(scope, receive, send)

    def state_of_key(self, owner: Owner) -> KeyState:
        """Return whether the API key by which the owner made a batch may run batches."""
        if self.tenants is None or owner == NO_OWNER:
            return "valid"
        try:
            return "unknown" if self.tenants.caller_of_batch(*owner) is None else "valid"
        except InvalidApiKey:
            return "ended"

    def models_of(self, owner: Owner) -> list[str]:
        """Return the names that lines of the owner's batches may ask for."""
        try:
            return self._models.names(self._caller_of(owner))
        except InvalidApiKey:
            return []

    def _caller_of(self, owner: Owner) -> Caller | None:
        """Return for whom the batch of an owner runs; None for batches that were made while the ingress asked for no key.

        Raises:
            InvalidApiKey: The key is not known, or is not valid any more, or may not run batches any more.
        """
        if self.tenants is None or owner == NO_OWNER:
            return None
        if (caller := self.tenants.caller_of_batch(*owner)) is None:
            raise InvalidApiKey(f"the API key of this batch of the tenant {owner.tenant!r} is not known")
        return caller

    def problem_of_line(self, line: bytes) -> str:
        """Return why a line of a batch must be refused before it is parsed, "" if it need not. The limits are those of a body over HTTP."""
        if len(line) > (limit := self._limits.max_body_bytes):
            return f"has {len(line)} bytes, limit {limit}"
        try:
            check_num_values(line, self._models.max_model_len)
        except BadRequest as exc:
            return exc.problem
        return ""

    async def _answer_stored(self, routes: Routes, scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        handlers = routes.methods(tuple(scope["path"].split("/")[3:]))
        if handlers is None:
            await not_found(scope["path"])(scope, receive, send)
        elif (handler := handlers.get(scope["method"])) is None:
            await method_not_allowed(", ".join(handlers))(scope, receive, send)
        else:
            self._refuse_if_unable(scope)
            with contextlib.suppress(ClientDisconnect):
                response = await handler(Request(scope, receive), owner)
                await response(scope, receive, send)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, and write its end into the books in any case."""
        held = HeldAnswer(self.books.begin(exchange, scope, send), exchange)
        try:
            await self._answer_in_time(scope, receive, send, held)
        except ServingError as exc:
            exchange.fail(exc)
            raise
        finally:
            exchange.stalled = STALLED in scope.get("state", ())
            if self.quotas is not None:
                self.quotas.end(exchange)
            self.books.end(exchange)

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send, held: HeldAnswer) -> None:
        """Answer the request until it is answered, or its tenant's time is over, or `end_all` ends it."""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value.decode("latin-1")
                check_request_id("X-Request-Id", request_id)
                held.exchange.id = request_id
        self._refuse_if_unable(scope)
        if self.quotas is not None and scope["path"] not in _TOKENIZERS and (caller := held.exchange.caller) is not None:
            self.quotas.check(caller.tenant)
        await self._running.answer(held, self._read_and_answer(scope, receive, held))

    def _refuse_if_unable(self, scope: Scope) -> None:
        """Refuse the request if the ingress has stopped, is overloaded, or has no file descriptors left for clients."""
        if self._stopped:
            raise ServerStopping(retry_after_s=_RETRY_AFTER_S)
        if CROWDED in scope.get("state", ()):
            raise TooManyConnections(descriptors.limit(), retry_after_s=_RETRY_AFTER_S)
        if self.lag.is_overloaded:
            raise IngressOverloaded(self.lag.limit_s, retry_after_s=_RETRY_AFTER_S)

    async def _read_and_answer(self, scope: Scope, receive: Receive, held: HeldAnswer) -> None:
        path, exchange = scope["path"], held.exchange
        try:
            body = await self._bodies.read(scope, receive, exchange.tenant or "")
        except ClientDisconnect:
            exchange.client_gone()
            return
        check_num_values(body, self._models.max_model_len)
        fields = parse_fields(body)
        exchange.asked(fields)
        if path == INVOCATIONS:
            path = route_of(body)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        front = self._models.front_end(path, fields, caller := exchange.caller)
        if caller is not None and fields is not None:
            caller.tenant.check_asked(fields)
        if path in _TOKENIZERS and len(body) > (limit_bytes := tokenizer_bytes(front.engine.model_config.max_model_len)):
            raise RequestTooLarge(size_bytes=len(body), limit_bytes=limit_bytes)
        app_of = partial(self._app_of, path, held)
        again = partial(replay, body, receive, exchange.client_gone)
        is_own = fields is None or not fields.model or fields.model == front.model.name  # neither an alias nor an adapter
        if path in SHARED_ROUTES and is_own and (canary := self.canaries.get(front.model.name)) is not None:
            target = canary.split(app_of, front, again)
        else:
            target = await app_of(front)
            if (route := front.shortcuts.direct.get(path)) is not None:
                target = route.answer_to(scope, body, exchange.client_gone) or target
        await self._answer(target, front, scope, again(), held)

    async def _app_of(self, path: str, held: HeldAnswer, front: FrontEnd) -> ASGIApp:
        """Note that this front end answers, and return its app for the route."""
        held.exchange.model = front.model.name
        vllm_app = await front.app()
        held.repeats, held.gather = path in front.shortcuts.repeats, front.shortcuts.gather
        if path == "/generate":
            return self._generate_app(front)
        if serves(vllm_app, path):
            return vllm_app
        return not_found(path, f"the model {front.model.name!r} does not serve {path}: it is for {' and '.join(front.tasks)}")

    async def _answer(self, target: ASGIApp, front: FrontEnd, scope: Scope, receive: Receive, held: HeldAnswer) -> None:
        path, exchange, began_at = scope["path"], held.exchange, time.monotonic()
        raised: Exception | None = None
        try:
            with answering(held):
                async with held.filling(asyncio.get_running_loop().call_later, self._limits.stream_silence_s):
                    await target(scope, receive, held)
        except Exception as error:
            # vLLM's app raises an error after a stream has begun, because the stream cannot report it any more. The app also raises
            # an error that it has answered with 500.
            if not exchange.status and exchange.error is None:  # the client was sent nothing: the error has a status
                await describe_error(behind(error)).response()(scope, receive, held)
            elif not await held.end():
                raise  # the listener cuts the connection, so that the client does not take a part for the whole answer
            else:
                raised = error
        finally:
            count_http(path, scope["headers"], held.head, time.monotonic() - began_at)
            if (raised or exchange.status >= 500) and exchange.error is None:
                line = "%s for the model %r failed with status %d, request %s"
                logger.error(line, path, front.model.name, exchange.status, exchange.engines_id, exc_info=raised)

    def _generate_app(self, front: FrontEnd) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await self._generate[front.model.name](Request(scope, receive))
            await response(scope, receive, send)

        return app


def _cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp | None:
    """Return the app that answers requests with an `Origin`, preflights included; None if no other origin may ask."""
    if not origins:
        return None
    shown = ("X-Request-Id", "Retry-After", "Retry-After-Ms", RECEIPT.decode(), *QUOTA_HEADERS)
    methods = ("GET", "POST", "DELETE")
    return CORSMiddleware(app, allow_origins=origins, allow_methods=methods, allow_headers=("*",), expose_headers=shown)
