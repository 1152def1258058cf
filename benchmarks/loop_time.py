"""This benchmark sends the largest allowed value of each costly field to an ingress, and prints the longest turn of the event loop.

``python -m benchmarks.loop_time [NAME...]`` runs vLLM's own front end over a fake engine in this process. A turn is one callback of the
event loop; its time is the CPU time of the loop's thread, so a busy machine changes it little. Turns of the fake engine and of this program
are left out. The results are in benchmarks/results/loop-time.md.
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from serve_app.checkpoints import make_tiny_llama
from tests.doubles.fleet import MODEL

CONTEXT = 131_072
"""Tokens of the model's context."""
_OURS = ("application.<locals>.step", "ReplicaServer", "FakeEngine", "measure")
_CHAT = [{"role": "user", "content": "hi"}]
_TEXT = "ab " * 3_000_000


def _schema(properties: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(properties)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": {}}}}


_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(1300)}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "131,000 token ids": ("/v1/completions", {"prompt": [5] * 131_000}),
    "400,000 token ids, too many": ("/v1/completions", {"prompt": [5] * 400_000}),
    "n: 1000 of 4,000 tokens": ("/v1/completions", {"prompt": [5] * 4000, "n": 1000}),
    "1,024 prompts": ("/v1/completions", {"prompt": ["hi there " * 10] * 1024, "max_tokens": 1}),
    "prompt_logprobs: 1, 32,000 tokens": ("/v1/completions", {"prompt": [5] * 32_000, "prompt_logprobs": 1}),
    "prompt_logprobs: 20, 3,000 tokens": ("/v1/completions", {"prompt": [5] * 3000, "prompt_logprobs": 20}),
    "prompt_logprobs: 20, 32,000 tokens, too many": ("/v1/completions", {"prompt": [5] * 32_000, "prompt_logprobs": 20}),
    "10,000 messages": ("/v1/chat/completions", {"messages": _CHAT * 10_000}),
    "a message of 9 MB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    "50,000 keys": ("/v1/chat/completions", {"messages": _CHAT, "metadata": {f"k{i}": 1 for i in range(49_990)}}),
    "480,000 keys, too many": ("/v1/chat/completions", {"messages": _CHAT, "metadata": {f"k{i}": 1 for i in range(480_000)}}),
    "3,000 tools": ("/v1/chat/completions", {"messages": _CHAT, "tools": [_tool(i) for i in range(3000)], "tool_choice": "none"}),
    "a schema of 46 kB": ("/v1/chat/completions", {"messages": _CHAT, "response_format": _FORMAT}),
    "16,384 characters of bad_words": ("/v1/completions", {"prompt": "hi", "bad_words": ["ab " * 42] * 128}),
    "1,024 entries of logit_bias": ("/v1/completions", {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(1024)}}),
    "65,000 characters of vllm_xargs": (
        "/v1/completions",
        {"prompt": "hi", "vllm_xargs": {f"k{i}": "y" * 120 for i in range(490)}},
    ),
    "1,000 items of /v1/responses": ("/v1/responses", {"input": _CHAT * 1000}),
    "9 MB to /v1/messages": ("/v1/messages", {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 2}),
    "9 MB to /generate": ("/generate", {"prompt": _TEXT}),
    "400,000 ids to /detokenize": ("/detokenize", {"tokens": [5] * 400_000}),
}
"""Name -> route and body, without the model and, of most, `max_tokens`."""


class Turns:
    """The longest turn of the running event loop, in seconds of CPU time, and the coroutine whose turn it was."""

    def __init__(self) -> None:
        self.longest, self.whose = 0.0, ""
        loop: Any = asyncio.get_running_loop()
        tasks: Any = asyncio.tasks
        loop.set_task_factory(
            lambda loop, coro, **options: tasks._PyTask(coro, loop=loop, **options)
        )  # of these, the name is known
        handle: Any = asyncio.Handle
        run = handle._run

        def timed(this: Any) -> None:
            began = time.thread_time()
            run(this)
            if (took := time.thread_time() - began) > self.longest:
                task = getattr(this._callback, "__self__", None)
                whose = getattr(getattr(task, "_coro", None), "__qualname__", None) or repr(this._callback)
                if not any(ours in whose for ours in _OURS):
                    self.longest, self.whose = took, whose

        handle._run = timed


async def measure(names: list[str]) -> None:
    """Print a row for each case, or for those whose name has one of ``names``."""
    from serve_app.host.vllm_start import settle
    from tests.ingress.serving import serving

    turns = Turns()
    print("| largest value | longest turn, ms | answer after, s | status |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        async with serving(model, adapters=(), max_model_len=CONTEXT) as (http, _, _):
            settle()
            await _ask(http, "/v1/completions", {"prompt": "warm"})
            for name, (path, body) in CASES.items():
                if names and not any(each in name for each in names):
                    continue
                began, turns.longest = time.monotonic(), 0.0
                response = await _ask(http, path, body)
                took = time.monotonic() - began
                print(f"| {name} | {1000 * turns.longest:.0f} | {took:.1f} | {response.status_code} |", flush=True)


async def _ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    of_path = {"/v1/responses": {"max_output_tokens": 2}, "/detokenize": {}}.get(path, {"max_tokens": 2})
    content = json.dumps({"model": MODEL, **of_path, **body})
    headers = {"content-type": "application/json"}
    return await asyncio.create_task(http.post(path, content=content, headers=headers, timeout=300))


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    logging.disable()
    asyncio.run(measure(sys.argv[1:]))
