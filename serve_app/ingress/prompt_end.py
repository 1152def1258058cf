"""vLLM's detokenizer of an answer, told the end of the prompt in place of all of it.

The text of an answer's first token may depend on the tokens before it, so vLLM gives the whole prompt to the tokenizer's `DecodeStream`.
When that token comes, the stream makes text of all of it twice, in the event loop: 0.2 ms for 1,000 tokens, 25 ms for 100,000. From the
second token on it looks back no further than to the last text that it gave out; so the end of the prompt is enough for the first one, too.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

MOST_TOKENS = 256
"""Of a prompt that stays whole: some 0.05 ms."""
END_TOKENS = 64
"""A character has at most 4 bytes and hardly more tokens, so the middle of one at the beginning of these is long over at their end."""
_INCOMPLETE = "\ufffd"


def begin_at_the_end(detokenizer: Any, prompt_token_ids: Sequence[int] | None) -> None:
    """Let ``detokenizer``, which has seen no token yet, begin after the last `END_TOKENS` of the prompt, where that makes the same text.

    It may not where these make no text (special tokens, images), or have a part of a character in them: a decoder that puts bytes together
    tells such a part from the bytes before it.
    """
    if prompt_token_ids is None or len(prompt_token_ids) <= MOST_TOKENS or type(detokenizer) is not FastIncrementalDetokenizer:
        return
    skip = detokenizer.skip_special_tokens
    end = list(prompt_token_ids[-END_TOKENS:])
    text = detokenizer.tokenizer.decode(end, skip_special_tokens=skip)
    if text.strip() and _INCOMPLETE not in text:
        detokenizer.stream = DecodeStream(ids=end, skip_special_tokens=skip)
