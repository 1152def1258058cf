"""This module reads how a checkpoint's weights are quantized. Pure."""

import re
from dataclasses import dataclass, replace

from serve_app.errors import ConfigError
from serve_app.sizing.config_values import ConfigValues

_SCALE_BITS = 16
_EIGHT_BITS = frozenset({"fp8", "fbgemm_fp8", "int8", "ptpc_fp8", "fp8_per_tensor", "fp8_per_block", "experts_int8"})
_MODELOPT = {"fp8": 8.0, "nvfp4": 4.5, "mxfp8": 8.25}
"""Bits a weight, scales included: NVFP4 has one 8-bit scale for 16 weights, MXFP8 one for 32."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What takes the place of the 16-bit weights. Embeddings, output layer and norms keep their type."""

    method: str
    bits: float
    """Bits of one weight of a linear layer, its part of scales and zero points included."""
    keeps_attention: bool = False
    """Whether attention keeps its type too, as in gpt-oss and in Meta's FP8 checkpoint of Llama 3.1 405B."""
    kv_cache_bytes: int | None = None
    """Bytes of a KV element that the checkpoint asks for; None: those of the weights' type."""

    @property
    def is_known(self) -> bool:
        """Whether the bits are known. Weights of unknown methods are counted with 16 bits."""
        return self.bits < 16


def quantization_of(config: ConfigValues, num_attention_layers: int) -> Quantization | None:
    """Return what `quantization_config` (or `compression_config`) says; None if the weights are not quantized."""
    found = config.part("quantization_config") or config.part("compression_config")
    if found is None:
        return None
    plain = _plain_quantization(found)
    return replace(plain, keeps_attention=plain.keeps_attention or _leaves_attention(found, num_attention_layers))


def _leaves_attention(found: ConfigValues, num_layers: int) -> bool:
    """Return whether the modules that stay as they are include the attention of all layers: by a pattern, or one by one."""
    names = [found.values.get(key) for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")]
    left = [str(name) for each in names if isinstance(each, list) for name in each if "attn" in str(name)]
    layers = {number[1] for name in left if (number := re.search(r"\.(\d+)\.", name))}
    return len(layers) >= num_layers or any("*" in name for name in left)


def _plain_quantization(found: ConfigValues) -> Quantization:
    method = found.text("quant_method")
    if method.startswith("modelopt") or (not method and found.has("quant_algo")):
        algorithm = found.text("quant_algo")
        kv_bytes = 1 if found.has("kv_cache_quant_algo", "kv_cache_scheme") else None
        return Quantization(f"modelopt {algorithm}".strip(), _MODELOPT.get(algorithm, 16.0), kv_cache_bytes=kv_bytes)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method in _EIGHT_BITS:
        return Quantization(method, 8.0)
    if method == "mxfp4":
        return Quantization(method, 4.25, keeps_attention=True)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        bits = found.whole("bits", "w_bit", most=8, default=4)
        return Quantization(method, _with_scales(bits, found, default=128))
    if method == "bitsandbytes":
        return Quantization(method, 8.0 if found.flag("load_in_8bit", False) else 4.5)
    return Quantization(method or "unnamed", 16.0)


def online_quantization(method: str) -> Quantization | None:
    """Return what `engine_args.quantization` makes of 16-bit weights while they are loaded; None if it makes nothing of them."""
    method = method.lower()
    if method in _EIGHT_BITS:
        return Quantization(method, 8.0)
    return {"bitsandbytes": Quantization("bitsandbytes", 4.5), "mxfp8": Quantization("mxfp8", 8.25)}.get(method)


def _compressed_tensors(found: ConfigValues) -> Quantization:
    groups = found.part("config_groups")
    kv_bytes = 1 if found.has("kv_cache_scheme") else None
    bits = 0.0
    for name in groups.values if groups else ():
        assert groups is not None
        weights = (groups.part(name) or groups).part("weights")
        if weights is not None:  # the widest group counts for all weights
            own = weights.whole("num_bits", most=16, default=8)
            bits = max(bits, _with_scales(own, weights, default=-1))
    return Quantization("compressed-tensors", bits or 16.0, kv_cache_bytes=kv_bytes)


def _with_scales(bits: int, found: ConfigValues, default: int) -> float:
    """Return bits of a weight with its part of the scale and zero point; -1 is one group for each row, whose part is below a thousandth."""
    group_size = found.whole("group_size", "q_group_size", least=-1, most=2**16, default=default)
    if bits >= 8:
        return float(bits)
    if group_size == 0:
        raise ConfigError(found.key("group_size"), "is 0", "a group holds at least one weight; -1 is a whole row")
    return bits + (_SCALE_BITS + bits) / group_size if group_size > 0 else float(bits)
