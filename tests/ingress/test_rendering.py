"""Requests rendered by shorter ways have the ids, and the errors, of vLLM's own way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.renderers import base
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.core.tenants import Tenant
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer, answering
from serve_app.ingress.shortcuts.rendering import (
    MAX_CHARS_A_TURN,
    MAX_CHARS_HERE,
    _chars_of_conversation,
    _is_plain,
    render_directly,
)
from serve_app.ingress.shortcuts.thread_batches import Call, ThreadBatches
from tests.doubles.fleet import in_loop
from tests.ingress.tenants import caller
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]

TEXTS = (
    "",
    " ",
    "hello",
    "The capital of France is\n\n",
    "<s>special</s> <|im_start|>user",
    "día 日本語 🙂 \u200b\x00",
    "a" * 300,
    "word " * 300,
    ("<|im_start|>user\n" + "word " * 60 + "<|im_end|>\n") * 3,
)


HALF = "half \ud83d a pair"


@pytest.fixture
def renderer(engine: AsyncLLM) -> Any:
    renderer: Any = engine.renderer
    before, by_vllm = dict(vars(renderer)), base.asyncio
    yield renderer
    base.asyncio = by_vllm
    vars(renderer).clear()
    vars(renderer).update(before)


def tokenized(renderer: Any, text: str, params: TokenizeParams) -> Any:
    try:
        found = renderer._tokenize_prompt({"prompt": text, "cache_salt": "x"}, params)
    except Exception as error:
        found = error
    return accepted(renderer, found, params)


def accepted(renderer: Any, found: Any, params: TokenizeParams) -> Any:
    """Return what vLLM makes of the tokens: it refuses those that are too many, and says how many there are."""
    try:
        if not isinstance(found, Exception):
            return params.apply_post_tokenization(renderer.tokenizer, found)
    except Exception as error:
        found = error
    return type(found), str(found)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 64}, {"truncate_prompt_tokens": 3}, {"return_token_offsets": True}])
def test_ids_are_those_of_vllm(renderer: Any, add_special_tokens: bool, limits: dict[str, Any]) -> None:
    fields = {"max_total_tokens": None, "max_output_tokens": 0, "add_special_tokens": add_special_tokens, **limits}
    params = TokenizeParams(**fields)
    texts = (*TEXTS, HALF)
    wanted = [tokenized(renderer, text, params) for text in texts]
    render_directly(renderer)
    assert "_tokenize_prompt" in vars(renderer)
    assert [tokenized(renderer, text, params) for text in texts] == wanted


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 64}, {"truncate_prompt_tokens": 3}, {"return_token_offsets": True}])
def test_prompts_that_go_together_get_what_each_gets_alone(renderer: Any, limits: dict[str, Any], adds: bool) -> None:
    params = TokenizeParams(**{"max_total_tokens": None, "max_output_tokens": 0, "add_special_tokens": adds, **limits})
    wanted = [tokenized(renderer, text, params) for text in TEXTS]
    refused = tokenized(renderer, HALF, params)
    render_directly(renderer)
    together = [({"prompt": text, "cache_salt": "x"}, params) for text in TEXTS]
    assert several(renderer, together) == wanted
    assert several(renderer, [*together, ({"prompt": HALF, "cache_salt": "x"}, params)]) == [*wanted, refused]
    other = TokenizeParams(max_total_tokens=None, add_special_tokens=not adds)
    assert several(renderer, [*together, ({"prompt": "a"}, other)]) == [
        *wanted,
        renderer._tokenize_prompt({"prompt": "a"}, other),
    ]


def several(renderer: Any, prompts: Sequence[Any]) -> list[Any]:
    found = renderer._tokenize_prompt.__self__.several([((*args, False), {}) for args in prompts])
    return [accepted(renderer, each, params) for each, (_, params) in zip(found, prompts, strict=True)]


@in_loop
async def test_the_event_loop_tokenizes_short_prompts_itself_and_no_other(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TokenizeParams(max_total_tokens=None, add_special_tokens=True)
    with_offsets = TokenizeParams(max_total_tokens=None, add_special_tokens=True, return_token_offsets=True)
    cut = TokenizeParams(max_total_tokens=None, truncate_prompt_tokens=3, add_special_tokens=True)
    asked = [("short", plain), ("a" * MAX_CHARS_HERE, plain), ("a" * (MAX_CHARS_HERE + 1), plain)]
    asked += [(HALF, plain), ("short", with_offsets), ("too long for three tokens", cut)]
    wanted = [tokenized(renderer, text, params) for text, params in asked]
    render_directly(renderer)
    to_threads = noted_for_threads(renderer, monkeypatch)
    calls = (renderer._tokenize_prompt_async({"prompt": text, "cache_salt": "x"}, params) for text, params in asked)
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [accepted(renderer, each, params) for each, (_, params) in zip(found, asked, strict=True)] == wanted
    assert to_threads == [text for text, _ in asked[2:]]


def noted_for_threads(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the prompts that will have gone to threads."""
    to_threads, submit = list[str](), renderer._executor.submit

    def noted(make: Any, loop: asyncio.AbstractEventLoop, batch: Any) -> Any:
        to_threads.extend(args[0]["prompt"] for (args, _), _ in batch)
        return submit(make, loop, batch)

    monkeypatch.setattr(renderer._executor, "submit", noted)
    return to_threads


