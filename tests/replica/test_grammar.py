"""vLLM's grammars are compiled and asked as an engine does it: after the emitted tokens they mask as those of the lost engine did."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from serve_app.checkpoints import make_tiny_llama
from serve_app.replica.grammar import EmittedRejected, accept_emitted

PROMPT = [40, 41, 42]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 23]}},
    "required": ["name", "n"],
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-z]{3,9} [0-9]{2}"},
    "choice": {"choice": ["yes, of course", "yes", "no"]},
    "grammar": {"grammar": 'root ::= "SELECT " ("a" | "b") (", " ("a" | "b"))* " END"'},
    "structural_tag": {
        "structural_tag": '{"structures": [{"begin": "f(", "schema": {"type": "boolean"}, "end": ")"}], "triggers": ["f("]}'
    },
}
BEGIN = {"structural_tag": "f("}
BACKENDS = {
    "xgrammar": list(KINDS),
    "guidance": [kind for kind in KINDS if kind != "grammar"],  # its own syntax
    "outlines": ["json", "regex", "choice"],
}


class Thinking(BaseThinkingReasoningParser):  # type: ignore[misc]  # vLLM's is untyped here
    """vLLM's own reasoning parser, with two tokens that the tiny checkpoint has."""

    start_token = "<|im_start|>"
    end_token = "<|im_end|>"

    def extract_reasoning(self, model_output: str, request: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    return AsyncEngineArgs(model=str(model), max_model_len=2048, dtype="float32").create_engine_config()


@pytest.fixture
def manager(config: Any) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(config)
    yield manager
    manager.clear_backend()


def request(manager: StructuredOutputManager, params: SamplingParams, *emitted: int, **fields: Any) -> Any:
    """Return a request whose grammar compiles, and which continues after ``emitted``."""
    made = Request("r", [*PROMPT, *emitted], params, None, **fields)
    manager.grammar_init(made)
    if emitted:
        accept_emitted(manager, made, len(emitted))
    return made


def sampling(manager: StructuredOutputManager, backend: str, spec: dict[str, Any]) -> SamplingParams:
    """Return parameters as vLLM's input processor leaves them."""
    config = manager.vllm_config
    config.structured_outputs_config.backend = backend
    params = SamplingParams(max_tokens=99, structured_outputs=StructuredOutputsParams(**spec))
    params._validate_structured_outputs(config.model_config, config.structured_outputs_config, manager.tokenizer)
    params.update_from_generation_config({}, manager.tokenizer.eos_token_id)
    return params


def mask(manager: StructuredOutputManager, of: Any) -> list[int]:
    """Return the tokens that may come next, by the scheduler's call."""
    structured = of.structured_output_request
    while not structured.is_grammar_ready:
        structured._grammar.exception()
    if isinstance(structured.grammar, Exception):
        raise structured.grammar
    bits = manager.grammar_bitmask({"r": of}, ["r"], {})
    return list(np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")[:1024]))


def walk(manager: StructuredOutputManager, of: Any, tokens: list[int], limit: int) -> tuple[list[int], list[list[int]]]:
    """Return ``tokens`` and then random allowed ones, at most ``limit`` in all, and the masks before each of them and after the last."""
    chance, eos = random.Random(3), manager.tokenizer.eos_token_id
    answer, masks = list[int](), [mask(manager, of)]
    while len(answer) < limit and (len(answer) < len(tokens) or eos not in answer):
        going_on = [i for i in masks[-1] if i != eos] or [eos]
        token_id = tokens[len(answer)] if len(answer) < len(tokens) else int(chance.choice(going_on))
        of.append_output_token_ids(token_id)
        assert manager.accept_tokens(of, [token_id])
        answer.append(token_id)
        masks.append(mask(manager, of))
    return answer, masks


@pytest.mark.parametrize(("backend", "kind"), [(backend, kind) for backend, kinds in BACKENDS.items() for kind in kinds])
def test_after_any_number_of_emitted_tokens_the_same_may_follow(
    manager: StructuredOutputManager, backend: str, kind: str
) -> None:
    params = sampling(manager, backend, KINDS[kind])
    assert params.structured_outputs._backend == backend
    begin = manager.tokenizer.encode(BEGIN.get(kind, ""), add_special_tokens=False)
    answer, masks = walk(manager, request(manager, params), begin, 24)
    assert len(answer) > 2
    assert min(len(m) for m in masks) < 1024
    for count in range(1, len(answer) + 1):
        assert mask(manager, request(manager, params, *answer[:count])) == masks[count], count


def test_what_comes_after_the_end_of_a_grammar_is_free_there_as_before(manager: StructuredOutputManager) -> None:
    eos = manager.tokenizer.eos_token_id
    params = sampling(manager, "xgrammar", {"choice": ["a"]})
    (a,) = manager.tokenizer.encode("a", add_special_tokens=False)
    answer, masks = walk(manager, request(manager, params), [a, eos, 50], 3)
    assert [len(m) for m in masks] == [1, 1, 1024, 1024]
    assert [mask(manager, request(manager, params, *answer[:count])) for count in (1, 2, 3)] == masks[1:]


def test_the_grammar_begins_where_the_reasoning_ended(manager: StructuredOutputManager) -> None:
    manager.reasoner_cls = Thinking
    params = sampling(manager, "xgrammar", KINDS["regex"])
    end = Thinking(manager.tokenizer).end_token_id
    word = manager.tokenizer.encode("ab", add_special_tokens=False)
    answer = [60, 61, end, *word]
    _, masks = walk(manager, request(manager, params), answer, len(answer))
    assert [len(m) == 1024 for m in masks[:4]] == [True, True, True, False]
    for count in range(1, len(answer) + 1):
        resumed = request(manager, params, *answer[:count])
        _, rest = walk(manager, resumed, answer[count:], len(answer) - count)
        assert rest == masks[count:], count


def test_an_answer_without_reasoning_is_not_taken_for_one_that_still_reasons(manager: StructuredOutputManager) -> None:
    manager.reasoner_cls = Thinking
    params = sampling(manager, "xgrammar", KINDS["regex"])
    word = manager.tokenizer.encode("ab", add_special_tokens=False)
    _, masks = walk(manager, request(manager, params, reasoning_ended=True), word, len(word))
    assert mask(manager, request(manager, params, *word, reasoning_ended=True)) == masks[-1]


def test_what_the_grammar_cannot_have_emitted_ends_the_request_alone(manager: StructuredOutputManager) -> None:
    params = sampling(manager, "xgrammar", KINDS["regex"])
    (digit,) = manager.tokenizer.encode("7", add_special_tokens=False)
    with pytest.raises(EmittedRejected, match="at position 0 of 1"):
        mask(manager, request(manager, params, digit))


def test_a_request_without_a_grammar_is_left_as_it_is(manager: StructuredOutputManager) -> None:
    made = request(manager, SamplingParams(max_tokens=3), 7, 8)
    assert made.structured_output_request is None
