"""A real engine core with a simulated accelerator starts with KV in its host's memory, alone and beside hand-overs."""

import asyncio
import os
from pathlib import Path

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import HealthSettings, ModelSettings
from serve_app.core.cached_points import BlocksStored, CachedPoints
from serve_app.core.prompt_hashes import hash_points
from serve_app.errors import EngineLost
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess
from serve_app.replica.side_channel import reserve
from serve_app.simulated.profiles import PROFILES
from tests.doubles.fleet import in_loop
from tests.replica.test_sleeping_engine import Heard, request

pytestmark = [pytest.mark.slow, pytest.mark.engine]

LIMIT_S = 100.0
PROFILE = "a10g-llama-8b"


@pytest.mark.parametrize(("transfer", "label"), [("none", ""), ("nixl", "nixl")])
@in_loop
async def test_an_engine_says_what_its_host_keeps_and_has_and_whether_others_can_read_it(
    transfer: str, label: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    path.set_result(str(make_tiny_llama(tmp_path / "tiny")))
    model = ModelSettings(
        name="tiny",
        model=path.result(),
        simulated={"profile": PROFILE},
        engine_args={"max_model_len": 512},
        kv={"transfer": transfer, "offload_gib": 1.0},
    )
    channel, heard, lost = reserve("127.0.0.1", range(1), "kv.port"), Heard(), list[EngineLost]()
    process = EngineProcess(HealthSettings(), on_message=heard.take, on_lost=lost.append)
    environment = {**os.environ, **channel.environment()}
    ready = await process.start(model, path, environment=environment, timeout_s=LIMIT_S, max_frame_bytes=1 << 20)
    try:
        assert ready.capabilities.host_kv_tokens == 2**30 // PROFILES[PROFILE].model.kv_bytes_per_token
        assert ready.capabilities.kv_transfer.partition(" ")[0] == label
        block_size = ready.capabilities.block_size
        process.send(request("r@0", 2 * block_size))
        await heard.until_finished("r@0")
        process.send(request("next@0"))  # its steps report the copies to the host
        await heard.until_finished("next@0")
        cached = CachedPoints(block_size)
        media = set[str]()
        for report in (each for message in heard.messages if isinstance(message, pipe.CacheChanged) for each in message.reports):
            cached.note(report)
            media |= {report.medium} if isinstance(report, BlocksStored) else set()
        assert list(cached.points) == hash_points(range(5, 5 + 2 * block_size), block_size)
        assert media == {"GPU", "CPU"}
        assert lost == []
    finally:
        await process.stop()
        channel.sock.close()
    assert "kv.transfer has no effect" not in "".join(capfd.readouterr())
