"""Answers bound to a grammar are cut and continue in an engine that has never seen them. A real engine core process in float32."""

import asyncio
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.config import HealthSettings, ModelSettings
from serve_app.core.instructions import StartAttempt
from serve_app.ingress.fleet.attempts import attempt_request
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Outputs, decode_message
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess

pytestmark = pytest.mark.engine

EOS = 1
PROMPT = [40, 41, 42]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
ANSWER_LIMIT_S = 60.0


class Engine:
    """An engine core process and the loop of its supervisor, in a thread."""

    def __init__(self, model: Path) -> None:
        args: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}
        # Otherwise an answer may be blank to its last token.
        args["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
        self.model = ModelSettings(name="tiny", model=str(model), kv_cache_gib=0.25, engine_args=args)
        self.said: queue.Queue[Any] = queue.Queue()
        self.process = EngineProcess(HealthSettings(), on_message=self.said.put, on_lost=self.said.put)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.num_asked = 0

    async def start(self) -> None:
        path = asyncio.get_running_loop().create_future()
        path.set_result(self.model.model)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        await self.process.start(self.model, path, environment=environment, timeout_s=240.0, max_frame_bytes=1 << 20)

    def go_on(self, params: SamplingParams, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return the rest of an answer that begins with ``emitted``, and why it ended."""
        self.num_asked += 1
        attempt_id = f"r{self.num_asked}@1"
        request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
        start = StartAttempt("r", attempt_id, "a", tuple(emitted), len(emitted))
        attempt = attempt_request(request, start)
        buffers = [bytes(b) for b in MsgpackEncoder().encode(attempt)]
        self.loop.call_soon_threadsafe(self.process.send, pipe.AddToEngine(0, attempt_id, buffers, len(emitted)))
        tokens = list[int]()
        while True:
            for output in _outputs(self.said.get(timeout=ANSWER_LIMIT_S)):
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens, output.finish_reason


def _outputs(step: pipe.StepOutputs) -> list[Any]:
    (body,) = FrameDecoder(1 << 21).receive_data(step.frame)
    message = decode_message(body)
    assert isinstance(message, Outputs)
    return list(MsgpackDecoder(EngineCoreOutputs).decode(message.buffers).outputs)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(model)
    engine.thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), engine.loop).result()
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.process.stop(), engine.loop).result()
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        engine.thread.join()
        engine.loop.close()


@pytest.fixture(scope="module")
def text(model: Path) -> Any:
    """Return the function from ids to text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def bound(grammar: dict[str, Any], **params: Any) -> SamplingParams:
    """Return parameters as vLLM's input processor leaves them."""
    structured = StructuredOutputsParams(**grammar)
    structured._backend = "xgrammar"
    made = SamplingParams(max_tokens=200, structured_outputs=structured, **params)
    made.update_from_generation_config({}, EOS)
    return made


@pytest.mark.parametrize("grammar", [{"json": SCHEMA}, {"regex": "[a-z]{12}-[0-9]{3}"}], ids=lambda grammar: next(iter(grammar)))
def test_a_greedy_answer_that_is_cut_anywhere_continues_as_if_it_had_not_been(engine: Engine, grammar: dict[str, Any]) -> None:
    params = bound(grammar, temperature=0.0)
    whole, end = engine.go_on(params, [])
    assert end == FinishReason.STOP
    assert len(whole) > 8
    assert [engine.go_on(params, whole[:count]) for count in range(1, len(whole))] == [
        (whole[count:], FinishReason.STOP) for count in range(1, len(whole))
    ]


def test_an_unseeded_answer_that_is_cut_anywhere_is_still_of_its_grammar(engine: Engine, text: Any) -> None:
    params = bound({"json": SCHEMA}, temperature=1.0)
    whole, _ = engine.go_on(params, [])
    for count in range(1, len(whole)):
        rest, end = engine.go_on(params, whole[:count])
        answer = text([*whole[:count], *rest])
        assert end == FinishReason.STOP
        assert json.loads(answer, strict=False).keys() == {"name", "ok"}, answer  # xgrammar lets control characters into strings


def test_a_grammar_that_cannot_have_given_what_was_emitted_ends_by_an_error(engine: Engine) -> None:
    assert engine.go_on(bound({"regex": "[a-z]{8}"}), [EOS, EOS]) == ([], FinishReason.ERROR)
    assert engine.go_on(bound({"regex": "[a-z]{8}"}), [])[1] == FinishReason.STOP
