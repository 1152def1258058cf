"""`POST /generate` runs on a real engine (a tiny random Llama in float32); its beam search is compared with vLLM's own."""

import asyncio
import functools
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.inputs import tokens_input
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.ingress.routes.generate import NUL, generate_route

pytestmark = [pytest.mark.engine]

Post = Callable[..., httpx.Response]
MAX_LOGPROBS = 20  # of the engine in conftest.py, as the next
MAX_MODEL_LEN = 512
PROMPT = "The engine core schedules"


@pytest.fixture
def post(post: Post) -> Post:
    return functools.partial(post, prompt=PROMPT)


def texts_of(response: httpx.Response) -> list[str]:
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    body: dict[str, list[str]] = response.json()
    assert body.keys() == {"text"}
    return body["text"]


def lines_of(response: httpx.Response) -> list[list[str]]:
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    assert response.text.endswith("\n")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert all(line.keys() == {"text"} for line in lines)
    return [line["text"] for line in lines]


def test_the_answer_is_the_prompt_and_what_the_engine_generates(post: Post, engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def reference() -> str:
        params = SamplingParams(temperature=0, max_tokens=12)
        text = ""
        async for output in engine.generate(PROMPT, params, "reference"):
            text = output.outputs[0].text
        return text

    assert texts_of(post(temperature=0, max_tokens=12)) == [PROMPT + runner.run(reference())]


def test_a_stream_repeats_the_text_so_far_and_ends_with_the_whole_answer(post: Post) -> None:
    fields = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}  # vLLM merges the tokens that a busy machine is late for
    lines = lines_of(post(stream=True, **fields))
    assert len(lines) > 1
    assert all(after[0].startswith(before[0]) for before, after in pairwise(lines))
    assert lines[0][0].startswith(PROMPT)
    assert lines[-1] == texts_of(post(**fields))


def test_with_nul_as_delimiter_a_client_of_the_first_server_reads_the_stream(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    app = Starlette(routes=[Route("/generate", generate_route(engine, max_logprobs=MAX_LOGPROBS, end=NUL), methods=["POST"])])

    async def ask() -> bytes:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as client:
            return (await client.post("/generate", json=fields)).content

    *pieces, after_the_last = runner.run(ask()).split(b"\0")
    texts = [json.loads(piece)["text"] for piece in pieces]
    assert after_the_last == b""
    assert b"\n" not in b"".join(pieces)
    assert len(texts) > 1
    assert all(text.startswith(PROMPT) for (text,) in texts)


def test_every_line_has_one_text_for_each_of_n(post: Post) -> None:
    fields = {"n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    lines = lines_of(post(stream=True, **fields))
    assert all(len(texts) == 3 and all(text.startswith(PROMPT) for text in texts) for texts in lines)
    assert lines[-1] == texts_of(post(**fields))
    assert len(set(lines[-1])) == 3


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_token_ids_as_prompt_give_the_answer_of_their_text(post: Post, engine: AsyncLLM, use_beam_search: bool) -> None:
    tokenizer = engine.renderer.get_tokenizer()
    ids = tokenizer.encode(PROMPT)
    fields = {"temperature": 0, "max_tokens": 6, "use_beam_search": use_beam_search}
    (answer,) = texts_of(post(**fields))
    assert texts_of(post(prompt=ids, **fields)) == [tokenizer.decode(ids) + answer.removeprefix(PROMPT)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [3] * MAX_MODEL_LEN}, None),
        ({"prompt": [3] * MAX_MODEL_LEN, "use_beam_search": True}, None),
        ({"prompt": "long " * 20 * MAX_MODEL_LEN}, "input_text"),
        ({"prompt": [3, 999_999]}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 3, "use_beam_search": True}, "temperature"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
        ({"structured_outputs": {}}, None),
        ({"nn": 1}, "nn"),
    ],
)
def test_a_refusal_has_a_status_also_when_a_stream_was_asked_for(
    post: Post, stream: bool, fields: dict[str, object], param: str | None
) -> None:
    response = post(stream=stream, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "BadRequestError", 400)
    assert (error["param"], error["message"] != "") == (param, True)


