"""This module runs a real engine on the CPU behind a replica's own process, and computes the expected answers with Transformers."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.config import HealthSettings, ModelSettings
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Outputs, decode_message
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess

PROMPT = [5, 300, 17, 900]
NUM_TOKENS = 12


def greedy(checkpoint: Path) -> list[int]:
    """Return the answer of Transformers' own Llama."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, len(PROMPT) :]]


class Engine:
    """Runs a real engine on the CPU."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._answers: dict[str, list[int]] = {}
        self._finished = asyncio.Event()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.process = EngineProcess(HealthSettings(), on_message=self._hear, on_lost=lambda _: self._answers.clear())

    def _hear(self, message: pipe.FromEngine) -> None:
        if not isinstance(message, pipe.StepOutputs) or not message.frame:
            return
        for frame in FrameDecoder(max_frame_bytes=1 << 20).receive_data(message.frame):
            outputs = decode_message(frame)
            assert isinstance(outputs, Outputs)
            for output in self._decoder.decode(outputs.buffers).outputs:
                self._answers[output.request_id] += output.new_token_ids
        if all(len(answer) == NUM_TOKENS for answer in self._answers.values()):
            self._finished.set()

    async def ask(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the answers to requests that the engine gets together; a name without an adapter stands for the model itself."""
        self._answers = {name: [] for name in names}
        for name in names:
            self.process.send(
                pipe.AddToEngine(0, name, [bytes(part) for part in MsgpackEncoder().encode(self._request(name))], 0)
            )
        async with asyncio.timeout(60):
            await self._finished.wait()
        return self._answers

    def _request(self, name: str) -> EngineCoreRequest:
        lora = self._settings.adapters.get(name)
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None if lora is None else LoRARequest(name, lora.number(name), str(lora.path)),
            cache_salt=None,
            data_parallel_rank=None,
        )


@asynccontextmanager
async def engine(checkpoint: Path, **fields: Any) -> AsyncIterator[Engine]:
    """Start an engine of ``checkpoint``; ``fields`` are those of the model in the configuration."""
    base = {"name": "base", "model": str(checkpoint), "kv_cache_gib": 0.25, "engine_args": {"max_model_len": 256}}
    settings = ModelSettings.model_validate(base | fields)
    started = Engine(settings)
    path: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    path.set_result(settings.model)
    await started.process.start(settings, path, environment=os.environ, timeout_s=240.0, max_frame_bytes=1 << 20)
    try:
        yield started
    finally:
        await started.process.stop()