@in_loop
async def test_in_one_turn_the_event_loop_tokenizes_so_much_and_threads_the_rest(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    render_directly(renderer)
    to_threads = noted_for_threads(renderer, monkeypatch)
    params = TokenizeParams(max_total_tokens=None, add_special_tokens=True)
    fitting = MAX_CHARS_A_TURN // MAX_CHARS_HERE
    texts = [f"{number:<{MAX_CHARS_HERE}}" for number in range(fitting + 2)]

    async def ask(texts: Sequence[str]) -> None:
        await asyncio.gather(*(renderer._tokenize_prompt_async({"prompt": text}, params) for text in texts))

    await ask(texts)
    assert to_threads == texts[fitting:]
    await ask(texts[:fitting])
    assert to_threads == texts[fitting:], "the next turn has a share of its own"


@in_loop
async def test_a_request_of_one_prompt_is_rendered_in_its_own_task(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by_vllm = await renderer.render_cmpl_async([{"prompt": "a b c"}])
    made = list[str]()
    loop = asyncio.get_running_loop()

    def task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(task)
    render_directly(renderer)
    (rendered,) = await renderer.render_cmpl_async([{"prompt": "a b c"}])
    two = await renderer.render_cmpl_async([{"prompt": "a b c"}, {"prompt": "d"}])
    loop.set_task_factory(None)
    assert rendered["prompt_token_ids"] == by_vllm[0]["prompt_token_ids"] == two[0]["prompt_token_ids"]
    assert len(made) == 6, "three of each of two prompts, none of one"


@in_loop
async def test_a_text_is_remembered_unless_its_request_has_a_salt(renderer: Any) -> None:
    render_directly(renderer)
    cache = renderer._tokenize_prompt.__self__._cache
    as_text = ChatParams(chat_template_kwargs={"tokenize": False})  # as the serving classes ask for it
    params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)

    async def known(word: str, **extras: str) -> list[str]:
        conversation = [{"role": "user", "content": f"{word} " * length} for length in (100, 300)]
        await renderer.render_chat_async([conversation], as_text, params, prompt_extras=extras)
        return [part for _, part in cache._ids if word in part]

    assert await known("public") != []
    assert await known("secret", cache_salt="x") == []
    assert await known("open", mm_processor_kwargs="x") != []
    text = "<|im_start|>user\n" + "hidden " * 60
    await renderer.render_cmpl_async([{"prompt": text}], params, prompt_extras={"cache_salt": "x"})
    assert ("", text) not in cache._ids
    await renderer.render_cmpl_async([{"prompt": text}], params)
    assert ("", text) in cache._ids


@in_loop
async def test_a_text_is_remembered_for_its_tenant_alone(renderer: Any) -> None:
    render_directly(renderer)
    cache = renderer._tokenize_prompt.__self__._cache
    params, text = TokenizeParams(max_total_tokens=None, add_special_tokens=False), "<|im_start|>user\n" + "of a tenant " * 60
    cache._ids.clear()

    async def send(_: Message) -> None: ...

    for tenant in (Tenant("red"), Tenant("blue"), Tenant("red"), Tenant("shared", shares_prefix_cache=True)):
        held = HeldAnswer(send, Exchange("/v1/completions", caller(tenant)))
        with answering(held):
            await renderer.render_cmpl_async([{"prompt": text}], params)
    assert [space for space, part in cache._ids if part == text] == [
        Tenant("blue").cache_salt(None),
        Tenant("red").cache_salt(None),
        "",
    ]


@in_loop
async def test_a_conversation_is_the_text_that_vllm_makes_of_it(renderer: Any) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "two words", "")]
    wanted = [renderer.render_chat([each], ChatParams(), TokenizeParams(max_total_tokens=None)) for each in conversations]
    render_directly(renderer)
    batches = renderer._apply_chat_template_async
    assert isinstance(batches, ThreadBatches)
    sizes, apply = list[int](), batches._several

    def counted(calls: Sequence[Call]) -> Any:
        sizes.append(len(calls))
        return apply(calls)

    batches._several = counted
    asked = (renderer.render_chat_async([each], ChatParams(), TokenizeParams(max_total_tokens=None)) for each in conversations)
    found = await asyncio.gather(*asked)
    assert [each[1][0]["prompt_token_ids"] for each in found] == [each[1][0]["prompt_token_ids"] for each in wanted]
    assert sizes == [3]


def test_the_text_of_a_conversation_is_that_of_its_messages_and_of_their_parts() -> None:
    parts = [{"type": "text", "text": "three"}, {"type": "image"}, {"type": "text", "text": "!"}]
    conversation = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    assert _chars_of_conversation((("config", "tokenizer", conversation), {})) == len("one" + "three" + "!")


def test_a_prompt_that_is_too_long_is_tokenized_once(renderer: Any) -> None:
    params = TokenizeParams(max_total_tokens=64, max_output_tokens=0)
    wanted = tokenized(renderer, "word " * 300, params)
    assert wanted[0] is VLLMValidationError
    asked = list[str]()
    by_vllm = renderer._tokenize_prompt

    def once_more(prompt: Any, params: TokenizeParams) -> Any:
        asked.append(prompt["prompt"])
        return by_vllm(prompt, params)

    renderer._tokenize_prompt = once_more
    render_directly(renderer)
    assert (tokenized(renderer, "word " * 300, params), asked) == (wanted, [])


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
