"""This module reads the shape of a decoder-only transformer from its config.json. Pure.

Dense models with grouped-query attention, mixtures of experts and multi-head latent attention (MLA) are known. Of a model for text and
media the text part is read. A `model_type` outside `FAMILIES` is read like a Llama, and `Architecture.notes` says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import ConfigError
from serve_app.sizing.config_values import ConfigValues
from serve_app.sizing.quantization import Quantization, quantization_of

_TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "opt", "gpt2"})
"""Families whose config.json leaves `tie_word_embeddings` out when it is true."""
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
_QK_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
_PLAIN_MLP = frozenset({"opt", "gpt2"})
"""Families whose feed-forward has two matrices and no gate, and whose layers all have biases."""
FAMILIES = frozenset(
    {*_TIED, *_QK_NORMS, "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "smollm3", "gpt_oss", "granite"}
    | {"deepseek_v2", "deepseek_v3", "kimi_k2"}
)
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "nomic_bert", "t5", "whisper", "clip"})
_SHIFTED_POSITIONS = {"opt": 2}
MOST_TOKENS = 2**30
_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""The least of them counts, as in vLLM; `model_max_length` comes before them."""
_UNNAMED_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The expert layers of a mixture of experts."""

    num: int
    per_token: int
    size: int
    """Inner size of one expert's feed-forward."""
    shared_size: int = 0
    """Inner size of the feed-forward that every token passes beside its experts."""
    num_layers: int
    """Layers with experts; the others are dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: the KV cache of a layer is one vector of ``rank + rope_size`` numbers per token."""

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int
    """0: queries have no latent vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a model, as far as memory and step times depend on it."""

    family: str
    dtype: str
    """Type of the weights that are not quantized, by its name in the file; "" if the file names none."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_tokens: int
    """Longest context that the file allows."""
    default_tokens: int
    """Longest context that vLLM takes where `max_model_len` says nothing."""
    tied: bool = False
    """Whether the output layer shares the token embeddings."""
    qkv_bias: bool = False
    sliding_window: int = 0
    """Tokens that a layer with a sliding window sees; 0 without such layers."""
    num_sliding_layers: int = 0
    num_stateful_layers: int = 0
    """Layers of linear attention, whose state does not grow with the context."""
    experts: Experts | None = None
    latent: Latent | None = None
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()
    """What this estimate leaves out or assumes."""

    @property
    def num_full_layers(self) -> int:
        """Layers whose KV cache grows with every token."""
        return self.num_layers - self.num_sliding_layers - self.num_stateful_layers

    @property
    def is_plain(self) -> bool:
        """Whether the feed-forward has two matrices and every layer has biases, as in OPT."""
        return self.family in _PLAIN_MLP

    @property
    def norms_per_layer(self) -> int:
        return 4 if self.family in _FOUR_NORMS else 2

    @property
    def has_qk_norms(self) -> bool:
        return self.family in _QK_NORMS

    @property
    def num_positions(self) -> int:
        """Rows of a table of learnt positions; 0 for rotary positions."""
        return self.max_tokens + _SHIFTED_POSITIONS.get(self.family, 0) if self.is_plain else 0


def architecture_of(values: object, where: str) -> Architecture:
    """Return the shape that the content of a config.json describes.

    Args:
        values: The parsed content.
        where: The file's name, for errors.

    Raises:
        ConfigError: It is no mapping, no decoder-only transformer, or a value is missing or out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(where, f"holds a {type(values).__name__} and no mapping", "give a checkpoint's config.json")
    whole = ConfigValues(values, where)
    config, family, notes = _language_model(whole, where)
    heads = config.whole("num_attention_heads", "n_head", "n_heads", most=2**14)
    hidden = config.whole("hidden_size", "n_embd", "d_model", most=2**20)
    layers = config.whole("num_hidden_layers", "n_layer", "n_layers", most=2**12)
    experts = _experts(config, layers)
    inner = config.whole("intermediate_size", "ffn_dim", "n_inner", most=2**24, default=4 * hidden)
    latent = _latent(config)
    window, sliding, stateful = _layer_kinds(config, family, layers)
    if stateful == layers:
        raise ConfigError(f"{where}: layer_types", "has no layer of attention", "fit sizes models whose requests hold a KV cache")
    if stateful:
        notes.append(f"{stateful} layers of linear attention: their state, some MiB per request, is left out")
    if sliding:
        notes.append("KV of layers with a sliding window: vLLM pads groups of layers, up to 15 % more")
    shape: dict[str, Any] = {
        "num_kv_heads": config.whole("num_key_value_heads", "num_kv_heads", "n_head_kv", most=2**14, default=heads),
        "head_size": config.whole(
            "head_dim", "head_size", most=2**14, default=None if "gemma" in family else max(1, hidden // heads)
        ),
        "vocab_size": config.whole("vocab_size", most=2**24),
    }
    max_tokens, default_tokens = _contexts(config, family)
    if not config.has("model_max_length", *_CONTEXT_KEYS):
        notes.append(f"the file names no longest context: {_UNNAMED_CONTEXT:,} is assumed")
    quantization = quantization_of(whole, layers - stateful) or quantization_of(config, layers - stateful)
    if quantization is not None and not quantization.is_known:
        notes.append(f"quantization {quantization.method} is unknown here: weights count 16 bits unless their files are read")
    return Architecture(
        family=family,
        dtype=whole.text("dtype", "torch_dtype") or config.text("dtype", "torch_dtype"),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        max_tokens=max_tokens,
        default_tokens=default_tokens,
        tied=whole.flag("tie_word_embeddings", config.flag("tie_word_embeddings", family in _TIED)),
        qkv_bias=config.flag("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss")),
        sliding_window=window,
        num_sliding_layers=sliding,
        num_stateful_layers=stateful,
        experts=experts,
        latent=latent,
        quantization=quantization,
        notes=tuple(notes),
        **shape,
    )


