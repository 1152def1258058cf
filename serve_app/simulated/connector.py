"""`SimulatedConnector` moves KV between simulated engines: no bytes, only the time that they would take.

To the scheduler it is what vLLM's NIXL connector is when a target pulls KV: a request waits for a read that goes on beside the steps, with
the same ``kv_transfer_params``, and the source keeps the blocks until they are read or the lease ends. So everything that hands requests
over is used as it is. The worker's half is `KvTransfers`, in the executor.

The tokens of a simulated model are a hash of the ids, whatever its KV: a right text says nothing about a read.
"""

from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from serve_app.simulated.kv_transfers import KvTransfers, Read

_ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""Requests that ended by themselves, or that were handed over."""


@dataclass(frozen=True)
class SimulatedHandshake(KVConnectorHandshakeMetadata):
    """Says which engines can read each other's KV."""

    compatibility_hash: str


class NewReads(KVConnectorMetadata):
    """The reads that a step begins."""

    def __init__(self, reads: list[Read]) -> None:
        self.reads = reads


class SimulatedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half. The worker's methods are called by no one: the simulated executor has no workers."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer: KVTransferConfig = vllm_config.kv_transfer_config
        self.engine_id = str(transfer.engine_id)
        self.lease_s = float(transfer.get_from_extra_config("kv_lease_duration", 30))
        self._transfers: KvTransfers | None = None
        self._new: dict[str, Read] = {}

    def bind(self, transfers: KvTransfers) -> None:
        """Set the worker's half, before the first request."""
        self._transfers = transfers

    # The target.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of the prompt are read beside the steps, after those that this engine has in its prefix cache."""
        if not _reads(request):
            return 0, False
        count = len(request.prompt_token_ids or ()) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if _reads(request):
            self._begin(request, blocks.get_unhashed_block_ids() if num_external_tokens else ())

    def _begin(self, request: Any, block_ids: Any) -> None:
        """Begin the request's only read with the next step; without blocks the source only frees its own."""
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False
        self._new[request.request_id] = Read(
            request.request_id,
            tuple(block_ids),
            params["remote_host"],
            params["remote_port"],
            params["remote_engine_id"],
            params["remote_request_id"],
        )

    def build_connector_meta(self, scheduler_output: Any) -> NewReads:
        new, self._new = self._new, {}
        return NewReads(list(new.values()))

    # The source.

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request's blocks stay, and how another engine reads them."""
        if _reads(request):  # it ended before its first step
            self._begin(request, ())
            return False, None
        if not (request.kv_transfer_params or {}).get("do_remote_decode") or request.status not in _ENDED or not block_ids:
            return False, None
        assert self._transfers is not None
        # Now, not with the next step: the target may ask before that.
        self._transfers.keep(request.request_id, len(block_ids))
        parallel = self._vllm_config.parallel_config
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": (block_ids,),
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            "remote_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
            "tp_size": parallel.tensor_parallel_size,
            "remote_num_tokens": request.num_computed_tokens,
        }

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # The worker's methods, which have no default.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


def _reads(request: Any) -> bool:
    """Return whether the request comes with KV of another engine, and its read has not begun."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
