"""This module notices that Ray drains a node on which an engine has a shard. Serve looks only at the node of the replica's actor."""

import asyncio
import logging
from collections.abc import Callable, Collection

import ray
from ray._private import worker
from ray.util.placement_group import placement_group_table

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_ANSWER_S = 5.0


def nodes_of_shards() -> set[str]:
    """Return Ray's ids of the nodes of this actor's placement group, without its own. Asks the GCS."""
    table = placement_group_table(ray.util.get_current_placement_group())
    return set(table["bundles_to_node_id"].values()) - {ray.get_runtime_context().get_node_id()}


def draining_nodes() -> Collection[str]:
    """Return Ray's ids of the nodes that drain. Asks the GCS."""
    return set(worker.global_worker.gcs_client.get_draining_nodes(timeout=_ANSWER_S))


async def until_one_drains(
    nodes: Callable[[], Collection[str]] = nodes_of_shards,
    draining: Callable[[], Collection[str]] = draining_nodes,
    *,
    every_s: float = LOOK_EVERY_S,
) -> str:
    """Wait until one of the nodes drains; return its id. A GCS that does not answer is asked again, and logged once."""
    ours, unheard = set[str](), False
    while True:
        try:
            ours = ours or set(await asyncio.to_thread(nodes))
            if found := sorted(ours & set(await asyncio.to_thread(draining))):
                return found[0]
            unheard = False
        except Exception as exc:  # Ray raises several kinds while its head is away
            if not unheard:
                logger.warning("whether a node of this engine drains is unknown: %s", exc)
            unheard = True
        await asyncio.sleep(every_s)
