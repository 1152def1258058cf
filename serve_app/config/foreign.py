"""This module maps keys of other systems to ours, for the error about an unknown key.

`FOREIGN` gives for names of Ray Serve, vLLM, Kubernetes, LiteLLM and Hugging Face the key to set here, or one sentence. The Helm chart
gets the same table (helm/serve-app/files/rules.yaml, made by tools/chart_schema.py).
"""

import re
from collections.abc import Mapping

TOKEN = "on one machine export HF_TOKEN before serve-app up; the Helm chart takes a Secret: weights.huggingFaceTokenSecret"
_REPLICAS = "for engines set models.NAME.replicas: {min: 1, max: 2}, for ingresses ingress.replicas"
_GPUS = "set models.NAME.gpus_per_replica, the GPUs of one engine and its tensor parallel size"
_GROUPS = (
    "set models.NAME.gpus_per_replica for the GPUs of one engine and nodes for its nodes, models.NAME.replicas for more engines"
)
_NODES = "models.NAME.resources binds replicas to nodes with a custom Ray resource; in the Helm chart set modelPods.nodeSelector"
_PODS = (
    "pods are the Helm chart's: set it in its values, under modelPods, ingressPods or head; for one model config.models.NAME.pods"
)
_IMAGE = "images are the Helm chart's: set image or cudaImage in its values"
_LIMITS = "set engine_args.max_num_seqs for an engine, ingress.max_waiting_requests for the queue"
_MODEL = "set models.NAME.model to the weights; NAME is what requests ask for"
_MODELS = "write models: {NAME: {model: WEIGHTS}}"
_NAME = "the key under models is the name; more names go into models.NAME.aliases"
_ARGUMENTS = "vLLM's arguments are a mapping: models.NAME.engine_args: {max_model_len: 2048}, frontend_args beside it"
_ADAPTERS = "set models.NAME.adapters: {ADAPTER: {path: /FOLDER}}"
_DOWNLOADS = "set models.NAME.model to a folder; on Kubernetes the Helm chart's weights.downloads fetches it"
_ELSEWHERE = "remove it: serve-app starts its engines itself, and forwards to no other service"
_KEYS = "set ingress.tenants_file or ingress.api_keys_file"
_MINUTES = "quotas are a tenant's: set limits.requests_per_minute or tokens_per_minute in ingress.tenants_file"
_MONEY = "quotas count tokens, not money: set limits.tokens_per_day of a tenant in ingress.tenants_file"
_DEADLINES = "set deadlines.total_s of a tenant in ingress.tenants_file; timeouts has the fleet's own"
_RETRIES = "remove it: requests of a lost engine continue at another one by themselves"
_VARIABLES = "set models.NAME.env for engines"

_BY_MEANING: Mapping[str, str] = {
    "num_replicas min_replicas max_replicas initial_replicas replica_count autoscaling_config target_ongoing_requests hpa": _REPLICAS,
    "num_gpus gpus gpu gpu_count num_gpus_per_replica tensor_parallel_size tensor_parallel tp num_shard": _GPUS,
    "pipeline_parallel_size data_parallel_size pp dp placement_group_config placement_group_bundles": _GROUPS,
    "accelerator_type gpu_type": _NODES,
    "node_selector tolerations affinity volumes volume_mounts topology_spread_constraints priority_class_name security_context": _PODS,
    "service_account service_account_name pod_annotations": _PODS,
    "image image_pull_policy image_pull_secrets container_image": _IMAGE,
    "max_ongoing_requests max_queued_requests max_concurrent_requests": _LIMITS,
    "model_loading_config model_source model_id model_path model_name_or_path repo_id": _MODEL,
    "model_list llm_configs applications": _MODELS,
    "served_model_name model_name": _NAME,
    "engine_kwargs vllm_args vllm_config extra_args args command": _ARGUMENTS,
    "ray_actor_options deployment_config": "set num_cpus, gpus_per_replica and replicas under models.NAME",
    "runtime_env env_vars environment": _VARIABLES,
    "lora_modules lora_config loras": _ADAPTERS,
    "bucket_uri downloads weights": _DOWNLOADS,
    "litellm_params litellm_settings router_settings general_settings": _ELSEWHERE,
    "api_base base_url custom_llm_provider": _ELSEWHERE,
    "api_key api_keys master_key": _KEYS,
    "rpm tpm rpm_limit tpm_limit": _MINUTES,
    "max_budget budget_duration": _MONEY,
    "timeout request_timeout request_timeout_s": _DEADLINES,
    "num_retries max_retries fallbacks": _RETRIES,
    "hf_token token huggingface_token": TOKEN,
}
FOREIGN: Mapping[str, str] = {name: meant for names, meant in _BY_MEANING.items() for name in names.split()}
"""Names in snake case -> the sentence."""


def plain_name(key: str) -> str:
    """Return a key in snake case: ``max_model_len`` for ``--max-model-len``, ``node_selector`` for ``nodeSelector``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.lstrip("-")).replace("-", "_").lower()


def foreign_hint(key: str) -> str:
    """Return what another system's name for a key means in this file; "" if it is unknown."""
    return FOREIGN.get(plain_name(key), "")
