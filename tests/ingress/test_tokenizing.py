"""Prompts tokenized without Transformers' layer: the ids, and the errors, are those of vLLM's own way."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.ingress.tokenizing import _is_plain, tokenize_directly

pytestmark = pytest.mark.engine

TEXTS = (
    "",
    " ",
    "hello",
    "The capital of France is\n\n",
    "<s>special</s> <|im_start|>user",
    "día 日本語 🙂 \u200b\x00",
    "a" * 300,
    "word " * 300,
)


@pytest.fixture
def renderer(engine: AsyncLLM) -> Any:
    renderer: Any = engine.renderer
    before = dict(vars(renderer))
    yield renderer
    vars(renderer).clear()
    vars(renderer).update(before)


def tokenized(renderer: Any, text: str, params: TokenizeParams) -> Any:
    try:
        return renderer._tokenize_prompt({"prompt": text, "cache_salt": "x"}, params)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 64}, {"truncate_prompt_tokens": 3}, {"return_token_offsets": True}])
def test_ids_are_those_of_vllm(renderer: Any, add_special_tokens: bool, limits: dict[str, Any]) -> None:
    fields = {"max_total_tokens": None, "max_output_tokens": 0, "add_special_tokens": add_special_tokens, **limits}
    params = TokenizeParams(**fields)
    texts = (*TEXTS, "half \ud83d a pair")
    wanted = [tokenized(renderer, text, params) for text in texts]
    tokenize_directly(renderer)
    assert "_tokenize_prompt" in vars(renderer)
    assert [tokenized(renderer, text, params) for text in texts] == wanted


def test_a_tokenizer_that_cuts_or_is_anothers_goes_vllms_way(engine: AsyncLLM, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.model_config.tokenizer)
    assert not _is_plain(tokenizer), "no pool is in front: a prompt that is cut would cut those after it"
    own_class = type("Own", (type(tokenizer),), {"__call__": lambda self, text, **_: {"input_ids": []}})
    assert _is_plain(maybe_make_thread_pool(tokenizer))
    other = AutoTokenizer.from_pretrained(engine.model_config.tokenizer)
    other.__class__ = own_class
    assert not _is_plain(maybe_make_thread_pool(other))
    tokenizer._tokenizer.enable_truncation(5)
    assert not _is_plain(tokenizer)
