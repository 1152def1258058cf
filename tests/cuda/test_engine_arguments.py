"""These tests start a replica of `device: cuda` up to its first CUDA call: vLLM's real platform, a driver without devices."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import HealthSettings, ModelSettings
from serve_app.engine_args import engine_environment
from serve_app.errors import EngineStartFailed
from serve_app.replica.process import EngineProcess
from tests.cuda.conftest import run
from tests.replica.tensor_parallel import until_gone

VLLM_SERVE = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""The variables that `vllm serve` sets before it reads its arguments."""


def model(checkpoint: Path, gpus: int) -> ModelSettings:
    engine_args: dict[str, Any] = {"max_model_len": 1024, "gpu_memory_utilization": 0.8, "enable_prefix_caching": True}
    return ModelSettings(name="tiny", model=str(checkpoint), device="cuda", gpus_per_replica=gpus, engine_args=engine_args)


@pytest.mark.parametrize(("gpus", "executor"), [(1, "UniProcExecutor"), (4, "MultiprocExecutor")])
def test_the_engine_is_configured_as_by_vllm_serve(checkpoint: Path, driver: Mapping[str, str], gpus: int, executor: str) -> None:
    settings = model(checkpoint, gpus)
    ours = run(
        "cuda",
        "tests.cuda.engine_config",
        "ours",
        settings.name,
        settings.model_dump_json(),
        env=engine_environment(settings, driver),
    )
    flags = ["--model", str(checkpoint), "--served-model-name", "tiny", "--tensor-parallel-size", str(gpus)]
    flags += ["--max-model-len", "1024", "--gpu-memory-utilization", "0.8", "--enable-prefix-caching"]
    theirs = run("cuda", "tests.cuda.engine_config", "vllm", *flags, "--mm-processor-cache-gb", "0", env={**driver, **VLLM_SERVE})
    assert ours == theirs
    assert ours["executor"] == executor
    assert "device_config=cuda" in ours["config"]


@pytest.mark.parametrize("gpus", [1, 4])
def test_an_engine_starts_until_cuda_finds_no_device_and_leaves_nothing(
    checkpoint: Path, driver: Mapping[str, str], gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    process = EngineProcess(HealthSettings(), on_message=lambda message: None, on_lost=lambda error: None)

    async def start() -> None:
        path = asyncio.get_running_loop().create_future()
        path.set_result(str(checkpoint))
        environment = {**os.environ, **driver}
        await process.start(model(checkpoint, gpus), path, environment=environment, timeout_s=300.0, max_frame_bytes=1 << 20)

    with pytest.raises(EngineStartFailed) as failed:
        asyncio.run(start())
    said = "".join(capfd.readouterr()) + failed.value.reason  # with several workers the reason is in the log of one of them
    assert "torch._C._cuda_init()" in said
    assert "RuntimeError: Found no NVIDIA driver on your system" in said
    assert process.pid is not None
    until_gone(process.pid)
