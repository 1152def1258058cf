"""This module translates the configuration of a model to vLLM's argument names, for the engine core and for the front end.

Plain dictionaries in and out; nothing here imports vLLM.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelSettings

SIMULATED_EXECUTOR = "serve_app.simulated.executor.SimulatedExecutor"
NIXL_WORKER = "serve_app.replica.nixl_worker.NixlWorker"
SIMULATED_CONNECTOR = {"kv_connector": "SimulatedConnector", "kv_connector_module_path": "serve_app.simulated.connector"}
BATCH_STEP_SHARE = "serve_app_batch_step_share"
"""Key of `ModelSettings.batch_step_share` in vLLM's ``additional_config``."""
ITL_TARGET_S = "serve_app_itl_target_s"
"""Key of the ITL target of a model with `ModelSettings.keep_itl`."""

KV_LEASE_S = 30
"""Seconds for which an engine keeps the KV of a request that it handed over."""
KV_LEASE = "kv_lease_duration"
"""vLLM's key of them."""
_HOST_BYTES = "cpu_bytes_to_use"
"""vLLM's key of the bytes of KV that the host keeps."""

_FRONTEND_ARGS = frozenset(
    {
        "allow_deprecated_quantization",
        "allowed_local_media_path",
        "allowed_media_domains",
        "code_revision",
        "config_format",
        "convert",
        "disable_log_stats",
        "disable_sliding_window",
        "dtype",
        "enable_lora",
        "enable_mm_embeds",
        "enable_prefix_caching",
        "enable_prompt_embeds",
        "enable_trace_replay",
        "generation_config",
        "hf_config_path",
        "hf_overrides",
        "hf_token",
        "interleave_mm_strings",
        "io_processor_plugin",
        "language_model_only",
        "limit_mm_per_prompt",
        "logits_processors",
        "logprobs_mode",
        "max_cpu_loras",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_only",
        "mm_hasher_algorithm",
        "mm_processor_kwargs",
        "model_class_overrides",
        "model_impl",
        "override_generation_config",
        "pooler_config",
        "reasoning_config",
        "reasoning_parser",
        "renderer_num_workers",
        "return_sampling_mask",
        "revision",
        "runner",
        "seed",
        "skip_mm_profiling",
        "skip_tokenizer_init",
        "stream_interval",
        "structured_outputs_config",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "trust_remote_code",
        "video_pruning_method",
        "video_pruning_rate",
    }
)
"""Engine arguments that the front end needs, too: tokenizing, templates, media, validation. The others concern a device, which it lacks."""


_MAX_ADAPTERS_IN_A_BATCH = 4  # each takes memory on the device, as much as an adapter of the greatest rank


@dataclass(frozen=True)
class NodeOfEngine:
    """The place of one node in an engine over several nodes. The engine core and the first workers are on the node of rank 0."""

    rank: int
    address: str
    """This node's address, at which its processes listen for those of the others."""
    first_address: str
    """The address of the node of rank 0."""
    first_port: int
    """The port at which the workers of all nodes find each other on the node of rank 0."""

    def args(self, num_nodes: int) -> dict[str, Any]:
        """Return the arguments of vLLM's ``AsyncEngineArgs`` for the engine's part on this node."""
        return {
            "nnodes": num_nodes,
            "node_rank": self.rank,
            "master_addr": self.first_address,
            "master_port": self.first_port,
            "distributed_executor_backend": "mp",
        }

    def environment(self) -> dict[str, str]:
        """Return the environment by which vLLM's processes on this node name their address to those on others."""
        return {"VLLM_HOST_IP": self.address}


def engine_core_args(model: ModelSettings, model_path: str, node: NodeOfEngine | None = None) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``AsyncEngineArgs`` for the engine core of ``model``.

    Args:
        node: The node whose part of the engine is to start; None for an engine on one node.
    """
    args: dict[str, Any] = {**_shared_args(model, model_path), **model.engine_args}
    args["tensor_parallel_size"] = model.gpus_per_replica // model.stages() if model.device == "cuda" else 1
    if node is not None:
        args.update(node.args(model.nodes))
    if model.device == "cpu":
        # With bfloat16 the numbers depend on the batch, so that a resumed greedy stream could differ from an undisturbed one.
        args.setdefault("dtype", "float32")
        args.setdefault("enforce_eager", True)
        if model.simulated is None:
            args["kv_cache_memory_bytes"] = int(model.kv_cache_gib * 2**30)
    if model.sleep is not None and model.simulated is None:
        args["enable_sleep_mode"] = True
    if (connector := _kv_connector(model)) is not None:
        args["kv_transfer_config"] = connector
    if model.needs_nixl() and model.device == "cpu":
        args.setdefault("worker_extension_cls", NIXL_WORKER)
    ours: dict[str, Any] = {}
    if model.adapters:
        ours["serve_app_adapters"] = [
            {"name": name, "number": adapter.number(name), **adapter.model_dump(mode="json")}
            for name, adapter in model.adapters.items()
        ]
    if model.yields_to_chats():
        ours[BATCH_STEP_SHARE] = model.batch_step_share
    if model.keep_itl:
        ours[ITL_TARGET_S] = model.replicas.itl_slo_s
    if model.simulated is not None:
        args["distributed_executor_backend"] = SIMULATED_EXECUTOR
        ours["simulated"] = model.simulated.model_dump(mode="json")
    if ours:
        args["additional_config"] = {**args.get("additional_config", {}), **ours}
    return args


def moves_kv(connector: Any) -> bool:
    """Return whether other engines read the KV of an engine with this ``KVTransferConfig``: only `kv.transfer` sets a lease."""
    return connector is not None and connector.get_from_extra_config(KV_LEASE, None) is not None


def offloaded_bytes(connector: Any) -> int:
    """Return the bytes of KV that the host keeps for an engine with this ``KVTransferConfig``."""
    if connector is None:
        return 0
    extra: dict[str, Any] = connector.kv_connector_extra_config
    parts = [extra, *(part["kv_connector_extra_config"] for part in extra.get("connectors", ()))]
    return sum(int(part.get(_HOST_BYTES, 0)) for part in parts)


def _kv_connector(model: ModelSettings) -> dict[str, Any] | None:
    """Return vLLM's ``kv_transfer_config`` of an engine that starts now; None if its KV stays in its device's memory."""
    parts = [*(_moving(model),) * model.kv.is_on, *(_offloading(model),) * model.kv.is_offloaded]
    if not parts:
        return None
    both: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    # vLLM asks the first connector first: a request that was handed over reads its KV where it was.
    both["kv_connector_extra_config"] = {"connectors": parts, KV_LEASE: KV_LEASE_S}
    # Other engines remember the memory of an engine by its id.
    return {**(both if len(parts) > 1 else parts[0]), "kv_load_failure_policy": "recompute", "engine_id": uuid.uuid4().hex}


def _moving(model: ModelSettings) -> dict[str, Any]:
    return {
        **({"kv_connector": "NixlConnector"} if model.simulated is None else SIMULATED_CONNECTOR),
        "kv_role": "kv_both",
        "kv_buffer_device": model.device,
        "kv_connector_extra_config": {KV_LEASE: KV_LEASE_S, "num_threads": 1},
    }


def _offloading(model: ModelSettings) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {_HOST_BYTES: model.kv.offload_bytes()},
    }


NO_DOMAIN = "none: models.NAME.media.domains is empty"
"""The only allowed domain of a model without any. It is no host's name, and vLLM shows it in its refusal."""
PRIVATE_ADDRESSES = "also with private addresses"
"""Stands among the allowed domains where they may have private addresses (`ingress/front_end/media.py`)."""


