"""These tests check the static servers' completions API: its refusals, and that OpenAI's own client can read the answers."""

import json
from typing import Any

import pytest
from openai.types import Completion

from benchmarks.static_batching.answers import StaticAnswer, StreamOptions, body_of, parse_ask, single_prompt, stream_of
from benchmarks.static_batching.engines import BatchRequest, own_tokens
from benchmarks.static_batching.settings import parse_static
from serve_app.errors import BadRequest, ConfigError, ModelNotFound

ANSWER = StaticAnswer("so", prompt_tokens=3, output_tokens=2, finish_reason="length")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SIMULATED = {"name": "m", "model": "x", "max_prompt_tokens": 512, "simulated": {"profile": "a100-40gb-llama-13b"}}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "body: Object missing required field `prompt`"),
        ({"prompt": {}}, "body: "),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": [[1], [2]]}, "prompt: has 2 prompts"),
        ({"prompt": [1, "a"]}, "prompt: mixes"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: is 0"),
        ({"prompt": "a", "temperature": 0.7}, "temperature: is 0.7"),
    ],
)
def test_what_cannot_be_served_is_a_bad_request(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(BadRequest, match=error.replace("[", r"\[")):
        single_prompt(parse_ask(json.dumps(fields).encode(), served="m"))


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        parse_ask(b'{"prompt": "a", "model": "other"}', served="m")


@pytest.mark.parametrize(("prompt", "single"), [("a", "a"), ([7, 8], [7, 8]), (["a"], "a"), ([[7, 8]], [7, 8])])
def test_one_prompt_may_come_in_four_forms(prompt: Any, single: Any) -> None:
    body = json.dumps({"prompt": prompt, "model": "m", "unknown": 1}).encode()
    assert single_prompt(parse_ask(body, served="m")) == single


def test_openai_reads_the_answer() -> None:
    read = Completion.model_validate_json(body_of(ANSWER, request_id="r", model="m", created=1), strict=True)
    assert (read.id, read.choices[0].text, read.choices[0].finish_reason) == ("r", "so", "length")
    assert read.usage is not None
    assert read.usage.model_dump(exclude_none=True) == USAGE


@pytest.mark.parametrize(("include", "continuous"), [(False, False), (True, False), (True, True)])
def test_a_stream_is_one_event_with_everything_and_its_usage_where_asked(include: bool, continuous: bool) -> None:
    wire = stream_of(ANSWER, StreamOptions(include, continuous), request_id="r", model="m", created=1)
    *events, last = [part.removeprefix("data: ") for part in wire.decode().split("\n\n")[:-1]]
    read = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert [choice["text"] for event in read for choice in event["choices"]] == ["so"]
    assert [event.get("usage") for event in read] == [USAGE if continuous else None] + [USAGE] * include


@pytest.mark.parametrize(
    ("ignore_eos", "own"), [(True, ([5, 9, 5], "length")), (False, ([5, 9], "stop"))], ids=["ignore_eos", "eos ends"]
)
def test_an_answer_is_cut_at_its_own_end(ignore_eos: bool, own: tuple[list[int], str]) -> None:
    request = BatchRequest([1], max_tokens=3, ignore_eos=ignore_eos, arrived_at=0.0)
    assert own_tokens([5, 9, 5, 5, 5], request, eos_token_id=9) == own


def test_the_batch_is_as_large_as_the_simulated_memory_can_reserve() -> None:
    assert [parse_static({**SIMULATED, "max_output_tokens": n}).batch_size for n in (32, 1536)] == [29, 7]
    assert parse_static({**SIMULATED, "max_output_tokens": 32, "max_batch_size": 16}).batch_size == 16


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"max_batch_size": 30}, "max_batch_size"),
        ({"max_output_tokens": 20_000}, "max_batch_size"),
        ({"simulated": None}, "max_batch_size"),
        ({"simulated": {"profile": "h100-llama-8b", "eos_probability": 0.5}}, "simulated.eos_probability"),
        ({"form": "unfair"}, "form"),
    ],
)
def test_settings_that_cannot_run_are_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_static({**SIMULATED, "max_output_tokens": 32, **change})
    assert caught.value.path == path
