"""Which tokens a simulated model may emit: those that are plain, whole text.

Special and added tokens would end answers, start tool calls or be left out of the text; ids beyond the tokenizer's are
padding; tokens that are part of a character would show as U+FFFD and hold back the stream until it is whole.
"""

from typing import Any

import numpy as np
from vllm.tokenizers import cached_tokenizer_from_config

from serve_app.simulated.tokens import Ids, TokenSource

_CLOSING = frozenset('"]},:')


def source_for(model_config: Any, *, eos_probability: float) -> TokenSource:
    """Return the token source for the tokenizer of ``model_config``. Costs about 1 s per 100,000 tokens, once."""
    size = model_config.get_vocab_size()
    if model_config.skip_tokenizer_init:
        return TokenSource(np.arange(size, dtype=np.int64), _ids([]), eos_probability=eos_probability)
    tokenizer = cached_tokenizer_from_config(model_config)
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    candidates = [i for i in range(min(size, len(tokenizer))) if i not in special]
    texts = [tokenizer.decode([i]) for i in candidates]
    plain = [i for i, text in zip(candidates, texts, strict=True) if text and "\ufffd" not in text]
    closing = [i for i, text in zip(candidates, texts, strict=True) if text and _CLOSING.issuperset(text)]
    return TokenSource(_ids(plain), _ids(closing), eos_probability=eos_probability)


def _ids(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int64)
