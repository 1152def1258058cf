"""A replica's reports of vLLM's KV events have the points that ingresses compute of the same prompts."""

from typing import Any

from hypothesis import given, settings
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from serve_app.core.cached_points import BlocksRemoved, CacheCleared, CachedPoints
from serve_app.ingress.fleet.intake import prefix_of
from serve_app.replica import pipe
from serve_app.replica.kv_events import reports_of
from tests.ingress.test_prefixes import BLOCK, CACHE, engine_request, prompts


def stored(engine_request: Any, begin: int, end: int) -> BlockStored:
    """Return the event of these blocks of a prompt, as vLLM's block pool makes it."""
    request = Request.from_engine_core_request(engine_request, get_request_block_hasher(BLOCK, sha256))
    hashes = [maybe_convert_block_hash(each) for each in request.block_hashes]
    keys, media = list[Any](), 0
    for number in range(begin, end):
        more, media = generate_block_hash_extra_keys(request, number * BLOCK, (number + 1) * BLOCK, media)
        keys.append(more)
    lora = request.lora_request
    return BlockStored(
        block_hashes=hashes[begin:end],
        parent_block_hash=hashes[begin - 1] if begin else None,
        token_ids=list(request.all_token_ids[begin * BLOCK : end * BLOCK]),
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None if lora is None else lora.name,
        extra_keys=to_event_extra_keys(keys),
        group_idx=0,
    )


@settings(deadline=None)
@given(prompts)
def test_prompts_with_adapters_salts_and_media_have_equal_points_at_both_sides(prompt: Any) -> None:
    init_none_hash(sha256)
    num_blocks = len(prompt.prompt_token_ids) // BLOCK
    events = [stored(prompt, begin, min(num_blocks, begin + 3)) for begin in range(0, num_blocks, 3)]
    lora = prompt.lora_request
    reports = list(reports_of(events, {} if lora is None else {lora.lora_name: lora.lora_path}))
    message = pipe.from_engine_decoder.decode(pipe.encode(pipe.CacheChanged(reports))[4:])
    assert isinstance(message, pipe.CacheChanged)
    cached = CachedPoints(BLOCK)
    for report in message.reports:
        cached.note(report)
    assert list(cached.points) == prefix_of(prompt, CACHE).hashes


def test_embeddings_in_place_of_tokens_make_other_points_than_tokens() -> None:
    init_none_hash(sha256)
    prompt = engine_request([0, 0, 0, 0])
    event = stored(prompt, 0, 2)
    event.extra_keys = [(b"one",), (b"two",)]
    cached = CachedPoints(BLOCK)
    for report in reports_of([event], {}):
        cached.note(report)
    assert len(cached.points) == 2
    assert cached.points.keys().isdisjoint(prefix_of(prompt, CACHE).hashes)


def test_what_is_gone_is_reported_in_order() -> None:
    removed = BlockRemoved(block_hashes=[(1 << 64) - 1], medium="CPU")
    reports = list(reports_of([removed, AllBlocksCleared()], {}))
    assert reports == [BlocksRemoved("CPU", [(1 << 64) - 1]), CacheCleared()]
    assert pipe.from_engine_decoder.decode(pipe.encode(pipe.CacheChanged(reports))[4:]) == pipe.CacheChanged(reports)
