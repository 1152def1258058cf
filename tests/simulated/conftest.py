"""These fixtures make a tiny checkpoint and real vLLM engines on it whose forward pass is simulated, all in the test's own process."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.engine_args import BATCH_STEP_SHARE, ITL_TARGET_S
from tests.simulated.engine_traffic import SHARE, Traffic

FAST = {"profile": "h100-llama-8b"}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="module")
def vllm_environment() -> Iterator[None]:
    """Set the variables that vLLM reads when it is imported and when it makes an engine."""
    environment = pytest.MonkeyPatch()
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        environment.setenv(name, value)
    yield
    environment.undo()


@pytest.fixture(scope="module")
def make_engine(tiny_llama: Path, vllm_environment: None) -> Iterator[Callable[..., Any]]:
    """Return a function that starts vLLM's `LLM`; by default it simulates an H100 a million times too fast."""
    from vllm import LLM  # here, because importing it takes seconds and the pure tests need none of it
    from vllm.v1.metrics.loggers import unregister_vllm_metrics

    def make(simulated: Mapping[str, Any] = FAST, **engine_args: Any) -> Any:
        return LLM(**{**_arguments(tiny_llama, simulated), **_SMALL, "disable_log_stats": False, **engine_args})

    yield make
    unregister_vllm_metrics()  # they would disturb a front end of ours in another module of the same worker


@pytest.fixture(scope="module")
def make_config(tiny_llama: Path, vllm_environment: None) -> Callable[..., Any]:
    """Return a function that makes vLLM's configuration of a simulated engine; ``more`` is added beside ``simulated``."""
    from serve_app.replica.engine_core import engine_config

    def make(more: Mapping[str, Any], simulated: Mapping[str, Any] = FAST, **engine_args: Any) -> Any:
        arguments = _arguments(tiny_llama, simulated)
        arguments["additional_config"] |= more
        return engine_config({**arguments, **_SMALL, **engine_args})

    return make


@pytest.fixture(scope="module")
def make_traffic(make_config: Callable[..., Any]) -> Callable[..., Traffic]:
    """Return a function that makes an engine core with our scheduler, or with ``is_bounded=False`` vLLM's own.

    ``itl_s`` is the target of `keep_itl`.
    """
    from vllm.v1.engine.core import EngineCore

    from serve_app.replica.scheduler import bounded
    from serve_app.simulated.executor import SimulatedExecutor

    class EarlyExecutor(SimulatedExecutor):
        """Takes the next step while one runs, and gives a step's tokens by `sample_tokens`, as executors of GPUs do."""

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            self._made = super().execute_model(scheduler_output)
            return _done(None if scheduler_output.num_scheduled_tokens else self._made)

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            return _done(super().sample_tokens(grammar_output) if self._made is None else self._made)

    fixed: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "enable_prefix_caching": False}

    def make(
        *,
        is_async: bool = False,
        is_bounded: bool = True,
        itl_s: float | None = None,
        log_stats: bool = False,
        scheduler_of: Callable[[type], type] = lambda it: it,
        executor_of: Callable[[type], type] = lambda it: it,
        **engine_args: Any,
    ) -> Traffic:
        more = {BATCH_STEP_SHARE: SHARE} | ({} if itl_s is None else {ITL_TARGET_S: itl_s})
        config = make_config(more=more, scheduling_policy="priority", **fixed | engine_args)
        scheduling = config.scheduler_config
        scheduling.async_scheduling = is_async  # vLLM's CPU build switches it off; a GPU's has it on
        if is_bounded:
            scheduling.scheduler_cls = bounded(scheduling.get_scheduler_cls())
        scheduling.scheduler_cls = scheduler_of(scheduling.get_scheduler_cls())
        return Traffic(EngineCore(config, executor_of(EarlyExecutor if is_async else SimulatedExecutor), log_stats=log_stats))

    return make


@pytest.fixture
def traffic(make_traffic: Callable[..., Traffic]) -> Traffic:
    return make_traffic()


def _done(value: Any) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_result(value)
    return made


_SMALL = {"max_model_len": 512, "block_size": 16, "enforce_eager": True}


def _arguments(checkpoint: Path, simulated: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        "distributed_executor_backend": "serve_app.simulated.executor.SimulatedExecutor",
        "additional_config": {"simulated": {"time_scale": 1e-6, **simulated}},
    }
