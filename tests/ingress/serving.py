"""This module serves an ingress with vLLM's own front end over a fake engine, which records what it was asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from serve_app.config import parse_settings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.fleet.quotas import Quotas
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.links.fingerprint import model_fingerprint
from tests.doubles.fake_engine import VLLM_VERSION, FakeEngine
from tests.doubles.fleet import MODEL, start_replica, until
from tests.ingress.fronts import front_end

ADAPTERS = ("pirate", "lawyer")


@contextlib.asynccontextmanager
async def serving(
    model: Path,
    *,
    stepping: bool = True,
    adapters: Sequence[str] = ADAPTERS,
    max_model_len: int = 512,
    tenants: Tenants | None = None,
    credit: int = 256,
    vllm_version: str = VLLM_VERSION,
    stream_silence_s: float = 5.0,
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine, dict[str, int]]]:
    """Yield a client, the engine behind it, and the numbers of the adapters.

    Args:
        stepping: Whether the engine computes; else it does what a test calls.
        credit: How many requests the replica takes at once.
        vllm_version: The engine's.
    """
    async with (
        application(
            model,
            AppLimits(10 << 20, stream_silence_s=stream_silence_s),
            stepping=stepping,
            adapters=adapters,
            max_model_len=max_model_len,
            tenants=tenants,
            credit=credit,
            vllm_version=vllm_version,
        ) as (app, engine, numbers),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as http,
    ):
        yield http, engine, numbers


@contextlib.asynccontextmanager
async def application(
    model: Path,
    limits: AppLimits,
    *,
    stepping: bool = True,
    adapters: Sequence[str] = ADAPTERS,
    max_model_len: int = 512,
    tenants: Tenants | None = None,
    credit: int = 256,
    vllm_version: str = VLLM_VERSION,
) -> AsyncIterator[tuple[IngressApp, FakeEngine, dict[str, int]]]:
    """Yield the application behind the client of `serving`, with these limits, and the rest of what `serving` yields."""
    tiny = {
        "model": str(model),
        "simulated": {"profile": "a10g-llama-8b"},
        "engine_args": {"max_model_len": max_model_len},
        "adapters": {name: {"path": f"/adapters/{name}"} for name in adapters},
    }
    values = parse_settings({"models": {MODEL: tiny}, "protocol": {"heartbeat_timeout_s": 100.0, "credit": credit}})
    settings = values.models[MODEL]
    client = FleetClient(values, settings, ingress_id="ingress-1", token=b"", tls=None)
    grammars = GrammarCompiler()
    front = await front_end(settings, str(model), client, grammars)
    engine = FakeEngine(version=vllm_version, fingerprint=model_fingerprint(front.engine.model_config))
    replica = await start_replica(values, "r", engine=engine)
    client.set_members([replace(replica.lease, adapters=tuple(a.number(name) for name, a in settings.adapters.items()))])
    await until(lambda: client.fleet.replicas)

    async def step() -> None:
        while True:
            if stepping:
                engine.step()
            await asyncio.sleep(0.005)

    client.intake.quotas = quotas = Quotas("ingress-1", None, tenant=None if tenants is None else tenants.tenant)
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(step()), asyncio.create_task(quotas.run())]
    app = IngressApp({MODEL: front}, limits, version={}, tenants=tenants, quotas=quotas)
    try:
        yield app, engine, {name: adapter.number(name) for name, adapter in settings.adapters.items()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        client.set_members([])
        await replica.close()
        await grammars.close()
        front.engine.shutdown()
