"""vLLM's detokenizer of an answer, told the end of the prompt in place of all of it.

The text of an answer's first token may depend on the tokens before it, so vLLM gives the whole prompt to the tokenizer's `DecodeStream`.
When that token comes, the stream makes text of all of it twice, in the event loop: 0.2 ms for 1,000 tokens, 25 ms for 100,000. From the
second token on it looks back no further than to the last text that it gave out; so the end of the prompt is enough for the first one, too.
vLLM's first stream, which copies the ids of the whole prompt, is made all the same.
"""

import re
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

MAX_WHOLE_TOKENS = 256
"""A prompt of at most so many tokens is left whole: making its text twice takes some 0.05 ms."""
NUM_END_TOKENS = 64
_INCOMPLETE = "\ufffd"
_is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
"""Of a token that stands for a byte. A decoder that knows such tokens makes one text of a whole row of them, or none."""


def begin_at_the_end(detokenizer: Any, prompt_token_ids: Sequence[int] | None) -> None:
    """Let ``detokenizer``, which has seen no token yet, begin with the last `NUM_END_TOKENS` of the prompt where that makes the same text.

    It may not where these make no text (special tokens, images), have a part of a character in them, or have no text but that of bytes:
    what a decoder makes of those depends on the tokens before them.
    """
    if (
        prompt_token_ids is None
        or len(prompt_token_ids) <= MAX_WHOLE_TOKENS
        or type(detokenizer) is not FastIncrementalDetokenizer
    ):
        return
    end, skip, tokenizer = list(prompt_token_ids[-NUM_END_TOKENS:]), detokenizer.skip_special_tokens, detokenizer.tokenizer
    text = tokenizer.decode(end, skip_special_tokens=skip)
    # Special tokens that are skipped do not end a row of bytes.
    ends_rows = (
        not _is_byte(tokenizer.id_to_token(token_id) or "") and tokenizer.decode([token_id], skip_special_tokens=skip)
        for token_id in end
    )
    if text.strip() and _INCOMPLETE not in text and any(ends_rows):
        detokenizer.stream = type(detokenizer.stream)(ids=end, skip_special_tokens=skip)
