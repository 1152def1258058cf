"""The token cache remembers the ids of repeated texts: system prompts, and the turns of a conversation that each request sends again.

A tokenizer looks for its special tokens first. The ids of the text between two special tokens do not depend on the rest. So a prompt may
be cut before a special token, and each part be tokenized separately. Chat templates put special tokens around every message. Tokenization
takes 1 us of CPU a token; looking up a part takes 1 us for some 2,000 characters.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

MAX_BYTES = 32 << 20
"""The most memory of the parts in one cache, with their ids. Each model, and each canary, has a cache of its own in each ingress."""
MIN_PART_CHARS = 128
"""The least characters of the part before a cut: a shorter part is tokenized as fast as it is looked up, and a prompt of 10,000 special
tokens would become 10,000 parts."""
MAX_PART_SHARE = 1 / 16
"""The largest share of `MAX_BYTES` for one part. A larger part is not remembered, because it would push out too many others."""

Encode = Callable[[Sequence[str]], Sequence[Any]]
"""Returns the tokenizer's encodings of texts, without the special tokens that a model wants around a text."""


class TokenCache:
    """A cache of ids by part, which forgets the least recently used parts first. Threads may share it.

    Args:
        encode: The tokenizer's function.
        cut_before: Special tokens, as `cuts_of` finds them.
    """

    def __init__(self, encode: Encode, cut_before: Sequence[str]) -> None:
        self._encode = encode
        self._cut_before = cut_before
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def ids_of(self, texts: Sequence[str], space: str = "") -> list[list[int]]:
        """Return the ids of each text. One call of ``encode``, whose exceptions pass, makes the ids of all unknown parts.

        Texts of one ``space`` never find parts of another one, so that the time of an answer tells no tenant what another has sent.
        """
        of_texts = [self._parts(text) for text in texts]
        known: dict[str, array[int]] = {}
        with self._lock:
            for parts in of_texts:
                for part in parts:
                    if (ids := self._ids.get((space, part))) is not None:
                        self._ids.move_to_end((space, part))
                        known[part] = ids
        unknown = list({part: None for parts in of_texts for part in parts if part not in known})
        if unknown:
            made = {part: array("I", encoding.ids) for part, encoding in zip(unknown, self._encode(unknown), strict=True)}
            known |= made
            with self._lock:
                for part, ids in made.items():
                    self._remember(space, part, ids)
        return [_joined([known[part] for part in parts]) for parts in of_texts]

    def _parts(self, text: str) -> list[str]:
        next_of = {token: text.find(token, MIN_PART_CHARS) for token in self._cut_before}
        cuts = [0]
        while cut := min((at for at in next_of.values() if at >= 0), default=0):
            cuts.append(cut)
            for token, at in next_of.items():
                if 0 <= at < cut + MIN_PART_CHARS:
                    next_of[token] = text.find(token, cut + MIN_PART_CHARS)
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])]

    def _remember(self, space: str, part: str, ids: "array[int]") -> None:
        size = _num_bytes(part, ids)
        if len(part) < MIN_PART_CHARS or size > MAX_BYTES * MAX_PART_SHARE or (space, part) in self._ids:
            return
        self._ids[space, part] = ids
        self._num_bytes += size
        while self._num_bytes > MAX_BYTES:
            (_, oldest), its_ids = self._ids.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest, its_ids)


def _joined(parts: Sequence["array[int]"]) -> list[int]:
    joined: list[int] = []
    for ids in parts:
        joined += ids
    return joined


def _num_bytes(part: str, ids: "array[int]") -> int:
    """Return the most memory of a part: text that is not ASCII takes up to 4 bytes a character, and as much for its cached UTF-8."""
    return len(part) * (1 if part.isascii() else 8) + len(ids) * ids.itemsize


def cuts_of(backend: Any, template: str) -> list[str]:
    """Return the special tokens in ``template`` before which a text may be cut for this tokenizer of the library `tokenizers`.

    No cuts are possible if any token absorbs blanks around it, or matches only as a whole word: such a token depends on text beyond the
    cut. Nor are they if the tokenizer treats special tokens as plain characters. A token that is searched in the normalized text is no
    cut, and is found within its part.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if backend.encode_special_tokens or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return []
    found = [token.content for token in added if not token.normalized and token.content]
    # Of overlapping special tokens the tokenizer takes the first, and then the longest: inside of another one, a token is plain text.
    return [token for token in found if token in template and not any(_may_begin_within(token, other) for other in found)]


def _may_begin_within(token: str, other: str) -> bool:
    return any(token.startswith(other[k:]) or other.startswith(token, k) for k in range(1, len(other)))
