"""Log probabilities are made in slices, so that a long answer of them leaves the event loop to others in between.

vLLM converts the log probabilities of a whole prompt in one call, and then makes JSON of the whole answer in another: for 32,000 tokens
with 20 each, 5 s of the event loop. Here both continue after each slice where the event loop is free. The results are vLLM's.
"""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, cast

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion import api_router as chats
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

SLICE = 1000
"""Log probabilities that are converted in one turn of the event loop: 8 ms."""
_ENTRIES = 100
"""Entries of a list that become JSON together: with 20 log probabilities each, 3 ms."""
_CHARS = 64 << 10
"""Characters of JSON after which the event loop has a turn."""
_DEPTH = 4
"""Objects inside of each other down to the lists of a choice: the answer, a choice, its log probabilities."""

_convert: Any = LogprobsProcessor._update_prompt_logprobs


def make_in_slices(engine: Any) -> None:
    """Let ``engine`` convert the log probabilities of long prompts in slices, and vLLM's routes make JSON of answers in slices."""
    add = engine.output_processor.add_request

    def add_in_slices(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        if (params := request.sampling_params) is not None and params.prompt_logprobs is not None:
            processor = engine.output_processor.request_states[request.request_id].logprobs_processor
            processor._update_prompt_logprobs = partial(_later, processor)

    engine.output_processor.add_request = add_in_slices
    for router in (chats, completions):
        cast("Any", router).JSONResponse = JSONInSlices
    generate = engine.generate

    def generate_filled(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        return outputs if sampling_params.prompt_logprobs is None else _filled(outputs)

    engine.generate = generate_filled


class Unfilled(list[Any]):
    """The log probabilities of a prompt by position; those of ``waiting`` are converted by `fill`."""

    def __init__(self, processor: Any) -> None:
        super().__init__(processor.prompt_logprobs)
        self.waiting: list[LogprobsTensors] = []
        self._processor = copy.copy(processor)
        self._processor.prompt_logprobs = self

    async def fill(self) -> None:
        """Convert all that waits, in slices."""
        while self.waiting:
            ids, values, ranks, *_ = self.waiting.pop(0)
            positions = max(1, SLICE // values.shape[1])
            for start in range(0, len(ids), positions):
                part = slice(start, start + positions)
                _convert(self._processor, LogprobsTensors(ids[part], values[part], ranks[part]))
                await asyncio.sleep(0)


def _later(processor: Any, tensors: LogprobsTensors) -> None:
    """Stand in for a processor's method that converts ``tensors`` at once."""
    if tensors.logprobs.numel() <= SLICE or not isinstance(processor.prompt_logprobs, list):
        _convert(processor, tensors)
        return
    if not isinstance(processor.prompt_logprobs, Unfilled):
        processor.prompt_logprobs = Unfilled(processor)
    processor.prompt_logprobs.waiting.append(tensors)


async def _filled(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if isinstance(output.prompt_logprobs, Unfilled):
                await output.prompt_logprobs.fill()
            yield output


class JSONInSlices(JSONResponse):
    """FastAPI's response with the same bytes, which makes JSON of an answer with log probabilities in slices."""

    _content: Any = None

    def render(self, content: Any) -> bytes:
        """Return the body; of an answer with log probabilities, an empty one until it is sent."""
        choices = content.get("choices") if isinstance(content, dict) else None
        if not choices or not any(each.get("logprobs") or each.get("prompt_logprobs") for each in (content, *choices)):
            return super().render(content)
        self._content = content
        return b""

    async def make(self) -> None:
        """Make the body, if it was left for later. Called by `__call__` at the latest.

        Raises:
            ValueError: A number or a character cannot be in JSON.
        """
        if self._content is None:
            return
        parts, num_chars = [], 0
        for part in _parts(self._content):
            parts.append(part)
            num_chars += len(part)
            if num_chars > _CHARS:
                num_chars = 0
                await asyncio.sleep(0)
        self._content = None
        self.body = "".join(parts).encode()
        self.headers["content-length"] = str(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await self.make()
        await super().__call__(scope, receive, send)


def _json(value: Any) -> str:
    """Return the value as Starlette's JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _parts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield JSON of an answer in parts: choice by choice, and of each list in a choice `_ENTRIES` at a time."""
    if isinstance(value, dict) and value and depth < _DEPTH:
        for num, (key, each) in enumerate(value.items()):
            yield f"{',' if num else '{'}{_json(key)}:"
            yield from _parts(each, depth + 1)
        yield "}"
    elif isinstance(value, list) and value:
        num_together = 1 if isinstance(value[0], dict) and "index" in value[0] else _ENTRIES  # 1: choices
        for start in range(0, len(value), num_together):
            yield "," if start else "["
            if num_together == 1:
                yield from _parts(value[start], depth + 1)
            else:
                yield _json(value[start : start + num_together])[1:-1]
        yield "]"
    else:
        yield _json(value)
