"""This script is one ingress process over a fake engine, for `ingress_alone`: run by path, it can belong to another checkout.

``python -P benchmarks/ingress_process.py ingress PORT MODEL FOLDER TOKENS`` is an ingress with vLLM's front end over a real link, and
``... engine FOLDER TOKENS`` the replica's end of that link. The fake engine gives each request a token every `STEP_S` and computes nothing.
"""

import asyncio
import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

STEP_S = 0.006
"""Seconds between two steps, as on a simulated H100 with an 8B model."""

_MAX_RUNNING = 1024
_KV_BLOCKS = 1 << 16
_NAME = "tiny"


def _settings(model: str, port: int, max_tokens: int) -> Any:
    from serve_app.config import parse_settings

    tiny = {"model": model, "simulated": {"profile": "h100-llama-8b"}, "engine_args": {"max_model_len": max_tokens}}
    sections = {"protocol": {"heartbeat_timeout_s": 100.0}, "ingress": {"host": "127.0.0.1", "port": port}}
    return parse_settings({"models": {_NAME: tiny}, **sections})


async def serve_ingress(port: int, model: str, folder: Path, max_tokens: int) -> None:
    """Serve until killed; wait for the replica's port in ``folder``, and write the replica's input there."""
    from serve_app.host.vllm_start import settle
    from serve_app.ingress.runtime import IngressRuntime
    from serve_app.links.fingerprint import model_fingerprint
    from serve_app.membership import Lease

    runtime = await IngressRuntime.build(_settings(model, port, max_tokens), ingress_id="ingress-1", fleet_id="bench")
    front = runtime.front_ends[_NAME]
    (folder / "fingerprint").write_text(model_fingerprint(front.engine.model_config))
    settle()
    await runtime.listener.start()
    tasks = runtime.start()
    while not (folder / "port").exists():
        await asyncio.sleep(0.1)
    replica = Lease("r0", "replica", _NAME, "127.0.0.1", int((folder / "port").read_text()), epoch=1, pid=0)
    runtime.set_members([replica])
    await asyncio.gather(*tasks)


async def serve_engine(folder: Path, max_tokens: int) -> None:
    """Serve until killed; wait for the fingerprint in ``folder``, and write the port there."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

    from serve_app.replica.server import ReplicaIdentity, ReplicaServer
    from tests.doubles.fake_engine import FakeEngine

    class Engine(FakeEngine):
        """A fake engine whose tokens take no computation."""

        def _compute(self, attempt_id: str, request: EngineCoreRequest, output: list[int], count: int) -> EngineCoreOutput:
            new = [3 + (len(attempt_id) + 7 * len(output)) % 900]
            output += new
            if finished := len(output) == getattr(request.sampling_params, "max_tokens", 1):
                del self.running[attempt_id]
            return EngineCoreOutput(attempt_id, new, finish_reason=FinishReason.LENGTH if finished else None)

    while not (folder / "fingerprint").exists():
        await asyncio.sleep(0.1)
    engine = Engine(fingerprint=(folder / "fingerprint").read_text())
    told = msgspec.structs.replace(engine.ready.capabilities, max_model_len=max_tokens, num_kv_blocks=_KV_BLOCKS)
    engine.ready = msgspec.structs.replace(engine.ready, max_num_seqs=_MAX_RUNNING, capabilities=told)
    settings = _settings("/nowhere", 1024, max_tokens).protocol
    server = ReplicaServer(ReplicaIdentity("r0", model=_NAME), settings, b"", engine, engine.ready, None)
    engine.connect(server.on_engine_message)
    (folder / "port").write_text(str(await server.listen()))
    gc.freeze()
    while True:
        await asyncio.sleep(STEP_S)
        if engine.running:
            engine.step()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        match sys.argv[1:]:
            case ["ingress", port, model, folder, max_tokens]:
                uvloop.run(serve_ingress(int(port), model, Path(folder), int(max_tokens)))
            case ["engine", folder, max_tokens]:
                uvloop.run(serve_engine(Path(folder), int(max_tokens)))
            case _:
                raise SystemExit(__doc__)
