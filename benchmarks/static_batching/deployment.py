"""The Ray Serve deployment is one replica that runs one batch at a time, behind Serve's own HTTP proxy.

POST /v1/completions   one greedy answer; ``stream`` sends it as one event at the end of the batch
GET  /v1/models  /healthz  /settings  /batches   the model; liveness; the settings; records of all batches since the settings changed
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from ray import serve

from benchmarks.static_batching.answers import StaticAnswer, StaticRequest, body_of, parse_ask, single_prompt, stream_of
from benchmarks.static_batching.batches import BatchGate, BatchRecord, Member, num_steps
from benchmarks.static_batching.engines import BatchRequest, SimulatedEngine, TransformersEngine, make_engine, own_tokens
from benchmarks.static_batching.settings import StaticSettings, parse_static
from serve_app.checkpoints import resolve_model
from serve_app.config import default_cache_dir
from serve_app.errors import BadRequest, ServingError

MAX_RECORDS = 20_000
MAX_ONGOING_REQUESTS = 8192  # a burst waits in the replica: in the proxy its order would be lost
app = FastAPI()


# Defined before the class: `serve.ingress` pickles the class's methods, with all that they use, at its definition.
def _loads(settings: StaticSettings) -> tuple[Any, ...]:
    seed = None if settings.simulated is None else settings.simulated.seed
    return settings.model, settings.simulated is None, seed, settings.num_threads, settings.dtype


def _let_in(turns: list["asyncio.Future[None]"]) -> None:
    """Let all waiting requests continue in one turn of the event loop, so that Serve finds them together."""
    for turn in turns:
        if not turn.done():
            turn.set_result(None)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@serve.ingress(app)
class StaticBatching:
    """A deployment that forms batches and returns the answers when a whole batch is done."""

    def __init__(self) -> None:
        # Serve calls `reconfigure` before the first request.
        self._settings: StaticSettings | None = None
        self._busy = False
        self._engine: SimulatedEngine | TransformersEngine

    def reconfigure(self, values: Mapping[str, Any]) -> None:
        """Apply settings; only another model or device is loaded. Serve calls this at the start and at each change."""
        settings = parse_static(dict(values))
        same = self._settings is not None and _loads(self._settings) == _loads(settings)
        if same:
            self._engine.retime(settings)
        else:
            self._engine = make_engine(settings, Path(resolve_model(settings.model, default_cache_dir())))
        self._settings = settings
        self._gate: BatchGate[asyncio.Future[None]] = BatchGate(settings.batch_size)
        self._records: deque[BatchRecord] = deque(maxlen=MAX_RECORDS)
        self._run_batch.set_max_batch_size(settings.batch_size)
        self._run_batch.set_batch_wait_timeout_s(settings.batch_wait_s * settings.time_scale)

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        assert self._settings is not None
        request_id, name = request.headers.get("x-request-id") or f"cmpl-{uuid.uuid4().hex}", self._settings.name
        try:
            ask = parse_ask(await request.body(), served=name)
            answer = await self._answer(request_id, self._member(ask))
        except ServingError as error:
            return _json({"error": {"message": str(error), "type": error.code, "code": error.http_status}}, error.http_status)
        created = int(time.time())
        if ask.stream:
            events = stream_of(answer, ask.stream_options, request_id=request_id, model=name, created=created)
            return Response(events, media_type="text/event-stream")
        return Response(body_of(answer, request_id=request_id, model=name, created=created), media_type="application/json")

    def _member(self, ask: StaticRequest) -> BatchRequest:
        assert self._settings is not None
        prompt, settings = single_prompt(ask), self._settings
        ids = self._engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        max_tokens = settings.max_output_tokens if ask.max_tokens is None else ask.max_tokens
        limits = (("prompt", len(ids), settings.max_prompt_tokens), ("max_tokens", max_tokens, settings.max_output_tokens))
        for param, size, limit in limits:
            if size > limit:
                raise BadRequest(param=param, problem=f"has {size} tokens, a place in a batch reserves {limit}")
        if not 0 <= min(ids) <= max(ids) < len(self._engine.tokenizer):
            raise BadRequest(param="prompt", problem=f"token ids must be from 0 to {len(self._engine.tokenizer) - 1}")
        return BatchRequest(ids, max_tokens, ask.ignore_eos, time.perf_counter())

    async def _answer(self, request_id: str, request: BatchRequest) -> StaticAnswer:
        gate, turn = self._gate, asyncio.get_running_loop().create_future()
        try:
            _let_in(gate.arrived(turn))
            await turn
            answer: StaticAnswer = await self._run_batch((request_id, request))
            return answer
        finally:
            _let_in(gate.left(turn))

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.0, max_concurrent_batches=1)
    async def _run_batch(self, members: list[tuple[str, BatchRequest]]) -> list[StaticAnswer]:
        assert self._settings is not None
        self._gate.started()
        settings, batch = self._settings, [request for _, request in members]
        steps = num_steps(settings.form, [r.max_tokens for r in batch], settings.max_output_tokens)
        self._busy = True
        try:
            result = await self._engine.run(batch, steps)
        finally:
            self._busy = False
        eos = self._engine.tokenizer.eos_token_id
        answers = []
        for request, place in zip(batch, result.token_ids, strict=True):
            own, reason = own_tokens(place, request, eos)
            text = self._engine.tokenizer.decode(own, skip_special_tokens=True)
            answers.append(StaticAnswer(text, len(request.prompt_ids), len(own), reason))
        who = [Member(i, a.prompt_tokens, a.output_tokens) for (i, _), a in zip(members, answers, strict=True)]
        started = time.time() - time.perf_counter() + result.started_at
        ends = [round(end, 6) for end in result.step_ends_s]
        self._records.append(BatchRecord(started, ends, who, settings.max_length))
        return answers

    @app.get("/v1/models")
    async def models(self) -> Response:
        assert self._settings is not None
        return _json({"object": "list", "data": [{"id": self._settings.name, "object": "model", "owned_by": "serve-app"}]})

    @app.get("/healthz")
    async def healthz(self) -> Response:
        return _json({"status": "ok"})

    @app.get("/settings")
    async def settings(self) -> Response:
        assert self._settings is not None
        own = self._settings
        state = {"batch_size": own.batch_size, "waiting": self._gate.num_waiting, "busy": self._busy}
        return _json({**own.model_dump(mode="json"), **state})

    @app.get("/batches")
    async def batches(self) -> Response:
        return _json(list(self._records))


def build(values: Mapping[str, Any]) -> serve.Application:
    """Return the application for settings given as a mapping; ``serve run`` and RayService import this function.

    Raises:
        ConfigError: The settings are wrong; the message has the first problem.
    """
    parse_static(dict(values))
    options = {"name": "static-batching", "num_replicas": 1, "max_ongoing_requests": MAX_ONGOING_REQUESTS}
    return serve.deployment(StaticBatching, user_config=dict(values), **options).bind()
