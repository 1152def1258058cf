"""What must be equal on both ends of a link for token ids to mean the same: the model's configuration and its tokenizer.

Paths, versions of libraries and anything that depends on the device are left out: ingress and replica may run on different images.
So is the maximum length, which a replica may cut to what its memory holds: it is among its capabilities.
"""

import hashlib
import json
from typing import Any

_NOT_PART_OF_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


def model_fingerprint(model_config: Any) -> str:
    """Return 16 hex digits for a vLLM ``ModelConfig``; costs one tokenizer load (about 0.1 s)."""
    from vllm.tokenizers import cached_tokenizer_from_config

    config = model_config.hf_config.to_dict()
    for key in _NOT_PART_OF_THE_MODEL:
        config.pop(key, None)
    vocab: dict[str, int] = {}
    if not model_config.skip_tokenizer_init:
        vocab = cached_tokenizer_from_config(model_config).get_vocab()
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(json.dumps(sorted(vocab.items(), key=lambda item: item[1])).encode())
    return digest.hexdigest()[:16]


def public_version(version: str) -> str:
    """Return the version without its local part: 0.32.0+cpu and 0.32.0+cu129 speak to each other."""
    return version.partition("+")[0]
