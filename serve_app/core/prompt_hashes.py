"""The hashes of a prompt at its points (`prefix_index.py`): an ingress has them of its prompts, a replica of the blocks that it has cached.

Pure. They must be equal in all processes. Python's own hash of a tuple of integers is, and ten times as fast as a digest of each block. A
client that makes two prompts collide gains only a cache miss.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from serve_app.core.prefix_index import tokens_at

MAX_POINTS = 4096
"""The most points of one prompt that are hashed: the 4096th is after 4 million tokens in blocks of 16."""

Mark = tuple[int, int]
"""Position of the first token, counted from the prompt's beginning, and identity (`stable_hash`) of an image, sound or video."""


def hash_points(ids: Sequence[int], block_size: int, root: int = 0, media: Iterable[Mark] = ()) -> list[int]:
    """Return for each point of the prompt a hash of the prompt up to that point.

    Args:
        ids: Token ids of the prompt.
        root: Differs between prompts that share no blocks although their tokens are equal (`root_of`).
    """
    marks = sorted(media)
    hashes: list[int] = []
    start, hashed = 0, root
    for end in _ends(block_size)[: bisect_left(_ends(block_size), len(ids) + 1)]:
        here = []
        while marks and marks[0][0] < end:
            here.append(marks.pop(0))
        hashed = next_hash(hashed, ids[start:end], here)
        hashes.append(hashed)
        start = end
    return hashes


def next_hash(hashed: int, ids: Iterable[int], marks: Iterable[Mark] = ()) -> int:
    """Return the hash of a point from that of the point before it, with the tokens and media between the two."""
    hashed = hash((hashed, *ids))
    for mark in marks:
        hashed = hash((hashed, *mark))
    return hashed


def root_of(adapter: tuple[str, str] | None, salt: str | None) -> int:
    """Return `hash_points`'s root of prompts with this LoRA adapter, by name and path, and this cache salt."""
    return 0 if adapter is None and salt is None else stable_hash("root", adapter, salt)


def stable_hash(*parts: object) -> int:
    """Return a number that is equal for equal parts in every process, which Python's hash of a text is not."""
    return int.from_bytes(blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).digest())


@functools.cache
def _ends(block_size: int) -> list[int]:
    return [tokens_at(point, block_size) for point in range(MAX_POINTS)]
