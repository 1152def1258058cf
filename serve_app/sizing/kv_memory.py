"""This module counts the bytes of the KV cache, as vLLM lays it out. Pure; `tests/contracts/test_vllm_memory.py` compares both."""

from serve_app.errors import ConfigError
from serve_app.sizing.architecture import Architecture

BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache on GPUs; a request takes whole blocks."""
_TYPES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}


def kv_element_bytes(shape: Architecture, weight_element: int, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of one number of the KV cache. ``auto``: what the checkpoint asks for, else the type of its weights.

    Raises:
        ConfigError: The type is none whose size is known here.
    """
    if kv_cache_dtype == "auto":
        asked = shape.quantization.kv_cache_bytes if shape.quantization else None
        return asked or weight_element
    if kv_cache_dtype not in _TYPES:
        raise ConfigError("engine_args.kv_cache_dtype", f"is {kv_cache_dtype!r}", f"fit knows auto, {', '.join(_TYPES)}")
    return _TYPES[kv_cache_dtype]


def layer_bytes_per_token(shape: Architecture, element: int, num_gpus: int = 1) -> int:
    """Return the bytes of a token in one layer, on each of the GPUs. A GPU holds at least one KV head, and a latent vector whole."""
    if shape.latent is not None:
        return (shape.latent.rank + shape.latent.rope_size) * element
    return 2 * max(1, shape.num_kv_heads // num_gpus) * shape.head_size * element


def kv_bytes_per_token(shape: Architecture, element: int, num_gpus: int = 1) -> int:
    """Return the bytes of a token on each GPU while the context is within the sliding windows."""
    return (shape.num_full_layers + shape.num_sliding_layers) * layer_bytes_per_token(shape, element, num_gpus)


def kv_bytes_of_request(
    shape: Architecture, tokens: int, *, element: int, num_gpus: int, step_tokens: int, stages: int = 1
) -> int:
    """Return the bytes on each GPU of a request with a context of ``tokens``.

    A layer with a sliding window holds the window and, while a prompt is computed, the tokens of the steps in flight: one for each
    pipeline stage, and with async scheduling, vLLM's default on GPUs, one more.
    """
    layer = layer_bytes_per_token(shape, element, num_gpus)
    held = _in_blocks(tokens)
    in_window = min(held, _in_blocks(shape.sliding_window - 1 + (stages + 1) * step_tokens) + BLOCK_TOKENS)
    return layer * (shape.num_full_layers * held + shape.num_sliding_layers * in_window)


def longest_context(shape: Architecture, kv_bytes: int, *, element: int, num_gpus: int, step_tokens: int, stages: int = 1) -> int:
    """Return the tokens of the longest context that ``kv_bytes`` on each GPU hold, in whole blocks; at most the model's own limit."""
    low, high = 0, -(-shape.max_tokens // BLOCK_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * BLOCK_TOKENS
        need = kv_bytes_of_request(shape, tokens, element=element, num_gpus=num_gpus, step_tokens=step_tokens, stages=stages)
        low, high = (middle, high) if need <= kv_bytes else (low, middle - 1)
    return min(shape.max_tokens, low * BLOCK_TOKENS)


def _in_blocks(tokens: int) -> int:
    return -(-max(0, tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