def _language_model(whole: ConfigValues, where: str) -> tuple[ConfigValues, str, list[str]]:
    """Return the part of the file that describes the decoder, its family, and what is to be noted of both."""
    config, notes = whole, list[str]()
    if (text := whole.part("text_config") or whole.part("llm_config")) is not None and not whole.has("num_hidden_layers"):
        config = text
        notes.append("the encoders of images and sounds are counted only where the weights' own files are read")
    family = config.text("model_type") or whole.text("model_type")
    if family in _ENCODERS:
        raise ConfigError(
            f"{where}: model_type", f"is {family!r}", "an encoder has no KV cache: fit sizes models that write text"
        )
    if family not in FAMILIES:
        notes.append(f"model_type {family or '(none)'} is counted like a Llama; its own parts may be missing")
    return config, family, notes


def _contexts(config: ConfigValues, family: str) -> tuple[int, int]:
    """Return the longest context that vLLM allows, and the one that it takes if none is asked for.

    Linear and dynamic scaling lengthen the context of the file. With other kinds the file names the longer one already, and so do
    all files of Gemma 3.
    """
    named = [config.whole(key, most=MOST_TOKENS) for key in _CONTEXT_KEYS if config.has(key)]
    most = config.whole("model_max_length", most=MOST_TOKENS, default=min(named, default=_UNNAMED_CONTEXT))
    kinds = {rope.text("rope_type", "type"): rope.values.get("factor") for rope in _ropes(config)}
    if "longrope" in kinds or "su" in kinds:
        return most, config.whole("original_max_position_embeddings", most=MOST_TOKENS, default=most)
    factor = kinds.get("linear") or kinds.get("dynamic")
    if "gemma3" not in family and isinstance(factor, int | float) and 1 <= factor <= 1024:
        most = min(MOST_TOKENS, int(most * factor))
    return most, most


def _ropes(config: ConfigValues) -> list[ConfigValues]:
    """Return the parameters of rotary positions: one set, or one for each type of layer."""
    whole = config.part("rope_scaling") or config.part("rope_parameters")
    if whole is None:
        return []
    nested = [
        whole.part(name) for name, value in whole.values.items() if name.endswith("_attention") and isinstance(value, Mapping)
    ]
    return [part for part in nested if part is not None] or [whole]


def _experts(config: ConfigValues, layers: int) -> Experts | None:
    num = config.whole("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", least=0, most=2**14, default=0)
    if num < 2:
        return None
    size = config.whole("moe_intermediate_size", "intermediate_size", most=2**24)
    shared = config.whole("shared_expert_intermediate_size", least=0, most=2**24, default=0)
    shared = shared or config.whole("n_shared_experts", least=0, most=2**10, default=0) * size
    dense = config.whole("first_k_dense_replace", least=0, most=layers, default=0)
    only_dense = config.values.get("mlp_only_layers")
    dense += len(only_dense) if isinstance(only_dense, list) else 0
    step = config.whole("decoder_sparse_step", "moe_layer_freq", most=2**12, default=1)
    return Experts(
        num=num,
        per_token=config.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk", most=num, default=min(2, num)),
        size=size,
        shared_size=shared,
        num_layers=max(1, (layers - min(dense, layers)) // step),
    )


def _latent(config: ConfigValues) -> Latent | None:
    if not config.has("kv_lora_rank"):
        return None
    return Latent(
        rank=config.whole("kv_lora_rank", most=2**16),
        rope_size=config.whole("qk_rope_head_dim", least=0, most=2**14),
        nope_size=config.whole("qk_nope_head_dim", least=0, most=2**14),
        value_size=config.whole("v_head_dim", most=2**14),
        query_rank=config.whole("q_lora_rank", least=0, most=2**16, default=0),
    )


def _layer_kinds(config: ConfigValues, family: str, layers: int) -> tuple[int, int, int]:
    """Return the tokens of the sliding window, and the number of layers with one and of layers of linear attention."""
    window = config.whole("sliding_window", least=0, most=MOST_TOKENS, default=0)
    if not config.flag("use_sliding_window", True):
        window = 0
    kinds = config.texts("layer_types", layers)
    if kinds is not None:
        sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
        stateful = layers - sliding - sum(kind in ("full_attention", "attention") for kind in kinds)
        return (window, sliding, stateful) if window else (0, 0, stateful)
    if every := config.whole("full_attention_interval", least=0, most=layers, default=0):
        return 0, 0, layers - layers // every
    if not window:
        return 0, 0, 0
    if family == "gemma2":
        return window, (layers + 1) // 2, 0  # layers 0, 2, 4, ... have the window
    if every := config.whole("sliding_window_pattern", least=0, most=layers, default=6 if family.startswith("gemma3") else 0):
        return window, layers - layers // every, 0
    return window, layers, 0
