"""Token ids of texts that come again: system prompts, and the turns of a conversation that each request sends anew.

A tokenizer looks for its special tokens first, and makes ids of the text between two of them without a look at the rest. So a
prompt may be cut before each special token, and each part have its ids by itself. Chat templates put special tokens around every message.
Tokenization costs 1 us of CPU a token; looking a part up costs 1 us for some 2,000 characters.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

MAX_CHARS = 4 << 20
"""Characters of all parts that are remembered: at most 4 bytes each for the text, and as much for ids."""
LEAST_CHARS = 128
"""Of a part, the last one apart. A shorter one is tokenized as fast as it is looked up, and many special tokens make few parts."""
MOST_SHARE = 16
"""A part of more than ``MAX_CHARS`` by this is not remembered: it would push too many others out."""

Encode = Callable[[Sequence[str]], Sequence[Any]]
"""Texts to the tokenizer's encodings, without the special tokens that a model wants around a text."""


class TokenCache:
    """Ids by part, the least recently used ones forgotten first. For several threads.

    Args:
        encode: The tokenizer's.
        special_tokens: All before which a text may be cut, at least one.
    """

    def __init__(self, encode: Encode, special_tokens: Sequence[str]) -> None:
        self._encode = encode
        longest_first = sorted(special_tokens, key=len, reverse=True)  # as the tokenizer looks for them
        self._find = re.compile("|".join(map(re.escape, longest_first))).finditer
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of the text; raises what ``encode`` raises."""
        parts = self._parts(text)
        with self._lock:
            known = [self._known(part) for part in parts]
        missing = [part for part, ids in zip(parts, known, strict=True) if ids is None]
        made = iter([array("I", encoding.ids) for encoding in self._encode(missing)] if missing else ())
        of_all = [next(made) if ids is None else ids for ids in known]
        with self._lock:
            for part, ids in zip(parts, of_all, strict=True):
                self._remember(part, ids)
        found: list[int] = []
        for ids in of_all:
            found += ids
        return found

    def _parts(self, text: str) -> list[str]:
        cuts = [0]
        for found in self._find(text):
            if found.start() >= cuts[-1] + LEAST_CHARS:
                cuts.append(found.start())
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])]

    def _known(self, part: str) -> "array[int] | None":
        if (ids := self._ids.get(part)) is not None:
            self._ids.move_to_end(part)
        return ids

    def _remember(self, part: str, ids: "array[int]") -> None:
        if not LEAST_CHARS <= len(part) <= MAX_CHARS // MOST_SHARE or part in self._ids:
            return
        self._ids[part] = ids
        self._num_chars += len(part)
        while self._num_chars > MAX_CHARS:
            forgotten, _ = self._ids.popitem(last=False)
            self._num_chars -= len(forgotten)


def special_tokens_of(backend: Any) -> list[str]:
    """Return the tokens before which a text may be cut for this tokenizer of the library `tokenizers`; none where it may not be.

    A token that takes blanks around it, or counts only as a word of its own, looks beyond the text between tokens. One that is looked for
    in the normalized text is found within its part. If special tokens are no more than their characters, there is nothing to cut at.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if backend.encode_special_tokens or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return []
    return [token.content for token in added if not token.normalized and token.content]
