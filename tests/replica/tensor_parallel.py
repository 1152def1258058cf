"""This program runs a replica's supervisor with a tensor-parallel engine of two workers, as a process that a test can kill.

    python -m tests.replica.tensor_parallel MODEL_PATH REQUEST_FILE

vLLM's CPU build takes the place of CUDA's: it has the same executor, message queues and workers. The program prints `engine PID` when the
engine core's process runs, `ready`, `tokens` when the request in REQUEST_FILE has its first, and `died REASON`.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil

from serve_app.config import HealthSettings, ModelSettings
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess

ATTEMPT_ID = "r1@1"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
LIMIT_S = 5.0  # vLLM's executor takes up to 9 s after a lost worker; `pytest -rP` prints how long each end took


def living_group(leader: int) -> list[psutil.Process]:
    """Return the living processes of an engine core's group, Python's resource tracker included."""
    return [process for process in psutil.process_iter() if _lives_in(process, leader)]


def until_gone(leader: int) -> None:
    """Wait for the end of every process in an engine core's group, and print how long that took."""
    began = time.monotonic()
    while left := living_group(leader):
        assert time.monotonic() - began < LIMIT_S, [p.pid for p in left]
        time.sleep(0.05)
    print(f"gone after {time.monotonic() - began:.2f} s")


def _lives_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ProcessLookupError):
        return False


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(model_path: str, request: bytes) -> None:
    engine_args = {"max_model_len": 2048, "max_num_seqs": 4, "enforce_eager": True, "dtype": "float32"}
    model = ModelSettings(
        name="tiny", model=model_path, device="cuda", gpus_per_replica=2, engine_args=engine_args, env=ENVIRONMENT
    )
    first = asyncio.Event()
    engine = EngineProcess(HealthSettings(), on_message=lambda _: first.set(), on_lost=lambda error: say("died", str(error)))
    path = asyncio.get_running_loop().create_future()
    path.set_result(model_path)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    starting = asyncio.create_task(
        engine.start(model, path, environment=environment, timeout_s=240.0, max_frame_bytes=1 << 20), name="start"
    )
    while engine.pid is None:
        await asyncio.sleep(0)
    say("engine", engine.pid)
    await starting
    say("ready")
    engine.send(pipe.AddToEngine(0, ATTEMPT_ID, [request], 0))
    await first.wait()
    say("tokens")
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes()))
