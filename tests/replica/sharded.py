"""This program runs the supervisor of one of two nodes of an engine, as a process that a test can kill. Both nodes are this machine.

    python -m tests.replica.sharded first MODEL_PATH STAGES REQUEST_FILE
    python -m tests.replica.sharded second MODEL_PATH STAGES PORT FIRST_PORT SECRET

STAGES is 1, where the nodes share each layer, or 2, where each has half of the layers. vLLM's CPU build takes the place of CUDA's, as in
`tensor_parallel.py`. The first prints `summons PORT FIRST_PORT SECRET`, which the second takes; `engine PID`, `ready`, `tokens` with the
ids of each step of the request, and `died REASON`. The second prints `engine PID` and `ended REASON`. A supervisor whose engine has ended
ends. An engine with stages measures its steps first.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from serve_app.config import HealthSettings, ModelSettings
from serve_app.engine_args import NodeOfEngine
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Outputs, decode_message
from serve_app.replica import pipe
from serve_app.replica.members import Members
from serve_app.replica.process import EngineProcess
from serve_app.replica.shard import Shard, Summons
from serve_app.replica.side_channel import reserve
from tests.replica.tensor_parallel import ATTEMPT_ID, ENVIRONMENT, say

HERE = "127.0.0.1"
INHERITED = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
HEALTH = HealthSettings()


def engine_args_of(stages: int) -> dict[str, JsonValue]:
    args: dict[str, JsonValue] = {"max_model_len": 2048, "max_num_seqs": 4, "dtype": "float32"}
    if stages == 1:
        return args | {"enforce_eager": True}
    # vLLM's GPU workers get the tensors in which a stage receives from their warm-up. Its CPU workers have no warm-up with mode 0, which
    # `enforce_eager` sets. With mode 1, which compiles nothing on CPUs, they have one.
    return args | {"pipeline_parallel_size": stages, "compilation_config": {"mode": 1}}


def model_of(path: str, stages: int = 1) -> ModelSettings:
    return ModelSettings(
        name="tiny",
        model=path,
        device="cuda",
        gpus_per_replica=2,
        nodes=2,
        engine_args=engine_args_of(stages),
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
    )


async def alongside(work: Coroutine[Any, Any, Any], supervisor: EngineProcess | Shard) -> Any:
    """Do ``work``; say the process of the supervisor's part of the engine as soon as there is one."""
    working = asyncio.ensure_future(work)
    while supervisor.pid is None and not working.done():
        await asyncio.sleep(0)
    say("engine", supervisor.pid)
    return await working


def shown() -> Callable[[pipe.FromEngine], None]:
    """Return what says the tokens of each step. It imports vLLM, which would keep a supervisor from its engine for too long later."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    def show(message: pipe.FromEngine) -> None:
        if isinstance(message, pipe.StepOutputs) and message.frame:
            for frame in FrameDecoder(max_frame_bytes=1 << 20).receive_data(message.frame):
                outputs = decode_message(frame)
                assert isinstance(outputs, Outputs)
                for output in MsgpackDecoder(EngineCoreOutputs).decode(outputs.buffers).outputs:
                    say("tokens", *output.new_token_ids)

    return show


async def first(path: str, stages: str, request_file: str) -> None:
    request = await asyncio.to_thread(Path(request_file).read_bytes)
    model = model_of(path, int(stages))
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    show = shown() if request else say  # without a request, the engine may be one without vLLM
    engine = EngineProcess(HEALTH, on_message=show, on_lost=lambda error: lost.set_result(str(error)))
    members = Members(1, silence_s=HEALTH.eject_after_s)
    port, rendezvous = await members.listen(HERE), reserve(HERE, range(1), "nodes")
    say("summons", port, rendezvous.port, members.secret.hex())
    await members.all_joined()
    found = asyncio.get_running_loop().create_future()
    found.set_result(path)
    start = engine.start(
        model,
        found,
        environment=INHERITED,
        timeout_s=240.0,
        max_frame_bytes=1 << 20,
        measures_itself=model.stages() > 1,
        node=NodeOfEngine(0, HERE, HERE, rendezvous.port),
        members=members,
    )
    await alongside(start, engine)
    say("ready")
    if request:
        engine.send(pipe.AddToEngine(0, ATTEMPT_ID, [request], 0))
    say("died", await lost)


async def second(path: str, stages: str, port: str, first_port: str, secret: str) -> None:
    summons = Summons(NodeOfEngine(1, HERE, HERE, int(first_port)), int(port), bytes.fromhex(secret), HEALTH.eject_after_s)
    shard = Shard(model_of(path, int(stages)), summons, INHERITED)
    say("ended", await alongside(shard.run(), shard))


if __name__ == "__main__":
    programs: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"first": first, "second": second}
    asyncio.run(programs[sys.argv[1]](*sys.argv[2:]))
