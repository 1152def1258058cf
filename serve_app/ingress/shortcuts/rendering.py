"""Rendering makes vLLM's renderer cheaper: it tokenizes without Transformers' layer, and without needless tasks and threads.

Transformers' layer sets padding and truncation, and makes masks and offsets that vLLM does not read. If none of this changes the ids, they
come from the tokenizer's own `encode_batch_fast`. vLLM itself renders a prompt that has to be cut, or that the tokenizer refuses.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from transformers import TokenizersBackend
from vllm.inputs import TokensPrompt
from vllm.renderers import base
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.shortcuts.thread_batches import Call, ThreadBatches, tried
from serve_app.ingress.shortcuts.token_cache import TokenCache, cuts_of

_DECIDES = ("__call__", "_encode_plus")
"""Methods that a model's own tokenizer class may override to make other ids."""

MAX_TEMPLATES = 32
"""The most conversations of one batch. The event loop waits while templates run, because they are Python: some 3 ms for 32. Batches of 8
take more CPU."""


MAX_CHARS_HERE = 1024
"""The longest prompt, in characters, that the event loop tokenizes itself: some 300 tokens, 0.2 ms. A thread would leave the event loop
free for that time, but in a busy ingress its hand-overs take longer: Python gives a thread its lock only after 5 ms, twice for each
batch."""
LEAST_CHARS = 64
"""The least that a prompt counts, in characters, because even an empty prompt takes time."""
MAX_CHARS_A_TURN = 32 << 10
"""The most characters that the event loop tokenizes in one turn: some 6 ms. Further prompts of the turn go to a thread. Otherwise one body
of 4,096 prompts, or the conversations of a batch of templates, would be tokenized in a single turn: 4,096 prompts of 1,024 characters took
0.6 s."""


_is_salted: ContextVar[bool] = ContextVar("is_salted", default=False)
"""Whether the client gave the current request a ``cache_salt``, which vLLM puts into its prompt only after tokenization."""


def render_directly(renderer: Any, template: str | None = None) -> None:
    """Replace the steps of vLLM's ``renderer`` that have a cheaper way. Called before the first prompt.

    Args:
        template: The chat template that replaces the tokenizer's own.
    """
    stands_in: Any = _WithoutNeedlessTasks()
    base.asyncio = stands_in
    if type(renderer) is HfRenderer:
        renderer._apply_chat_template_async = ThreadBatches(
            _apply_templates, renderer._executor, _chars_of_conversation, MAX_TEMPLATES
        )
    if _is_plain(renderer.tokenizer):
        tokenizing = _Direct(renderer, template or _template_of(renderer.tokenizer))
        renderer.render_chat_async = partial(_render, renderer.render_chat_async)
        renderer.render_cmpl_async = partial(_render, renderer.render_cmpl_async)
        renderer._tokenize_prompt = tokenizing.one
        renderer._tokenize_prompt_async = tokenizing.soon
        eos_token_id = renderer.get_eos_token_id()
        renderer.get_eos_token_id = lambda: eos_token_id  # Transformers looks it up again for each request


def _template_of(tokenizer: Any) -> str:
    """Return all of the tokenizer's own chat templates; some have several, by name."""
    own = tokenizer.chat_template
    return "".join(own.values()) if isinstance(own, dict) else own or ""


async def _render(by_vllm: Callable[..., Awaitable[Any]], *args: Any, prompt_extras: Any = None, **kwargs: Any) -> Any:
    before = _is_salted.set("cache_salt" in (prompt_extras or ()))
    try:
        return await by_vllm(*args, prompt_extras=prompt_extras, **kwargs)
    finally:
        _is_salted.reset(before)


def _apply_templates(calls: Sequence[Call]) -> Iterator[Any]:
    return (tried(safe_apply_chat_template, *args, **kwargs) for args, kwargs in calls)  # lazily, each when its result is needed


def _chars_of_conversation(call: Call) -> int:
    return sum(_chars_of(message.get("content")) for message in call[0][2])


def _chars_of(content: Any) -> int:
    """Return the length of a message's text. The content is a text or a list of parts, and a part may be no text."""
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") for part in content or () if isinstance(part, dict))
    return sum(len(text) for text in texts if isinstance(text, str))


def _chars_of_prompt(call: Call) -> int:
    return len(call[0][0]["prompt"])


