"""The engine core process fails before it has an engine: real processes in which the import of vLLM fails or does not end."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import pytest

import serve_app
from serve_app.config import HealthSettings, ModelSettings
from serve_app.errors import CheckpointError, EngineStartFailed
from serve_app.replica.process import EngineProcess
from tests.doubles.fleet import in_loop

MODEL = ModelSettings(name="tiny", model="/models/tiny")
HANGS = "import threading; threading.Event().wait()"

READY = """
import pathlib, socket, sys
from serve_app.links.protocol.messages import Capabilities
from serve_app.replica import pipe
from serve_app.replica.cold_start import EnginePhases
end = pipe.EngineEnd(socket.socket(fileno=int(sys.argv[1])))
end.send(pipe.EngineReady("0.32.0", "f" * 16, Capabilities(2048, 128, 512, ("generate",), "w" * 16), 8, EnginePhases(0.0, 0.0, 0.0)))
pathlib.Path(__file__).with_name("said_ready").touch()
sys.stdin.buffer.read()
"""
"""Reports that its engine is ready, without starting one."""


MEASURED = """
from serve_app.core.load import EngineLoad
from serve_app.core.step_costs import MeasuredCosts
end.send(pipe.StepsMeasured(MeasuredCosts(step_s=0.03, output_token_s=1e-4, prompt_token_s=4e-4, step_error_s=1e-3,
    output_token_error_s=2e-5, prompt_token_error_s=3e-5)))
end.send(pipe.StepOutputs(pipe.PROBE_SLOT, EngineLoad(1), 0.0, ["probe"], b"", 1))
"""
"""Reports the costs of its steps, and answers the probe."""


NOT_MEASURED = """
from serve_app.core.load import EngineLoad
end.send(pipe.StepsMeasured(None))
end.send(pipe.StepOutputs(pipe.PROBE_SLOT, EngineLoad(1), 0.0, ["probe"], b"", 1))
"""
"""Reports that it could not measure its steps, and answers the probe."""


def environment(folder: Path, vllm: str) -> dict[str, str]:
    """Return an environment in which vLLM is one module with this source."""
    (folder / "vllm.py").write_text(vllm)
    return {**os.environ, "PYTHONPATH": f"{folder}:{Path(serve_app.__path__[0]).parent}"}


def engine() -> EngineProcess:
    return EngineProcess(HealthSettings(), on_message=lambda message: None, on_lost=lambda error: None)


async def start(process: EngineProcess, path: Awaitable[str], env: dict[str, str], *, timeout_s: float = 60.0) -> None:
    await process.start(MODEL, path, environment=env, timeout_s=timeout_s, max_frame_bytes=1 << 20)


def is_gone(process: EngineProcess) -> bool:
    assert process.pid is not None
    return not Path(f"/proc/{process.pid}").exists()


@in_loop
async def test_an_import_that_fails_is_reported_while_the_files_are_on_their_way(tmp_path: Path) -> None:
    process, path = engine(), asyncio.get_running_loop().create_future()
    with pytest.raises(EngineStartFailed, match="the engine core of 'tiny' did not start: RuntimeError: no such library"):
        await start(process, path, environment(tmp_path, "raise RuntimeError('no such library')"))
    assert path.cancelled()
    assert is_gone(process)


@in_loop
async def test_files_that_do_not_come_end_the_import(tmp_path: Path) -> None:
    process, path = engine(), asyncio.get_running_loop().create_future()
    path.set_exception(CheckpointError("is damaged"))
    with pytest.raises(CheckpointError, match="is damaged"):
        await start(process, path, environment(tmp_path, HANGS))
    assert is_gone(process)


@in_loop
async def test_the_limit_counts_from_the_files_on(tmp_path: Path) -> None:
    process, path = engine(), asyncio.get_running_loop().create_future()
    path.set_result("/models/tiny")
    with pytest.raises(EngineStartFailed, match=r"the engine core of 'tiny' did not start: not ready after 0\.1 s"):
        await start(process, path, environment(tmp_path, HANGS), timeout_s=0.1)
    assert is_gone(process)


async def once_ready(folder: Path) -> str:
    while not (folder / "said_ready").exists():
        await asyncio.sleep(0.01)
    return "/models/tiny"


@in_loop
async def test_an_engine_that_is_ready_but_hangs_with_its_first_token_has_not_started(tmp_path: Path) -> None:
    process = engine()
    with pytest.raises(EngineStartFailed, match=r"of 'tiny' did not start: ready, but without a first token after 1 s"):
        await start(process, once_ready(tmp_path), environment(tmp_path, READY + HANGS), timeout_s=1.0)
    assert is_gone(process)


@in_loop
async def test_an_engine_that_fails_with_its_first_token_has_not_started(tmp_path: Path) -> None:
    process = engine()
    with pytest.raises(EngineStartFailed, match="the engine core of 'tiny' did not start: RuntimeError: no kernel image"):
        await start(process, once_ready(tmp_path), environment(tmp_path, READY + "raise RuntimeError('no kernel image')"))
    assert is_gone(process)


@in_loop
async def test_what_an_engine_measured_of_itself_comes_with_its_start(tmp_path: Path) -> None:
    process = engine()
    env = environment(tmp_path, READY + MEASURED + HANGS)
    ready = await process.start(MODEL, once_ready(tmp_path), environment=env, timeout_s=60.0, max_frame_bytes=1 << 20)
    assert ready.measured is not None
    assert (ready.measured.step_s, ready.measured.prompt_token_error_s) == (0.03, 3e-5)
    await process.stop()
    assert is_gone(process)


@in_loop
async def test_an_engine_that_is_stopped_ends_by_itself_with_its_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = engine()
    env = environment(tmp_path, READY + MEASURED + HANGS)
    await process.start(MODEL, once_ready(tmp_path), environment=env, timeout_s=60.0, max_frame_bytes=1 << 20)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    await process.stop()
    assert is_gone(process)
    assert not [record for record in caplog.records if "did not end by itself" in record.getMessage()]


@in_loop
async def test_an_engine_that_could_not_measure_itself_serves_and_the_log_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = engine()
    env = environment(tmp_path, READY + NOT_MEASURED + HANGS)
    ready = await process.start(MODEL, once_ready(tmp_path), environment=env, timeout_s=60.0, max_frame_bytes=1 << 20)
    assert ready.measured is None
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "could not measure what its steps cost" in warned.getMessage()
    assert "Start the replica again" in warned.getMessage()
    await process.stop()


@in_loop
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    process, path = engine(), asyncio.get_running_loop().create_future()
    starting = asyncio.create_task(start(process, path, environment(tmp_path, HANGS)))
    while process.pid is None:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert is_gone(process)
