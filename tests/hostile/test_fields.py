"""No field of a body, with whatever value, makes an ingress fail or leaves anything behind; vLLM's front end, a fake engine.

Each field of each route gets each odd value, one body at a time, more than 1,500 in all. Values that only a real worker could refuse are in
tests/contracts/test_request_limits.py. The fake engine has no log probabilities, so `logprobs` and beams are left to tests/e2e.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.serving import serving

ODD: dict[str, Any] = {
    "null": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "too many bits": 10**30,
    "huge": 1e308,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "empty text": "",
    "text": "x",
    "long text": "x" * 20_000,
    "half a character": "\ud800",
    "NUL": "\0",
    "empty list": [],
    "list": [1, -1, 10**30],
    "list of lists": [[[]]],
    "long list": [7] * 5000,
    "empty object": {},
    "object": {"a": {"b": None}},
    "many keys": {str(number): 1.0 for number in range(2000)},
    "deep": [[[[[[[[[[[[[[[[[[[[{}]]]]]]]]]]]]]]]]]]]],
}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": (
        {"prompt": "hi", "max_tokens": 2},
        """prompt max_tokens min_tokens n best_of temperature top_p top_k min_p seed stop stop_token_ids bad_words logit_bias
        allowed_token_ids prompt_logprobs logprob_token_ids echo presence_penalty frequency_penalty repetition_penalty
        length_penalty stream stream_options priority cache_salt session_id request_id kv_transfer_params
        ec_transfer_params vllm_xargs structured_outputs response_format repetition_detection thinking_token_budget
        truncate_prompt_tokens stream_interval routed_experts_prompt_start""",
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        """messages tools tool_choice chat_template chat_template_kwargs documents max_completion_tokens top_logprobs
        response_format mm_processor_kwargs reasoning_effort continue_final_message add_generation_prompt user
        media_io_kwargs""",
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "messages max_tokens system stop_sequences temperature tools tool_choice thinking metadata top_k stream",
    ),
    "/generate": (
        {"prompt": "hi", "max_tokens": 2},
        """prompt n best_of length_penalty early_stopping seed stop extra_args bad_words logit_bias stop_token_ids
        structured_outputs trace_decode_token_ids prompt_logprob_token_ids output_kind""",
    ),
}
"""Route -> a plain body, and the fields that get odd values."""


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield route, name and body of each input."""
    for path, (plain, fields) in FIELDS.items():
        for field in fields.split():
            for name, value in ODD.items():
                yield path, f"{field}: {name}", json.dumps({"model": MODEL, **plain, field: value}).encode()


async def answer(http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    return await http.post(path, content=body, headers={"content-type": "application/json"}, timeout=30)


@pytest.mark.timeout(300)
@in_loop
async def test_no_value_of_any_field_makes_an_ingress_fail(tmp_path: Path) -> None:
    failed, num = [], 0
    async with serving(make_tiny_llama(tmp_path / "tiny")) as (http, engine, _):
        for path, name, body in bodies():
            got = await answer(http, path, body)
            num += 1
            if got.status_code >= 500 or (got.status_code >= 400 and len(got.content) > 16_384):
                failed.append(f"{path} {name}: {got.status_code} {got.text[:200]}")
        plain = await answer(http, "/v1/completions", json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode())
        assert plain.status_code == 200
        await until(lambda: not engine.running)
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "fill silences"] == []
    assert not failed, "\n".join(failed)
    assert num > 1500