class _Direct:
    """The cheaper tokenization, which leaves a prompt to vLLM's own where that is needed."""

    def __init__(self, renderer: Any, template: str) -> None:
        backend = renderer.tokenizer._tokenizer
        self._encode = backend.encode_batch_fast
        cut_before = cuts_of(backend, template)
        self._cache = TokenCache(partial(self._encode, add_special_tokens=False), cut_before) if cut_before else None
        self._wants_offsets = renderer._wants_offsets
        self._by_vllm = renderer._tokenize_prompt
        self._in_threads = ThreadBatches(self.several, renderer._executor, _chars_of_prompt)
        self._num_chars = 0
        """Characters that were tokenized in this turn of the event loop."""

    async def soon(self, prompt: Any, params: Any) -> Any:
        """Return or raise the same as `one`: at once for most short prompts, from a thread for all others."""
        space = _space()
        if self._fits_turn(max(LEAST_CHARS, len(prompt["prompt"]))) and (made := self._made(prompt, params, space)) is not None:
            return made
        return await self._in_threads(prompt, params, space)

    def _fits_turn(self, num_chars: int) -> bool:
        """Return whether the event loop may tokenize so many characters now; if so, count them for this turn."""
        if num_chars > MAX_CHARS_HERE or self._num_chars + num_chars > MAX_CHARS_A_TURN:
            return False
        if self._num_chars == 0:
            asyncio.get_running_loop().call_soon(self._turn_ended)  # runs after all callbacks of this turn
        self._num_chars += num_chars
        return True

    def _turn_ended(self) -> None:
        self._num_chars = 0

    def one(self, prompt: Any, params: Any, space: str | None = None) -> Any:
        """Return vLLM's ``TokensPrompt``, or raise vLLM's error. Called in a thread.

        vLLM itself gives no ``space``, and its threads do not know the request: such prompts, to embed, are tokenized without the cache.
        """
        made = self._made(prompt, params, space)
        return self._by_vllm(prompt, params) if made is None else made

    def several(self, calls: Sequence[Call]) -> list[Any]:
        """Return for each call, in order, the result or the exception of `one`. Called in a thread."""
        prompts = [args for args, _ in calls]
        of_all = [params.get_encode_kwargs() for _, params, _ in prompts]
        ways = {(limits["add_special_tokens"], space) for limits, (_, _, space) in zip(of_all, prompts, strict=True)}
        if len(prompts) == 1 or len(ways) > 1 or any(self._wants_offsets(prompt, params) for prompt, params, _ in prompts):
            return [tried(self.one, *each) for each in prompts]
        try:
            ids_of_all = self._ids([prompt["prompt"] for prompt, _, _ in prompts], *ways.pop())
        except Exception:  # one of the prompts caused it; `one` finds out which
            return [tried(self.one, *each) for each in prompts]
        in_order = zip(of_all, ids_of_all, prompts, strict=True)
        made = ((_within(limits, ids, prompt, params), prompt, params) for limits, ids, (prompt, params, _) in in_order)
        return [tried(self._by_vllm, prompt, params) if tokens is None else tokens for tokens, prompt, params in made]

    def _made(self, prompt: Any, params: Any, space: str | None) -> Any:
        """Return vLLM's ``TokensPrompt``; None if vLLM itself has to make the prompt or the error."""
        if self._wants_offsets(prompt, params):
            return None
        limits = params.get_encode_kwargs()
        try:
            (ids,) = self._ids([prompt["prompt"]], limits["add_special_tokens"], space)
        except Exception:  # half a surrogate pair, or the prompt is no text
            return None
        return _within(limits, ids, prompt, params)

    def _ids(self, texts: Sequence[str], add_special_tokens: bool, space: str | None) -> Sequence[list[int]]:
        """Return the ids of each text. The cache is for texts of chat templates, to which the tokenizer adds no special tokens."""
        if self._cache is None or add_special_tokens or space is None:
            return [encoding.ids for encoding in self._encode(texts, add_special_tokens=add_special_tokens)]
        return self._cache.ids_of(texts, space)


def _space() -> str | None:
    """Return the part of the token cache for the current request: that of its tenant; None for a request with a ``cache_salt``."""
    if _is_salted.get():
        return None
    exchange = current_exchange()
    if exchange is None or exchange.caller is None:
        return ""
    return exchange.caller.tenant.cache_salt(None) or ""


def _within(limits: Any, ids: list[int], prompt: Any, params: Any) -> Any:
    """Return the ids as vLLM's ``TokensPrompt``; None if vLLM has to cut the prompt."""
    longest = limits.get("max_length")
    if longest is not None and len(ids) > longest:
        if params.truncate_prompt_tokens is not None:
            return None
        ids = ids[:longest]  # vLLM refuses the prompt, and its error states this number
    return TokensPrompt(prompt_token_ids=ids, **prompt)


class _WithoutNeedlessTasks:
    """A stand-in for ``asyncio`` in vLLM's renderer, which awaits each `gather` at once: a single coroutine then needs no task."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    def gather(*awaitables: Any) -> Any:
        return _in_a_list(*awaitables) if len(awaitables) == 1 else asyncio.gather(*awaitables)


async def _in_a_list(awaitable: Any) -> list[Any]:
    return [await awaitable]


def _is_plain(tokenizer: Any) -> bool:
    """Return whether Transformers' own classes make the ids, and neither pad nor cut them by default.

    vLLM's pool of tokenizers is required: with it, a prompt that vLLM cuts sets the limit of a copy, and not of the tokenizer used here.
    """
    if not isinstance(tokenizer, TokenizersBackend) or not isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        return False
    classes = type(tokenizer).__mro__
    own = [each for each in classes[: classes.index(TokenizersBackend)] if not each.__module__.startswith("vllm.")]
    backend = tokenizer._tokenizer
    return (
        not any(name in vars(each) for each in own for name in _DECIDES)
        and backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