def frontend_engine_args(model: ModelSettings, model_path: str) -> dict[str, Any]:
    """Return the keyword arguments for the front end's own view of ``model`` on a machine without its device."""
    known = {k: v for k, v in model.engine_args.items() if k in _FRONTEND_ARGS}
    args: dict[str, Any] = {**_shared_args(model, model_path), **known}
    if model.device == "cpu":
        args.setdefault("dtype", "float32")
    # vLLM takes no domain for all of them.
    private = [PRIVATE_ADDRESSES] if model.media.private_addresses else []
    args["allowed_media_domains"] = [*(model.media.domains or (NO_DOMAIN,)), *private]
    args["enforce_eager"] = True
    # Any executor but vLLM's own, which would look for a device; no engine is started here.
    args["distributed_executor_backend"] = SIMULATED_EXECUTOR
    return args


def _shared_args(model: ModelSettings, model_path: str) -> dict[str, Any]:
    return {
        "model": model_path,
        "served_model_name": [model.name],
        # The default cache for media assumes one front end with one engine; here there are many of both.
        "mm_processor_cache_gb": 0,
        **adapter_args(model),
    }


def adapter_args(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments for LoRA. By vLLM's defaults a batch has only one adapter, and others are read from the disk repeatedly."""
    if not (number := len(model.adapters)):
        return {}
    if model.device == "cpu" and model.simulated is None:
        # vLLM 0.32 on a CPU computes a request without an adapter with the adapter in the last place. So there is one place more than
        # adapters, and the last place stays empty.
        max_loras = number + 1
    else:
        max_loras = int(str(model.engine_args.get("max_loras", min(number, _MAX_ADAPTERS_IN_A_BATCH))))
    return {"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": max(number, max_loras)}


def engine_environment(model: ModelSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the engine core's process."""
    env = {**inherited, "VLLM_CONFIGURE_LOGGING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if model.device == "cpu":
        env["VLLM_TARGET_DEVICE"] = "cpu"  # as in INGRESS_ENVIRONMENT
        # One thread per engine: with more, replicas on one machine take the cores from each other.
        env["OMP_NUM_THREADS"] = "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default, vLLM binds every replica to the same core
        if model.engine_args.get("enforce_eager", True):
            # Otherwise the first request with log probabilities compiles a helper for a minute; without a C++ compiler it ends the engine.
            env["TORCHDYNAMO_DISABLE"] = "1"
        if model.simulated is None:
            env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # in whole GiB, and vLLM would prefer it to kv_cache_memory_bytes
        else:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"  # the profile gives the size of the cache; without this variable vLLM warns
    else:
        env.pop("VLLM_TARGET_DEVICE", None)
        # As `vllm serve` does. Forked workers would inherit the pipe to the supervisor and keep it open after the engine core's death. The
        # supervisor would then not notice the death while a worker hangs.
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if model.needs_nixl():
        env.update(model.kv.environment())
        env.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does where NIXL is not imported before its connector
        if model.device == "cpu":
            env.setdefault("UCX_TLS", "tcp,sm,self")  # UCX would look for devices that the machine may lack
    return {**env, **model.env}


PROCESS_ENVIRONMENT = {
    # vLLM's own logging set-up calls dictConfig, after which a Serve controller that restarts replaces every replica.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment of every process that Ray Serve starts for us: ingresses and supervisors of engine cores."""

INGRESS_ENVIRONMENT = {
    **PROCESS_ENVIRONMENT,
    # vLLM's CUDA build makes no configuration at all on a machine without a GPU, and takes GPUs into account on a machine with them. vLLM's
    # CPU build ignores this variable.
    "VLLM_TARGET_DEVICE": "cpu",
    # A redirect would lead past the domains that a model's `media` allows.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # The front end has no KV cache; without this variable vLLM warns about the size of a KV cache.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment of the ingresses, whose front ends compute nothing on any device."""
