"""This module maps keys of other systems to ours, for the error about an unknown key.

`FOREIGN` gives for names of Ray Serve, vLLM, Kubernetes, KServe, LiteLLM and Hugging Face the key to set here, or one sentence. The Helm
chart gets the same table (helm/serve-app/files/rules.yaml, made by tools/chart_schema.py).
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
_IN_VALUES = "pods are the Helm chart's: in its values set"
_PODS = (
    "pods are the Helm chart's: set it in its values, under modelPods, ingressPods or head; for one model config.models.NAME.pods"
)
_PODS_EXTRA = "pods are the Helm chart's: set it in its values, under modelPods.extra or ingressPods.extra"
_PODS_RESOURCES = "set num_cpus and gpus_per_replica; the pod's own are the Helm chart's: modelPods.resources"
_IMAGE = "images are the Helm chart's: set image or cudaImage in its values"
_VOLUME = "the volume of weights is the Helm chart's: set weights in its values"
_LIMITS = "set engine_args.max_num_seqs for an engine, ingress.max_waiting_requests for the queue"
_MODEL = "set models.NAME.model to the weights; NAME is what requests ask for"
MODELS = "write models: {NAME: {model: WEIGHTS}}"
_NAME = "the key under models is the name; more names go into models.NAME.aliases"
_ARGUMENTS = "vLLM's arguments are a mapping: models.NAME.engine_args: {max_model_len: 2048}, frontend_args beside it"
_ADAPTERS = "set models.NAME.adapters: {ADAPTER: {path: /FOLDER}}"
_DOWNLOADS = "set models.NAME.model to a folder; on Kubernetes the Helm chart's weights.downloads fetches it"
_ELSEWHERE = "remove it: serve-app starts its engines itself, and forwards to no other service"
_KEYS = "set ingress.tenants_file or ingress.api_keys_file"
_MINUTES = "quotas are a tenant's: set limits.requests_per_minute or tokens_per_minute in ingress.tenants_file"
_AT_ONCE = "quotas are a tenant's: set limits.max_concurrent in ingress.tenants_file"
_MONEY = "quotas count tokens, not money: set limits.tokens_per_day of a tenant in ingress.tenants_file"
_DEADLINES = "set deadlines.total_s of a tenant in ingress.tenants_file; timeouts has the fleet's own"
_RETRIES = "remove it: requests of a lost engine continue at another one by themselves"
_VARIABLES = "set models.NAME.env for engines"
_HEALTH = (
    "health says when an engine counts as hung, timeouts.engine_start_s how long its start may take; pods get the chart's probes"
)
_SCALING = (
    "remove it: serve-app has its own policy; its goals are models.NAME.replicas.ttft_slo_s, itl_slo_s, headroom and schedule"
)
_DRAIN = "set timeouts.drain_s; the limits of Ray Serve and of the chart's pods follow from it"
_ROUTING = "set models.NAME.routing.by: prefix or load"
_LISTENER = (
    "remove it: Ray Serve's proxy is not used; the ingress listens itself, at ingress.host and ingress.port, without a prefix"
)
_APPLICATION = "remove it: Ray Serve gets the application from serve-app, and this file holds all settings"
_UPDATES = "set models.NAME.replicas.surge to 1 or 0: whether a new replica is ready before an old one stops"
_TLS = "TLS of clients ends at a load balancer or proxy, with the Helm chart at ingress.tls or httpRoute; protocol.tls is for the links"
_WORKERS = "nodes follow the replicas: set models.NAME.replicas: {min: 1, max: 2}; the Helm chart makes a pod for each"
_MEMORY = "the memory of pods is the Helm chart's modelPods.resources; the KV cache on CPUs has models.NAME.kv_cache_gib"
_OBJECTS = "remove it: serve-app up and the Helm chart set it themselves"
_RECORDS = "set ingress.ledger for a line per request, tracing for traces"
_CHECKPOINT = (
    "remove it: what a model is and how long its context may be comes from its checkpoint, and from models.NAME.engine_args"
)
_CACHES = "remove it: answers are not kept; each engine keeps the KV of prompts that begin alike by itself"
_KV_IN_MEMORY = "set models.NAME.kv.offload_gib for a second KV cache in the node's memory"

_BY_MEANING: Mapping[str, str] = {
    "num_replicas min_replicas max_replicas initial_replicas replica_count autoscaling_config target_ongoing_requests hpa": _REPLICAS,
    "scale_target scale_metric keda target_capacity": _REPLICAS,
    "min_workers max_workers worker_group_specs worker_groups": _WORKERS,
    "upscale_delay_s downscale_delay_s downscale_to_zero_delay_s metrics_interval_s look_back_period_s policy": _SCALING,
    "smoothing_factor upscale_smoothing_factor downscale_smoothing_factor upscaling_factor downscaling_factor": _SCALING,
    "aggregation_function autoscaling_policy external_scaler_enabled": _SCALING,
    "num_gpus gpus gpu gpu_count num_gpus_per_replica tensor_parallel_size tensor_parallel tp num_shard": _GPUS,
    "request_gpu limit_gpu": _GPUS,
    "pp": "set models.NAME.engine_args.pipeline_parallel_size",
    "data_parallel_size dp placement_group_config placement_group_bundles": _GROUPS,
    "placement_group_strategy gang_scheduling_config resources_per_bundle": _GROUPS,
    "accelerator_type accelerator_config gpu_type request_gpu_type": _NODES,
    "label_selector placement_group_bundle_label_selector fallback_strategy": _NODES,
    "max_replicas_per_node": "set models.NAME.replicas_per_node; in the Helm chart a pod holds one replica",
    "node_selector tolerations affinity priority_class_name pod_annotations pod_labels": _PODS,
    "labels annotations": f"{_IN_VALUES} podLabels and podAnnotations under modelPods, ingressPods or head",
    "volumes volume_mounts": f"{_IN_VALUES} extraVolumes and extraVolumeMounts under modelPods, ingressPods or head",
    "containers init_containers env_from scheduler_name topology_spread_constraints": _PODS_EXTRA,
    "security_context pod_security_context": f"{_IN_VALUES} podSecurityContext",
    "service_account service_account_name": f"{_IN_VALUES} serviceAccounts",
    "runtime_class_name": f"{_IN_VALUES} modelPods.runtimeClassName",
    "limits requests request_cpu request_memory limit_cpu limit_memory": _PODS_RESOURCES,
    "liveness_probe readiness_probe startup_probe health_check_period_s health_check_timeout_s": _HEALTH,
    "termination_grace_period_seconds graceful_shutdown_timeout_s graceful_shutdown_wait_loop_s": _DRAIN,
    "strategy max_surge max_unavailable max_surge_percent rolling_update_percentage": _UPDATES,
    "image image_pull_policy image_pull_secrets container_image repository": _IMAGE,
    "pvc_storage pvc_access_mode pvc_match_labels storage_class": _VOLUME,
    "max_ongoing_requests max_queued_requests max_concurrent_requests container_concurrency backpressure_config": _LIMITS,
    "model_loading_config model_source model_id model_path model_name_or_path repo_id model_url": _MODEL,
    "model_list llm_configs applications model_spec serving_engine_spec predictor deployments": MODELS,
    "served_model_name model_name model_group_alias": _NAME,
    "engine_kwargs vllm_args vllm_config extra_args args command": _ARGUMENTS,
    "ray_actor_options deployment_config": "set num_cpus, gpus_per_replica and replicas under models.NAME",
    "memory": _MEMORY,
    "object_store_memory": _OBJECTS,
    "runtime_env env_vars environment": _VARIABLES,
    "lora lora_modules lora_config loras": _ADAPTERS,
    "bucket_uri downloads weights storage_uri": _DOWNLOADS,
    "request_router_config request_router_class routing_strategy router_spec routing_logic": _ROUTING,
    "route_prefix root_path root_url http_options grpc_options proxy_location": _LISTENER,
    "keep_alive_timeout_s": "set ingress.keep_alive_s",
    "cors allow_origins cors_allow_origins": "set ingress.cors_origins",
    "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password": _TLS,
    "import_path user_config deployment_actors controller_options llm_engine": _APPLICATION,
    "tracing_config callbacks success_callback failure_callback log_engine_metrics": _RECORDS,
    "litellm_params litellm_settings router_settings general_settings": _ELSEWHERE,
    "api_base base_url custom_llm_provider": _ELSEWHERE,
    "model_info": _CHECKPOINT,
    "task": "set models.NAME.engine_args.runner: pooling for embeddings, scores and classes; without it vLLM goes by the checkpoint",
    "cache cache_params": _CACHES,
    "lmcache_config": _KV_IN_MEMORY,
    "api_key api_keys master_key virtual_keys vllm_api_key": _KEYS,
    "rpm tpm rpm_limit tpm_limit": _MINUTES,
    "max_parallel_requests": _AT_ONCE,
    "max_budget budget_duration input_cost_per_token output_cost_per_token": _MONEY,
    "timeout request_timeout request_timeout_s stream_timeout": _DEADLINES,
    "num_retries max_retries fallbacks cooldown_time allowed_fails": _RETRIES,
    "hf_token token huggingface_token": TOKEN,
}
FOREIGN: Mapping[str, str] = {name: meant for names, meant in _BY_MEANING.items() for name in names.split()}
"""Names in snake case -> the sentence."""


def plain_name(key: str) -> str:
    """Return a key in snake case: ``max_model_len`` for ``--max-model-len``, ``request_gpu_type`` for ``requestGPUType``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key.lstrip("-"))
    return words.replace("-", "_").lower()


def foreign_hint(key: str) -> str:
    """Return what another system's name for a key means in this file; "" if it is unknown."""
    return FOREIGN.get(plain_name(key), "")
