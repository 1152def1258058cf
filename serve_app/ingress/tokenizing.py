"""vLLM's tokenization of a prompt without Transformers' layer around the tokenizer, which costs as much as the tokenizer itself.

That layer sets padding and truncation and makes masks and offsets that nobody reads. Where nothing of it has an effect, the ids are those
of the tokenizer's own `encode_batch_fast`. A prompt that is longer than allowed, or that the tokenizer refuses, goes vLLM's own way.
"""

from typing import Any

from transformers import TokenizersBackend
from vllm.inputs import TokensPrompt
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.utils.async_utils import make_async

_DECIDES = ("__call__", "_encode_plus")
"""What a model's own tokenizer class may replace, to make other ids."""


def tokenize_directly(renderer: Any) -> None:
    """Let vLLM's ``renderer`` take the short way, if its tokenizer has one. Called before the first prompt."""
    tokenizer = renderer.tokenizer
    if not _is_plain(tokenizer):
        return
    encode, by_vllm = tokenizer._tokenizer.encode_batch_fast, renderer._tokenize_prompt

    def tokenize(prompt: Any, params: Any) -> Any:
        if renderer._wants_offsets(prompt, params):
            return by_vllm(prompt, params)
        limits = params.get_encode_kwargs()
        try:
            (encoding,) = encode([prompt["prompt"]], add_special_tokens=limits["add_special_tokens"])
        except Exception:  # half a surrogate pair, or no text: vLLM's way raises vLLM's error
            return by_vllm(prompt, params)
        ids, longest = encoding.ids, limits.get("max_length")
        if longest is not None and len(ids) > longest:
            return by_vllm(prompt, params)
        return TokensPrompt(prompt_token_ids=ids, **prompt)

    renderer._tokenize_prompt = tokenize
    renderer._tokenize_prompt_async = make_async(tokenize, executor=renderer._executor)


def _is_plain(tokenizer: Any) -> bool:
    """Return whether Transformers' own classes make the ids, and neither pad nor cut them by themselves.

    vLLM's pool has to stand in front: then a prompt that vLLM cuts sets the limit of a copy, and not of the tokenizer that is used here.
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
