"""This table names the variables of the environment that have no effect here, with the reason.

vLLM reads 300 variables, and Kubernetes sets names like theirs for a Service that is called `vllm`. Those below would lock or open some
routes and not others, keep an engine from starting, or differ between the processes of a fleet. A process that inherits one drops it
(`host/environment.py`), and `models.NAME.env` refuses it. All others pass.
"""

from collections.abc import Mapping

_BY_RAY = "Ray places and connects engines"
_BY_LIMITS = "every process of a fleet must have the same limit"
REMOVED: Mapping[str, str] = {
    "VLLM_API_KEY": "it would lock some routes and not others; set ingress.api_keys_file",
    "VLLM_PORT": "Kubernetes sets it to a URL for a Service named vllm, with which no engine starts",
    "VLLM_DP_RANK": _BY_RAY,
    "VLLM_DP_RANK_LOCAL": _BY_RAY,
    "VLLM_DP_SIZE": _BY_RAY,
    "VLLM_DP_MASTER_IP": _BY_RAY,
    "VLLM_DP_MASTER_PORT": _BY_RAY,
    "VLLM_SERVER_DEV_MODE": "the routes of vLLM's developers are not served",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are in the configuration",
    "VLLM_ENABLE_RESPONSES_API_STORE": "the next request may reach another ingress, which has not stored the response",
    "VLLM_USE_RUST_FRONTEND": "the ingress is vLLM's front end in Python",
    "VLLM_LOGGING_CONFIG_PATH": "Ray Serve has the logs; a changed set-up makes its controller replace every replica",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "pickle from the wire would let a peer run code",
    "VLLM_V1_USE_OUTLINES_CACHE": "clients' schemas would fill the disk",
    "VLLM_MAX_NUM_BAD_WORDS": _BY_LIMITS,
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": _BY_LIMITS,
}
"""Variable -> why it is removed."""
