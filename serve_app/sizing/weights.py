"""This module counts parameters and the bytes of weights in GPU memory. Pure.

The counts follow from the shape, as `tests/sizing/` compares with published models. Weights in files are counted exactly.
"""

from dataclasses import dataclass

from serve_app.errors import ConfigError
from serve_app.sizing.architecture import Architecture
from serve_app.sizing.quantization import Quantization

_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters by the way they are held."""

    attention: int
    feed_forward: int
    """Dense feed-forward and shared experts."""
    experts: int = 0
    active_experts: int = 0
    """Parameters of experts that one token passes."""
    embeddings: int
    """Token embeddings and learnt positions."""
    output: int
    """The output layer; 0 if it shares the embeddings."""
    rest: int
    """Norms, biases and routers, which every GPU holds whole."""

    @property
    def linear(self) -> int:
        """Parameters of the layers that quantization applies to."""
        return self.attention + self.feed_forward + self.experts

    @property
    def total(self) -> int:
        return self.linear + self.embeddings + self.output + self.rest

    @property
    def active(self) -> int:
        """Parameters that one token passes."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """The weights that a checkpoint's files hold. ``plain`` counts the elements of 16- and 32-bit floats, ``packed`` other bytes."""

    plain: int
    plain_bytes: int
    packed_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.plain_bytes + self.packed_bytes


def parameters_of(shape: Architecture) -> ParameterCounts:
    """Return the parameters of a model of this shape."""
    hidden, layers = shape.hidden_size, shape.num_layers
    queries = shape.num_heads * shape.head_size
    values = shape.num_kv_heads * shape.head_size
    attention = 2 * hidden * queries + 2 * hidden * values
    rest = shape.norms_per_layer * hidden + (2 * shape.head_size if shape.has_qk_norms else 0)
    if (latent := shape.latent) is not None:
        query_in = latent.query_rank or hidden
        per_head = latent.nope_size + latent.rope_size
        attention = hidden * latent.query_rank + query_in * shape.num_heads * per_head
        attention += hidden * (latent.rank + latent.rope_size) + shape.num_heads * hidden * latent.value_size
        attention += latent.rank * shape.num_heads * (latent.nope_size + latent.value_size)
        rest += latent.rank + latent.query_rank
    if shape.qkv_bias:
        rest += queries + 2 * values
    if shape.is_plain:  # biases of q, k, v, o and of both feed-forward matrices, and of both norms
        rest += queries + 2 * values + hidden + shape.intermediate_size + hidden + 2 * hidden
    matrices = 2 if shape.is_plain else 3
    moe = shape.experts
    moe_layers = shape.num_expert_layers
    feed_forward = (layers - moe_layers) * matrices * hidden * shape.intermediate_size
    experts = active = routers = 0
    if moe is not None:
        one = 3 * hidden * moe.size
        experts, active = moe_layers * moe.num * one, moe_layers * moe.per_token * one
        feed_forward += moe_layers * 3 * hidden * moe.shared_size
        routers = moe_layers * hidden * moe.num
    return ParameterCounts(
        attention=layers * attention,
        feed_forward=feed_forward,
        experts=experts,
        active_experts=active,
        embeddings=(shape.vocab_size + shape.num_positions + shape.num_types) * hidden if shape.has_embeddings else 0,
        output=shape.vocab_size * hidden if shape.has_output and not shape.tied else 0,
        rest=layers * rest + routers + (hidden * (2 if shape.is_plain else 1) if shape.has_output else 0),
    )


def element_bytes(dtype: str = "auto") -> int:
    """Return the bytes of an unquantized weight on a GPU.

    With ``auto`` vLLM keeps 16-bit types, and makes 16 bits of 32.

    Raises:
        ConfigError: The type is not one that vLLM takes.
    """
    name = dtype.lower()
    if name == "auto":
        return 2
    if name not in _BYTES:
        raise ConfigError("engine_args.dtype", f"is {dtype!r}", f"known are auto, {', '.join(_BYTES)}")
    return _BYTES[name]


def weight_bytes(
    shape: Architecture,
    counts: ParameterCounts,
    *,
    element: int,
    files: TensorBytes | None = None,
    online: Quantization | None = None,
) -> int:
    """Return the bytes that the weights take in the memory of all GPUs together, without what several GPUs hold twice.

    Args:
        element: Bytes of an unquantized weight, of `element_bytes`.
        files: What the checkpoint's files hold. None: the counts decide.
        online: What the engine quantizes while it loads; without effect on weights that are quantized already.
    """
    stored = shape.quantization
    if stored is not None:
        if files is not None:
            return files.file_bytes  # scales keep their type
        return _quantized(counts, stored, element)
    plain = (files.plain * element + files.packed_bytes) if files is not None else counts.total * element
    if online is None or not online.is_known:
        return plain
    return plain - counts.total * element + _quantized(counts, online, element)


def _quantized(counts: ParameterCounts, how: Quantization, element: int) -> int:
    packed = counts.linear - (counts.attention if how.keeps_attention else 0)
    return int((counts.total - packed) * element + packed * min(how.bits / 8, element))


def bytes_of_stage(stage: ParameterCounts, whole: ParameterCounts, total: int, element: int) -> int:
    """Return the bytes of one pipeline stage of a model of ``total`` bytes. Quantization counts for the layers, not for the rest."""
    per_linear = max(0, total - element * (whole.total - whole.linear)) / max(1, whole.linear)
    return round(per_linear * stage.linear) + element * (stage.total - stage.linear)


def bytes_on_each_gpu(shape: Architecture, counts: ParameterCounts, total: int, num_gpus: int) -> int:
    """Return the bytes of weights on each of ``num_gpus`` that share a model of ``total`` bytes by tensor parallelism.

    Norms and routers are on every GPU. If there are fewer KV heads than GPUs, several hold the same head.
    """
    if num_gpus == 1:
        return total
    whole = min(total, counts.rest * 2)
    copies = max(1, num_gpus // shape.num_kv_heads) - 1 if shape.latent is None else 0
    kv_weights = 2 * shape.num_layers * shape.hidden_size * shape.num_kv_heads * shape.head_size
    mean_bytes = total / max(1, counts.total)
    return int((total - whole + copies * kv_weights * mean_bytes) / num_gpus) + whole
