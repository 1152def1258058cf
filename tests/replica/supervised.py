"""This program runs a replica's supervisor with an engine that can be made to hang, as a process that a test can kill.

    python -m tests.replica.supervised MODEL_PATH [NODE RAYLET_PID]

With a node the engine is a fork of that node's fork server. Nothing tells when there is a fork, so the program polls for it.

It prints `engine PID` when the engine core's process runs, `ready`, `step N` for each step's outputs, and `lost CODE`.
It takes lines on standard input: `add ID` (a request of 2000 tokens) and `block` (the event loop).
"""

import asyncio
import os
import sys
import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.config import HealthSettings, ModelSettings
from serve_app.replica import pipe
from serve_app.replica.forks import ForkServers
from serve_app.replica.process import EngineProcess

HEALTH = HealthSettings(probe_after_s=1.0, eject_after_s=4.0, max_step_s=60.0)


def say(*words: object) -> None:
    print(*words, flush=True)


def request(request_id: str) -> pipe.AddToEngine:
    (encoded,) = MsgpackEncoder().encode(
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[5, 6, 7],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=2000, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    return pipe.AddToEngine(0, request_id, [bytes(encoded)], 0)


class Supervisor:
    def __init__(self, model_path: str, servers: ForkServers | None) -> None:
        args: dict[str, Any] = {
            "max_model_len": 2048,
            "distributed_executor_backend": "tests.replica.hanging.HangingExecutor",
            "additional_config": {"simulated": {"profile": "a10g-llama-8b"}},
        }
        self.servers = servers
        self.model = ModelSettings(name="tiny", model=model_path, kv_cache_gib=0.25, engine_args=args)
        self.engine = EngineProcess(HEALTH, on_message=self.hear, on_lost=lambda error: say("lost", error.code))

    def hear(self, message: pipe.FromEngine) -> None:
        if isinstance(message, pipe.StepOutputs):
            say("step", message.load.step)

    def do(self, order: str, *words: str) -> None:
        if order == "add":
            self.engine.send(request(words[0]))
        elif order == "block":
            time.sleep(1e6)

    async def run(self) -> None:
        path = asyncio.get_running_loop().create_future()
        path.set_result(self.model.model)
        start = self.engine.start(
            self.model, path, environment=os.environ, timeout_s=240.0, max_frame_bytes=1 << 20, servers=self.servers
        )
        starting = asyncio.create_task(start)
        while self.engine.pid is None:
            await asyncio.sleep(0.01)
        say("engine", self.engine.pid)
        await starting
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            self.do(*line.split())


if __name__ == "__main__":
    model_path, *node = sys.argv[1:]
    asyncio.run(Supervisor(model_path, ForkServers(node[0], int(node[1])) if node else None).run())