def test_a_full_engine_answers_503_before_a_stream_begins(post: Post, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.scheduler_config, "max_num_queued_reqs", 2)
    response = post(stream=True, n=3)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "Service Unavailable")
    assert texts_of(post(n=2, max_tokens=1))


class VllmBeamSearch(BeamSearchOnlineMixin):  # type: ignore[misc]
    def __init__(self, engine: AsyncLLM) -> None:
        self.engine_client = engine
        self.renderer = engine.renderer

    async def texts(self, prompt: str, params: BeamSearchParams) -> list[str]:
        ids = self.renderer.get_tokenizer().encode(prompt)
        outputs = [output async for output in self.beam_search(tokens_input(ids, prompt=prompt), "vllm", params)]
        return [prompt + completion.text for completion in outputs[-1].outputs]


@pytest.mark.parametrize("prompt", [PROMPT, "a", "tokens, tokens and more tokens"])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "max_tokens": 6},
        {"n": 3, "max_tokens": 10},
        {"n": 10, "max_tokens": 8},
        {"n": 4, "max_tokens": 10, "length_penalty": 0.25},
        {"n": 4, "max_tokens": 10, "length_penalty": 2.5},
        {"n": 4, "max_tokens": 10, "ignore_eos": True},
        {"n": 4, "max_tokens": 6, "skip_special_tokens": False},
        # Short answers win: finished beams are among the best.
        {"n": 10, "max_tokens": 8, "length_penalty": 0.0},
        {"n": 10, "max_tokens": 12, "length_penalty": -2.0},
    ],
)
def test_the_result_of_a_beam_search_is_vllms(
    post: Post, engine: AsyncLLM, runner: asyncio.Runner, prompt: str, fields: dict[str, Any]
) -> None:
    params = {name: value for name, value in fields.items() if name != "n"}
    expected = runner.run(VllmBeamSearch(engine).texts(prompt, BeamSearchParams(beam_width=fields["n"], **params)))
    assert texts_of(post(prompt=prompt, use_beam_search=True, **fields)) == expected
    assert lines_of(post(prompt=prompt, use_beam_search=True, stream=True, **fields))[-1] == expected


def test_a_beam_search_streams_one_line_per_step_each_the_answer_had_it_ended_there(post: Post) -> None:
    fields = {"use_beam_search": True, "n": 3, "ignore_eos": True}
    lines = lines_of(post(stream=True, max_tokens=4, **fields))
    assert lines == [texts_of(post(max_tokens=num_steps, **fields)) for num_steps in (1, 2, 3, 4)]


def test_fewer_answers_than_beams_are_the_best_of_them(post: Post) -> None:
    fields = {"use_beam_search": True, "max_tokens": 6}
    assert texts_of(post(n=2, best_of=5, **fields)) == texts_of(post(n=5, **fields))[:2]


def test_a_beam_search_ends_where_the_context_ends(post: Post) -> None:
    fields = {"prompt": [3] * (MAX_MODEL_LEN - 2), "use_beam_search": True, "n": 2, "ignore_eos": True}
    assert len(lines_of(post(stream=True, max_tokens=None, **fields))) == 2
    assert len(lines_of(post(stream=True, max_tokens=50, **fields))) == 2


def test_an_engine_is_not_asked_for_more_tokens_than_the_context_has_room_for(
    post: Post, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = engine.generate

    def recorded(prompt: Any, params: SamplingParams, request_id: str, **more: Any) -> Any:
        asked.append(params.max_tokens or 0)
        return generate(prompt, params, request_id, **more)

    monkeypatch.setattr(engine, "generate", recorded)
    texts_of(post(prompt=[3] * (MAX_MODEL_LEN - 2), max_tokens=10**9, ignore_eos=True))
    assert asked == [2]
