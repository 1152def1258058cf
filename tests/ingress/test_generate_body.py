"""`POST /generate` accepts some bodies and refuses the rest, in words that these tests fix."""

import json
import math

import pytest

from serve_app.errors import BadRequest
from serve_app.ingress.http.first_errors import MAX_GRAMMAR_CHARS
from serve_app.ingress.routes.generate_body import MAX_COLONS, parse_body

PROMPT = "The engine core schedules"


def body_of(**fields: object) -> bytes:
    return json.dumps({"prompt": PROMPT} | fields).encode()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "body: Invalid JSON: EOF while parsing a value at line 1 column 0; got b''"),
        (b"[]", "body: Input should be an object; got []"),
        (b"{}", "prompt: is missing; it is the only parameter without a default"),
        (body_of(prompt=""), "prompt: must be a text or a list of token ids, and not empty; got ''"),
        (body_of(prompt=[]), "prompt: must be a text or a list of token ids, and not empty; got []"),
        (body_of(prompt=["a"]), "prompt: must be a text or a list of token ids, and not empty; got ['a']"),
        (body_of(prompt=[3, -1]), "prompt: must be a text or a list of token ids, and not empty; got [3, -1]"),
        (body_of(tempratur=1), "tempratur: unknown parameter; did you mean temperature?"),
        (body_of(qqqq=1), "qqqq: unknown parameter; leave it out"),
        (body_of(detokenize=False), "detokenize: unknown parameter; leave it out"),
        (body_of(temperature="1"), "temperature: Input should be a valid number; got '1'"),
        (body_of(temperature=math.nan), "temperature: Input should be a finite number; got nan"),
        (body_of(max_tokens=True), "max_tokens: Input should be a valid integer; got True"),
        (body_of(max_tokens=0), "max_tokens: Input should be greater than or equal to 1; got 0"),
        (body_of(stop=5), "stop: Input should be a valid string or Input should be a valid array; got 5"),
        (body_of(seed=2**63), "seed: 9223372036854775808 does not fit into 64 bits"),
        (body_of(n=10**9), "n: 1000000000 answers, but the limit is 16384; lower n"),
        (body_of(**{"k" * 65: 1}), f"{'k' * 64}...: unknown parameter; leave it out"),
        (
            body_of(n=2, temperature=0),
            "n: 2 answers at temperature 0 would all be the same; raise temperature or set use_beam_search",
        ),
        (body_of(best_of=4), "best_of: 4 is for beam search only; set use_beam_search or leave best_of out"),
        (
            body_of(early_stopping=True),
            "early_stopping: True is for beam search only; set use_beam_search or leave early_stopping out",
        ),
        (
            body_of(use_beam_search=True, n=4, best_of=3),
            "n: 4 answers, but best_of=3 beams; raise best_of or lower n",
        ),
        (
            body_of(use_beam_search=True, n=11),
            "n: 11 beams, but the limit is 10 beams, half the engine's max_logprobs; lower n or raise max_logprobs",
        ),
        (
            body_of(use_beam_search=True, n=2, best_of=11),
            "best_of: 11 beams, but the limit is 10 beams, half the engine's max_logprobs; lower best_of or raise max_logprobs",
        ),
        (
            body_of(use_beam_search=True, stop="x"),
            "stop: 'x' would have no effect on a beam search; leave stop out",
        ),
    ],
)
def test_a_bad_body_is_refused_with_the_value_and_the_way_out(raw: bytes, problem: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_body(raw, max_width=10)
    assert str(error.value) == problem


MANY_FIELDS: dict[str, object] = {f"k{number}": 1 for number in range(MAX_COLONS)}


@pytest.mark.parametrize("before", [{}, {"temperature": math.nan}])
def test_of_many_unknown_fields_the_first_is_refused_before_anything_is_validated(before: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as error:
        parse_body(body_of(**before, **MANY_FIELDS), max_width=10)
    assert (str(error.value), error.value.__cause__) == ("k0: unknown parameter; leave it out", None)


def test_a_text_may_have_many_colons() -> None:
    prompt = ":" * (MAX_COLONS + 1)
    assert parse_body(body_of(prompt=prompt), max_width=10).prompt == prompt
    assert math.isnan(parse_body(body_of(prompt=prompt, extra_args={"a": math.nan}), max_width=10).sampling()["extra_args"]["a"])


def test_a_grammar_that_takes_long_to_compile_is_refused() -> None:
    large = {"choice": ["a" * MAX_GRAMMAR_CHARS]}
    with pytest.raises(BadRequest, match=f"structured_outputs: has [0-9]+ characters, limit {MAX_GRAMMAR_CHARS}"):
        parse_body(json.dumps({"prompt": "a", "structured_outputs": large}).encode(), max_width=10)


def test_every_sampling_parameter_of_vllm_is_taken_as_it_is_sent() -> None:
    sent = {"top_p": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "seed": 7, "n": 2, "extra_args": {"a": [1]}}
    assert parse_body(body_of(**sent), max_width=10).sampling() == sent | {"logit_bias": {5: 1.0}}


def test_the_bodies_of_early_clients_are_taken() -> None:
    beam = {"n": 4, "use_beam_search": True, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "stop": []}
    plain = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    for fields in (beam | {"stop": None}, plain, {"model": "tiny"}):
        assert parse_body(body_of(**fields), max_width=10).prompt == PROMPT
