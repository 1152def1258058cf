"""One tiny engine for all tests of `/generate`: a start takes 20 to 45 s."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase, unregister_vllm_metrics

from serve_app.checkpoints import make_tiny_llama
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer
from serve_app.ingress.routes.generate import generate_route

MAX_LOGPROBS = 20
MAX_MODEL_LEN = 512


class StepStats(StatLoggerBase):  # type: ignore[misc]
    """Keeps how many requests the engine core held after its latest step."""

    unfinished = 0

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            StepStats.unfinished = scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs

    def log_engine_initialized(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def model_inspection() -> Iterator[None]:
    """`inspect_models_here` is for the life of a process, and other modules' tests may come next in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
        yield


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all: an AsyncLLM lives on the loop it was first used on."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def engine(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1")):
            environment.setenv(name, value)
        engine = runner.run(start_engine(model))
        yield engine
        engine.shutdown()


async def start_engine(model: Path) -> AsyncLLM:
    args = AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_logprobs=MAX_LOGPROBS,
        max_num_seqs=32,
    )
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[StepStats])
    unregister_vllm_metrics()  # unused here, and in conflict with a front end of ours in another module
    return engine


@pytest.fixture(scope="session")
def app(engine: AsyncLLM) -> ASGIApp:
    handler = generate_route(engine, max_logprobs=MAX_LOGPROBS)
    routes = Starlette(routes=[Route("/generate", handler, methods=["POST"])])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await routes(scope, receive, HeldAnswer(send, Exchange("/v1/completions")))

    return app


@pytest.fixture(scope="session")
def post(app: ASGIApp, runner: asyncio.Runner) -> Callable[..., httpx.Response]:
    """Post a body of these fields to `/generate`."""

    async def send(content: bytes) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as client:
            return await client.post("/generate", content=content)

    def post(**fields: object) -> httpx.Response:
        return runner.run(send(json.dumps(fields).encode()))

    return post


@pytest.fixture
def assert_idle(engine: AsyncLLM, runner: asyncio.Runner) -> Callable[[], None]:
    """Assert that neither the front end nor the engine core holds a request."""

    async def one_token() -> None:
        async for _ in engine.generate("a", SamplingParams(max_tokens=1), "probe"):
            pass

    def assert_idle() -> None:
        assert engine.get_num_unfinished_requests() == 0
        runner.run(one_token())  # its last step brings the core's own count
        assert StepStats.unfinished == 0

    return assert_idle
