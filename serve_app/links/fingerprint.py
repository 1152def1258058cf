"""The fingerprint covers what must be equal on both ends of a link for token ids to mean the same: model configuration and tokenizer.

Ingress and replica run different images on different devices, so paths, library versions and all that depends on the device are left out.
The maximum length is left out, too: a replica may cut it to what its memory holds, and reports it among its capabilities.
"""

import hashlib
import json
from typing import Any

_NOT_PART_OF_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


def model_fingerprint(model_config: Any) -> str:
    """Return 16 hex digits for a vLLM ``ModelConfig``; costs one tokenizer load (about 0.1 s) and one read of ``config.json``.

    The configuration is read from the checkpoint anew, because ``model_config.hf_config`` differs between ingress and replica. Engine
    arguments change it (``disable_sliding_window``). At the replica, loading some models changes it, too, and so do the weights that are
    found (``lm_head`` where the embeddings are tied).
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    config = _config_of(model_config)
    for key in _NOT_PART_OF_THE_MODEL:
        config.pop(key, None)
    vocab: dict[str, int] = {}
    if not model_config.skip_tokenizer_init:
        vocab = cached_tokenizer_from_config(model_config).get_vocab()
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(json.dumps(sorted(vocab.items(), key=lambda item: item[1])).encode())
    return digest.hexdigest()[:16]


def _config_of(model_config: Any) -> dict[str, Any]:
    """Return the checkpoint's configuration as vLLM's ``ModelConfig`` first reads it, and the ``hf_overrides`` beside it."""
    from vllm.transformers_utils.config import get_config

    overrides = model_config.hf_overrides
    config = get_config(
        model_config.hf_config_path or model_config.model,
        model_config.trust_remote_code,
        model_config.revision,
        model_config.code_revision,
        model_config.config_format,
        hf_overrides_kw={key: value for key, value in overrides.items() if not isinstance(value, dict)},
        token=model_config.hf_token,
    )
    return {**config.to_dict(), "hf_overrides": overrides}


def public_version(version: str) -> str:
    """Return the version without its local part: 0.32.0+cpu and 0.32.0+cu129 are compatible."""
    return version.partition("+")[0]
