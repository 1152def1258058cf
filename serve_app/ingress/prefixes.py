"""From an engine request to what routing knows of its prompt: chained hashes of token ids, and the client's session.

The hashes need to be the same in all ingresses, and nowhere else: no engine sees them. Python's own hash of a tuple of integers is, from
one process to the next, and is ten times as fast as a digest of each block. Who makes two prompts collide gains a cache miss.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from serve_app.core.prefix_index import NO_PREFIX, Prefix, tokens_at

MAX_POINTS = 4096
"""Of one prompt: 4 million tokens in blocks of 16."""


def prefix_of(request: Any, cache_config: Any) -> Prefix:
    """Return the prefix of vLLM's ``EngineCoreRequest``; prompts share cached blocks only with equal adapter, salt and media.

    ``cache_config`` is vLLM's: where it has no prefix cache, the session is all that there is to go by.
    """
    block_size = cache_config.block_size  # None before the first replica told it
    session = None if request.session_id is None else _number("session", request.session_id)
    ids = request.prompt_token_ids
    if not ids or request.prompt_embeds is not None or not (cache_config.enable_prefix_caching and block_size):
        return NO_PREFIX if session is None else Prefix(session=session)
    lora = request.lora_request
    root = 0
    if lora is not None or request.cache_salt is not None:
        root = _number("root", None if lora is None else (lora.lora_name, lora.lora_path), request.cache_salt)
    media = ((f.mm_position.offset, _number("media", f.identifier)) for f in request.mm_features or ())
    return Prefix(hash_points(ids, block_size, root, media), block_size, session)


def hash_points(ids: Sequence[int], block_size: int, root: int = 0, media: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Return a hash of the prompt up to each of its points.

    Args:
        ids: Token ids of the prompt.
        root: Tells prompts with equal tokens apart that share nothing.
        media: Position of the first token and identity of each image, sound or video.
    """
    marks = sorted(media)
    hashes: list[int] = []
    start, hashed = 0, root
    for end in _ends(block_size)[: bisect_left(_ends(block_size), len(ids) + 1)]:
        hashed = hash((hashed, *ids[start:end]))
        while marks and marks[0][0] < end:
            hashed = hash((hashed, *marks.pop(0)))
        hashes.append(hashed)
        start = end
    return hashes


@cache
def _ends(block_size: int) -> list[int]:
    return [tokens_at(point, block_size) for point in range(MAX_POINTS)]


def _number(*parts: object) -> int:
    """Return the same number for the same words in every process, which Python's hash of a text is not."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).digest())
