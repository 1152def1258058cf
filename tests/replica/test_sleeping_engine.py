"""A real engine core with a simulated accelerator falls asleep and wakes up, under its supervisor's watch."""

import asyncio
import os
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import HealthSettings, ModelSettings
from serve_app.config.simulated import SimulatedSettings
from serve_app.errors import EngineLost
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess
from tests.doubles.fleet import in_loop

pytestmark = [pytest.mark.slow, pytest.mark.engine]

LIMIT_S = 100.0
SIMULATED = SimulatedSettings(profile="a10g-llama-8b", startup_delay_s=6.0)
HEALTH = HealthSettings(probe_after_s=1.0, eject_after_s=4.0)
"""A wake-up at level 2 takes six seconds without CPU time: the watch must not take it for a deadlock."""


def request(attempt_id: str, num_tokens: int = 3) -> pipe.AddToEngine:
    (encoded,) = MsgpackEncoder().encode(
        EngineCoreRequest(
            request_id=attempt_id,
            prompt_token_ids=list(range(5, 5 + num_tokens)),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    return pipe.AddToEngine(0, attempt_id, [bytes(encoded)], 0)


class Heard:
    """Collects what the engine says to its supervisor."""

    def __init__(self) -> None:
        self.messages: list[pipe.FromEngine] = []
        self.lost: list[EngineLost] = []
        self._news = asyncio.Event()

    def take(self, message: pipe.FromEngine) -> None:
        self.messages.append(message)
        self._news.set()

    def finished(self) -> list[str]:
        return [i for m in self.messages if isinstance(m, pipe.StepOutputs) for i in m.finished]

    async def until_finished(self, attempt_id: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while attempt_id not in self.finished():
                self._news.clear()
                await self._news.wait()

    async def until_answered(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while pipe.Answered(pipe.TRIALS_SLOT) not in self.messages:
                self._news.clear()
                await self._news.wait()


@in_loop
async def test_an_attempt_that_comes_to_a_sleeping_engine_is_answered_after_the_wake_up_and_a_failed_change_ends_the_engine(
    tmp_path: Path,
) -> None:
    path: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    path.set_result(str(make_tiny_llama(tmp_path / "tiny")))
    model = ModelSettings(name="tiny", model=path.result(), simulated=SIMULATED, engine_args={"max_model_len": 512})
    heard = Heard()
    process = EngineProcess(HEALTH, on_message=heard.take, on_lost=heard.lost.append)
    await process.start(model, path, environment=dict(os.environ), timeout_s=LIMIT_S, max_frame_bytes=1 << 20)
    for level in (1, 2):
        heard.messages.clear()
        assert await process.change(pipe.FallAsleep(level), timeout_s=LIMIT_S)
        process.send(request(f"r{level}@0"))
        process.send(pipe.AskTrial())
        await heard.until_answered()
        assert heard.finished() == []
        assert await process.change(pipe.WakeUp(level), timeout_s=LIMIT_S)
        await heard.until_finished(f"r{level}@0")
    assert heard.lost == []
    assert not await process.change(pipe.FallAsleep(1), timeout_s=0.0)
    assert [error.code for error in heard.lost] == ["engine_dead"]
    await process.stop()
