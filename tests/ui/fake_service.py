"""This service speaks the part of the HTTP API that the pages use, with answers that a test steers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "right-key"
MODEL = "fake-model"


def member(name: str, *, running: int = 1, state: str = "ready", engine_pid: int | None = None) -> dict[str, Any]:
    """A replica as `/fleet` shows it."""
    load = {"running": running, "waiting": 0, "kv_usage": 0.25, "steps": 9, "links": 1, "start_s": 31.2, "cold_start": {}}
    load |= {"engine_pid": engine_pid}
    common = {"host": "127.0.0.1", "port": 4001, "pid": 1, "epoch": 1, "vllm_version": "0.32.0"}
    return {"replica_id": f"fake#replica#{name}", "role": "replica", "model": MODEL, "state": state, "load": load, **common}


def ingress(*, resumptions: int = 0, cold_start_s: float | None = None) -> dict[str, Any]:
    """An ingress as `/fleet` shows it."""
    counts = {"waiting": 0, "resumptions": resumptions, "moved": 0, "cold_start_s": cold_start_s}
    load = {"streams": 2, "models": {MODEL: counts}}
    common = {"host": "127.0.0.1", "port": 4000, "pid": 2, "epoch": 1, "vllm_version": "0.32.0"}
    return {"replica_id": "fake#ingress#in1", "role": "ingress", "model": "", "state": "ready", "load": load, **common}


def lost(name: str, *, time: float, cause: str = "its engine died") -> dict[str, Any]:
    """A lost replica as `/fleet` shows it."""
    return {"replica_id": f"fake#replica#{name}", "model": MODEL, "time": time, "cause": cause}


def starting(name: str, *, since: float, host: str = "127.0.0.1") -> dict[str, Any]:
    """A replica that starts, as `/fleet` shows it."""
    return {"replica_id": f"fake#replica#{name}", "since": since, "host": host}


def way(name: str, *hops: tuple[str, str], state: str = "running", **more: Any) -> dict[str, Any]:
    """A request as `/fleet/requests` shows it, with its replicas and why it left each; "" if it did not."""
    shown = [{"replica": f"fake#replica#{at}", "reason": "load", "start_s": 0.1, "left": left} for at, left in hops]
    common = {"tenant": None, "key": None, "model": MODEL, "time": 1000.0, "reason": "", "queued_s": 0.25, "total_s": 2.0}
    return {"id": name, "state": state, "output_tokens": 42, "hops": shown, **common, **more}


@dataclass
class FakeService:
    """Each answer says `word 0 word 1 ...`; where ``held`` is set, the words after the first come only when it is released."""

    url: str = ""
    asks_for_key: bool = False
    busy: bool = False
    """Each request is refused with 503."""
    num_words: int = 5
    pause_s: float = 0.0
    holds: bool = False
    """After its second word an answer waits until its client has gone."""
    breaks: bool = False
    """After its second word a stream ends by an error event."""
    line: str = ""
    """The data of one more event after the second word of a stream."""
    model: str = MODEL
    """The only model that is served."""
    thinks: bool = False
    """Each choice of a chat says a thought before its words."""
    listing: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
    """What `/v1/models` answers."""
    running: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    ways: Any = field(default_factory=lambda: {"time": 1000.0, "moved": [], "others": []})
    """What `/fleet/requests` answers; None for a service of an older release."""
    report: Any = field(default_factory=lambda: {"time": 1000.0, "members": [ingress(), member("a")], "decisions": []})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/fleet", self._fleet),
                Route("/fleet/requests", self._requests),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if self.asks_for_key and request.headers.get("authorization") != f"Bearer {KEY}":
            return _error(401, "the request has none of the service's keys", "invalid_api_key")
        return None

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self.listing)

    async def _fleet(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self.report)

    async def _requests(self, request: Request) -> Response:
        missing = None if self.ways is not None else _error(404, "/fleet/requests does not exist here", "NotFoundError")
        return self._refusal(request) or missing or JSONResponse(self.ways)

    async def _answer(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.asked.append(body)
        if body["model"] != self.model:
            return _error(404, f"the model {body['model']!r} does not exist", "NotFoundError")
        if self.busy:
            return _error(503, "no replica of fake-model has room", "no_replica", {"retry-after": "7"})
        return StreamingResponse(self._stream(body, is_chat="messages" in body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], *, is_chat: bool) -> AsyncIterator[str]:
        self.running += 1
        try:
            for choice in range(body["n"]) if self.thinks else ():
                yield event({"choices": [{"index": choice, "delta": {"reasoning": f"thought{choice}"}}]})
            for word in range(self.num_words):
                for choice in range(body["n"]):
                    text = f"{'' if word == 0 else ' '}word{choice}.{word}"
                    piece = {"delta": {"content": text}} if is_chat else {"text": text}
                    finish = "stop" if word == self.num_words - 1 else None
                    yield event({"choices": [{"index": choice, **piece, "finish_reason": finish}]})
                if word == 1 and self.breaks:
                    yield event({"error": {"message": "the replica was lost", "type": "replica_lost", "code": 502}})
                    return
                if word == 1 and self.line:
                    yield f"data: {self.line}\n\n"
                if word == 1 and self.holds:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.pause_s)
            yield event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": self.num_words * body["n"]}})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port while the block lasts; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive() or server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def fake_service(**options: Any) -> Iterator[FakeService]:
    fake = FakeService(**options)
    with listening(fake.app()) as url:
        fake.url = url
        yield fake
