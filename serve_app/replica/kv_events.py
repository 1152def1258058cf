"""This module turns vLLM's KV events into reports for `CachedPoints`, where an engine keeps KV in several tiers.

vLLM's scheduler gives its events to a publisher after each step. `KvReporter` takes the place of the publisher and puts reports among the
engine's outputs, from where they go over the pipe: no port, and no thread more. Events of the host's memory name blocks without tokens;
those of the device have named them before, with tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, NullEventPublisher
from vllm.v1.kv_cache_interface import FullAttentionSpec

from serve_app.core.cached_points import BlocksRemoved, BlocksStored, CacheCleared, Report
from serve_app.core.prompt_hashes import root_of, stable_hash
from serve_app.replica import pipe

MAX_REPORTED_TOKENS = 1 << 22
"""The most tokens in all tiers together of which a replica reports the blocks. In blocks of 16 they cost its supervisor 160 MB."""


def events_config() -> Any:
    """Return vLLM's configuration of an engine whose scheduler and connectors collect events. Without a reporter, they are dropped."""
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def is_reportable(scheduler: Any, host_tokens: int) -> bool:
    """Return whether the engine has several tiers, of blocks that correspond to the points of prompts.

    Args:
        host_tokens: Tokens whose KV the host keeps; 0 for none.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    cache, parallel = scheduler.cache_config, scheduler.vllm_config.parallel_config
    return (
        0 < host_tokens <= MAX_REPORTED_TOKENS - (cache.num_gpu_blocks or 0) * cache.block_size
        and len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and groups[0].kv_cache_spec.block_size == cache.block_size
        and parallel.decode_context_parallel_size == 1
    )


class KvReporter(NullEventPublisher):
    """The publisher of a scheduler.

    Args:
        put: Takes the reports of a step.
        adapters: Paths of the LoRA adapters by name.
    """

    def __init__(self, put: Callable[[pipe.CacheChanged], None], adapters: Mapping[str, str]) -> None:
        super().__init__()
        self._put = put
        self._adapters = adapters

    def publish(self, events: KVEventBatch) -> None:
        if reports := list(reports_of(events.events, self._adapters)):
            self._put(pipe.CacheChanged(reports))


def reports_of(events: Iterable[Any], adapters: Mapping[str, str]) -> Iterable[Report]:
    """Yield a report for each of vLLM's events. ``adapters``: paths of the LoRA adapters by name."""
    for event in events:
        if isinstance(event, BlockStored):
            yield _stored(event, adapters)
        elif isinstance(event, BlockRemoved):
            yield BlocksRemoved(event.medium or "", event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            yield CacheCleared()


def _stored(event: BlockStored, adapters: Mapping[str, str]) -> BlocksStored:
    """Return the report of stored blocks, with what `prefix_of` takes from the requests of the same prompt.

    The extra keys of a block are the adapter's name, identity and place of each medium, in the first block the cache salt, and a digest of
    embeddings that a client sent in place of tokens. Such prompts have no points: the digest keeps them apart from others.
    """
    adapter = None if event.lora_name is None else (event.lora_name, adapters.get(event.lora_name, ""))
    salt, marks = None, list[tuple[int, int, int]]()
    for block, keys in enumerate(event.extra_keys or ()):
        for key in (keys or ())[event.lora_name is not None :]:
            if isinstance(key, tuple):
                identifier, place = key
                if place >= 0:  # else it began in an earlier block
                    marks.append((block, place, stable_hash("media", identifier)))
            elif isinstance(key, str):
                salt = key
            else:
                marks.append((block, 0, stable_hash("embeddings", key)))
    root = 0 if event.parent_block_hash is not None else root_of(adapter, salt)
    return BlocksStored(event.medium or "", event.block_hashes, event.parent_block_hash, event.token_ids, root, marks)
