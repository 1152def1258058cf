"""Log probabilities leave the event loop to others while they are made, and are those of vLLM; vLLM's own front end, a fake engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serve_app.checkpoints import make_tiny_llama
from serve_app.core import request_limits
from serve_app.ingress.front_end import log_probabilities
from serve_app.ingress.front_end.log_probabilities import JSONInSlices
from serve_app.ingress.routes.app import AppLimits
from tests.doubles.fake_engine import prompt_logprobs
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.serving import application, serving

PROMPT = [5 + number % 800 for number in range(300)]
ASK: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the cat and the dog " * 20}]},
}


class Turns:
    """Counts log probabilities by turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest, self.num = 0, 0
        convert = log_probabilities._convert

        def counted(processor: Any, tensors: Any) -> None:
            self.num += tensors.logprobs.numel()
            self.largest = max(self.largest, self.num)
            asyncio.get_running_loop().call_soon(self._end)
            convert(processor, tensors)

        monkeypatch.setattr(log_probabilities, "_convert", counted)

    def _end(self) -> None:
        self.num = 0


@pytest.mark.parametrize("path", ASK)
@in_loop
async def test_those_of_a_prompt_are_converted_in_slices_with_the_same_answer(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_tiny_llama(tmp_path / "tiny"), adapters=()) as (http, _, _):

        async def answer() -> Any:
            response = await http.post(path, json={"model": MODEL, **ASK[path], "prompt_logprobs": 20, "max_tokens": 2, "n": 2})
            assert int(response.headers["content-length"]) == len(response.content)
            return {**response.json(), "id": "", "created": 0}

        monkeypatch.setattr(log_probabilities, "SLICE", 1 << 30)
        whole = await answer()
        monkeypatch.setattr(log_probabilities, "SLICE", 50)
        turns = Turns(monkeypatch)
        assert await answer() == whole
        assert 0 < turns.largest <= 50


@in_loop
async def test_a_stream_gets_those_of_its_prompt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probabilities, "SLICE", 50)
    async with application(make_tiny_llama(tmp_path / "tiny"), AppLimits(1 << 20), adapters=()) as (app, _, _):
        engine = app.front_ends[MODEL].engine
        params = SamplingParams(max_tokens=3, prompt_logprobs=2, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": PROMPT, "type": "token"}
        outputs = [output async for output in engine.generate(prompt, params, "r")]
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [len(PROMPT), *(0 for _ in outputs[1:])]
    assert list(outputs[0].prompt_logprobs[1]) == prompt_logprobs(PROMPT, 2).logprob_token_ids[0].tolist()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 1000, "max_tokens": 1}, "n: times the prompt's 300 tokens is 300000, limit 200000"),
        ({"prompt_logprobs": 20}, "prompt_logprobs: asks for 6300 log probabilities of a prompt, limit 5000"),
        (
            {"logprobs": 5, "n": 8, "max_tokens": 150},
            "logprobs: asks for up to 7200 log probabilities, limit 7000; lower max_tokens",
        ),
        ({"prompt": [PROMPT] * 4, "prompt_logprobs": 5}, "logprobs: asks for up to 7200 log probabilities, limit 7000; lower"),
    ],
)
@in_loop
async def test_more_than_an_answer_may_hold_are_refused(
    asked: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in {"MAX_CHOICE_TOKENS": 200_000, "MAX_PROMPT_LOGPROBS": 5000, "MAX_LOGPROBS": 7000}.items():
        monkeypatch.setattr(request_limits, name, limit)
    async with serving(make_tiny_llama(tmp_path / "tiny"), adapters=()) as (http, engine, _):
        response = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **asked})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(said)
        await until(lambda: not engine.running)
        one = {"model": MODEL, "prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 2}
        assert (await http.post("/v1/completions", json=one)).status_code == 200


ANSWERS: list[Any] = [
    {"id": "a", "choices": []},
    {"choices": [{"index": 0, "logprobs": None, "text": "\u00e9"}]},
    {
        "choices": [{"index": i, "logprobs": {"tokens": ["a"] * 250, "empty": [], "none": {}}} for i in range(3)],
        "usage": {"n": 1},
    },
    {"choices": [{"index": 0, "text": ""}], "prompt_logprobs": [None, *({5: {"logprob": -1.5}} for _ in range(250))]},
]


@pytest.mark.parametrize("answer", ANSWERS)
@in_loop
async def test_json_in_slices_has_the_same_bytes(answer: Any) -> None:
    response = JSONInSlices(answer, headers={"vary": "Origin"})
    await response.make()
    plain = JSONResponse(answer, headers={"vary": "Origin"})
    assert (response.body, sorted(response.raw_headers)) == (plain.body, sorted(plain.raw_headers))


@in_loop
async def test_a_number_that_json_does_not_have_is_an_error_as_in_starlette() -> None:
    answer = {"choices": [{"index": 0, "logprobs": {"token_logprobs": [float("nan")]}}]}
    with pytest.raises(ValueError, match="JSON"):
        JSONResponse(answer)
    with pytest.raises(ValueError, match="JSON"):
        await JSONInSlices(answer).make()
