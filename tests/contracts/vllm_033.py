"""This module lists what vLLM `VERSION` changed of the names in `vllm_names.py`; `tables.py` puts both together."""

VERSION = "0.33.0"

MOVED = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}
"""Modules that have another name."""

CALLED: dict[str, str] = {}
"""Rows in place of those with the same name."""

ADDED = {
    # Last fields of structs.
    "EngineCoreOutput": "error",
    "PoolingParams": "late_chunking_params",
    # More names in lists.
    "LEFT_OUT": "pause_generation_async abort_external_elastic_ep get_external_elastic_ep_status",
}
"""Struct, or list of `vllm_names.py` -> what it has more."""
