"""Streams of an ingress are compared with those of vLLM alone, over real HTTP; the fake engine steps when a test calls it."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.config import Settings, parse_settings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.shortcuts.streaming import Stream, Streams
from serve_app.links.fingerprint import model_fingerprint
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import MODEL, FakeReplica, start_replica, until
from tests.ingress.fronts import front_end

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_TOKENS = 24
CHANGING = re.compile(rb'"created":\d+|"id":"[^"]*"')


@dataclass
class Ingress:
    """``num_repeated``: tokens whose event vLLM did not write."""

    url: str
    app: IngressApp
    front: FrontEnd
    settings: Settings
    replicas: list[FakeReplica] = field(default_factory=list)
    num_repeated: int = 0

    @property
    def streams(self) -> Streams:
        path = self.front.client.output_path
        assert isinstance(path, Streams)
        return path

    async def join(self) -> FakeReplica:
        engine = FakeEngine(fingerprint=model_fingerprint(self.front.engine.model_config))
        replica = await start_replica(self.settings, f"r{len(self.replicas)}", engine=engine)
        self.replicas.append(replica)
        self.front.client.set_members([r.lease for r in self.replicas])
        await until(lambda: replica.lease.member_id in self.front.client.fleet.replicas)
        return replica

    @contextlib.contextmanager
    def by_vllm_alone(self) -> Any:
        shortcuts = self.front.shortcuts
        self.front.shortcuts = shortcuts._replace(repeats=frozenset())
        yield
        self.front.shortcuts = shortcuts


@contextlib.asynccontextmanager
async def serving(model: Path, monkeypatch: pytest.MonkeyPatch, port: int, *, silence_s: float = 1e6) -> AsyncIterator[Ingress]:
    tiny = {"model": str(model), "simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"max_model_len": 512}}
    sections = {"protocol": {"heartbeat_timeout_s": 100.0}, "ingress": {"host": "127.0.0.1", "port": port}}
    values = parse_settings({"models": {MODEL: tiny}, **sections})
    client = FleetClient(values, values.models[MODEL], ingress_id="ingress-1", token=b"", tls=None)
    grammars = GrammarCompiler()
    front = await front_end(values.models[MODEL], str(model), client, grammars)
    app = IngressApp({MODEL: front}, AppLimits(100_000, stream_silence_s=silence_s), version={})
    listener = Listener(app, values.ingress)
    await listener.start()
    ingress = Ingress(f"http://127.0.0.1:{port}", app, front, values)
    add = Stream.add

    def counted(stream: Stream, output: Any) -> bool:
        taken = add(stream, output)
        ingress.num_repeated += taken
        return taken

    monkeypatch.setattr(Stream, "add", counted)
    running = asyncio.create_task(client.run())
    try:
        yield ingress
    finally:
        await listener.stop()
        client.set_members([])
        running.cancel()
        await asyncio.wait([running])
        for replica in ingress.replicas:
            await replica.close()
        await grammars.close()
        front.engine.shutdown()


class Play:
    """One streamed request, whose engine steps when a test calls it."""

    def __init__(self, ingress: Ingress, path: str, **fields: Any) -> None:
        self.content = b""
        self._ingress = ingress
        self._path = path
        asked = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
        base = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        self._body = {**base, **asked, **fields}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        url = f"{self._ingress.url}{self._path}"
        async with httpx.AsyncClient(timeout=None) as client, client.stream("POST", url, json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            async for piece in response.aiter_raw():
                self.content += piece

    def num_events(self) -> int:
        return self.content.count(b"\n\n")

    async def step(self, replica: FakeReplica, count: int = 1) -> None:
        """Let the engine compute, and wait until all is idle: vLLM joins tokens that arrive while it is busy."""
        before = self.num_events()
        replica.engine.step(count)
        await until(lambda: self.num_events() > before or self.task.done())
        for _ in range(50):
            await asyncio.sleep(0)

    async def to_end(self, replica: FakeReplica, count: int = 1) -> list[bytes]:
        await until(lambda: replica.engine.running or self.task.done())
        while replica.engine.running:
            await self.step(replica, count)
        await self.task
        return self.events()

    def events(self) -> list[bytes]:
        return [CHANGING.sub(b"", event) for event in self.content.split(b"\n\n")]

    def told(self) -> list[Any]:
        return [json.loads(e[6:]) for e in self.content.split(b"\n\n") if e.startswith(b"data: {")]

    def ends(self) -> list[Any]:
        """Return finish and stop reasons and usages."""
        choices = [
            (c["finish_reason"], c.get("stop_reason")) for e in self.told() for c in e["choices"] if c.get("finish_reason")
        ]
        return [*choices, *(e["usage"] for e in self.told() if e.get("usage"))]

    def text(self) -> str:
        choices = [c for e in self.told() for c in e["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def both(ingress: Ingress, path: str, count: int = 1, **fields: Any) -> tuple[list[bytes], list[bytes], int]:
    """Return the events of an answer, those of vLLM alone, and how many tokens of the first were repeated."""
    replica = ingress.replicas[-1]
    before = ingress.num_repeated
    ours = await Play(ingress, path, **fields).to_end(replica, count)
    repeated = ingress.num_repeated - before
    with ingress.by_vllm_alone():
        theirs = await Play(ingress, path, **fields).to_end(replica, count)
    assert ingress.num_repeated == before + repeated, "vLLM wrote all of its own"
    return ours, theirs, repeated
