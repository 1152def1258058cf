"""This module lists what vLLM `VERSION` changed of the names in `vllm_names.py`; `tables.py` puts both together."""

VERSION = "0.33.0"

MOVED = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}
"""Modules that have another name."""

CALLED = {"vllm.v1.core.kv_cache_manager": "KVCacheManager.get_computed_blocks(self, request, max_cache_hit_length=)"}
"""Rows in place of those with the same name."""

ADDED = {
    # Last fields of structs.
    "EngineCoreOutput": "error",
    "PoolingParams": "late_chunking_params",
    # More names in lists.
    "LEFT_OUT": "pause_generation_async abort_external_elastic_ep get_external_elastic_ep_status",
    "ASKED_OF_THE_EXECUTOR": "get_simple_cpu_offload_num_blocks",
    "ENGINE_ONLY": "sleep_mode_backend",
}
"""Struct, or list of `vllm_names.py` -> what it has more."""

GONE = {"LEFT_OUT": "pause_scheduler_async"}
"""List of `vllm_names.py` -> what it has no more."""
