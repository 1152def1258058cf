"""This module gives vLLM's detokenizer of an answer only the end of a long prompt, which is enough and cheaper.

The text of an answer's first token may depend on the tokens before it, so vLLM gives the whole prompt to the tokenizer's `DecodeStream`.
At the first token, the stream decodes the whole prompt twice, in the event loop: 0.2 ms for 1,000 tokens, 25 ms for 100,000. From the
second token on, the stream looks back no further than to its last text. So the end of the prompt is enough for the first token, too.
vLLM still makes its own first stream, which copies the ids of the whole prompt.
"""

import re
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

MAX_WHOLE_TOKENS = 256
"""A prompt of at most so many tokens is left whole: decoding it twice takes some 0.05 ms."""
NUM_END_TOKENS = 64
_INCOMPLETE = "\ufffd"
_is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
"""Matches a token that stands for a byte. A decoder with such tokens decodes a row of them as a whole, or not at all."""


def begin_at_the_end(detokenizer: Any, prompt_token_ids: Sequence[int] | None) -> None:
    """Let ``detokenizer``, which has seen no token yet, begin with the last `NUM_END_TOKENS` of the prompt if that gives the same text.

    The prompt stays whole if its end has no text (special tokens, images), or a part of a character, or only bytes: the text of these
    depends on the tokens before them.
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
