"""These fixtures make a tiny checkpoint and real vLLM engines on it whose forward pass is simulated, all in the test's own process."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama

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

    def make(more: Mapping[str, Any], **engine_args: Any) -> Any:
        arguments = _arguments(tiny_llama, FAST)
        arguments["additional_config"] |= more
        return engine_config({**arguments, **_SMALL, **engine_args})

    return make


_SMALL = {"max_model_len": 512, "block_size": 16, "enforce_eager": True}


def _arguments(checkpoint: Path, simulated: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        "distributed_executor_backend": "serve_app.simulated.executor.SimulatedExecutor",
        "additional_config": {"simulated": {"time_scale": 1e-6, **simulated}},
    }
