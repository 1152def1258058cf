"""This module reads the shape of a transformer from its config.json: a decoder, or an encoder built like BERT. Pure.

Dense models with grouped-query attention, mixtures of experts and multi-head latent attention (MLA) are known. Of a model for text and
media the text part is read. A `model_type` outside `FAMILIES` is read like a Llama, and `Architecture.notes` says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.errors import ConfigError
from serve_app.sizing.config_values import ConfigValues
from serve_app.sizing.quantization import Quantization, quantization_of

_TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "opt", "gpt2"})
"""Families whose config.json leaves `tie_word_embeddings` out when it is true."""
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
_QK_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
_BERT = frozenset({"bert", "roberta", "xlm-roberta"})
"""Encoders, of which vLLM leaves the pooler and the output layer out. They hold no KV cache: every text is computed in one step."""
_PLAIN_MLP = _BERT | {"opt", "gpt2"}
"""Families whose feed-forward has two matrices and no gate, and whose layers all have biases."""
FAMILIES = frozenset(
    {*_TIED, *_QK_NORMS, *_BERT, "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "smollm3", "gpt_oss", "granite"}
    | {"deepseek_v2", "deepseek_v3", "kimi_k2"}
)
_OTHER_ENCODERS = frozenset({"modernbert", "distilbert", "nomic_bert", "t5", "whisper", "clip"})
_SHIFTED_POSITIONS = {"opt": 2, "roberta": 2, "xlm-roberta": 2}
"""Rows of the table of positions that no token has."""
_ON_EVERY_STAGE = frozenset({"gemma3", "gemma3_text", "gemma2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "opt", "gpt2"})
"""Families of which vLLM keeps the embeddings and the output layer on every pipeline stage."""
MOST_TOKENS = 2**30
_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""The least of them counts, as in vLLM; `model_max_length` comes before them."""
_UNNAMED_CONTEXT = 2048


_Kind = Literal["full", "sliding", "stateful", "encoder"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the transformer."""

    attention: _Kind = "full"
    """stateful: linear attention, whose state does not grow with the context. encoder: attention over the text of the step, without KV."""
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What each layer with experts holds."""

    num: int
    per_token: int
    size: int
    """Inner size of one expert's feed-forward."""
    shared_size: int = 0
    """Inner size of the feed-forward that every token passes beside its experts."""


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
    """The shape of a model or of one of its pipeline stages, as far as memory and step times depend on it."""

    family: str
    dtype: str
    """Type of the weights that are not quantized, by its name in the file; "" if the file names none."""
    layers: tuple[Layer, ...]
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
    num_types: int = 0
    """Rows of the table of token types, which encoders have."""
    qkv_bias: bool = False
    sliding_window: int = 0
    """Tokens that a layer with a sliding window sees; 0 without such layers."""
    is_first: bool = True
    """Whether this is the first pipeline stage. A whole model is the first and the last stage."""
    is_last: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()
    """What this estimate leaves out or assumes."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_sliding_layers(self) -> int:
        return sum(layer.attention == "sliding" for layer in self.layers)

    @property
    def num_stateful_layers(self) -> int:
        return sum(layer.attention == "stateful" for layer in self.layers)

    @property
    def num_full_layers(self) -> int:
        """Layers whose KV cache grows with every token."""
        return sum(layer.attention == "full" for layer in self.layers)

    @property
    def num_expert_layers(self) -> int:
        return sum(layer.has_experts for layer in self.layers)

    @property
    def has_embeddings(self) -> bool:
        return self.is_first or (self.tied and self.is_last) or self.family in _ON_EVERY_STAGE

    @property
    def has_output(self) -> bool:
        """Whether the output layer and the norm before it are here."""
        return self.is_last or self.family in _ON_EVERY_STAGE

    @property
    def is_encoder(self) -> bool:
        return self.family in _BERT

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
        ConfigError: It is no mapping, neither a decoder nor like BERT, or a value is missing or out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(where, f"holds a {type(values).__name__} and no mapping", "give a checkpoint's config.json")
    whole = ConfigValues(values, where)
    config, family, notes = _language_model(whole, where)
    heads = config.whole("num_attention_heads", "n_head", "n_heads", most=2**14)
    hidden = config.whole("hidden_size", "n_embd", "d_model", most=2**20)
    layers = config.whole("num_hidden_layers", "n_layer", "n_layers", most=2**12)
    experts, with_experts = _experts(config, layers)
    inner = config.whole("intermediate_size", "ffn_dim", "n_inner", most=2**24, default=4 * hidden)
    latent = _latent(config)
    window, kinds = _layer_kinds(config, family, layers)
    stateful = kinds.count("stateful")
    if stateful == layers:
        raise ConfigError(f"{where}: layer_types", "has no layer of attention", "fit sizes models whose requests hold a KV cache")
    if stateful:
        notes.append(f"{stateful} layers of linear attention: their state, some MiB per request, is left out")
    if "sliding" in kinds:
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
        layers=tuple(Layer(kind, n in with_experts) for n, kind in enumerate(kinds)),
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        max_tokens=max_tokens,
        default_tokens=default_tokens,
        tied=family in _BERT or whole.flag("tie_word_embeddings", config.flag("tie_word_embeddings", family in _TIED)),
        num_types=config.whole("type_vocab_size", least=0, most=2**16, default=2) if family in _BERT else 0,
        qkv_bias=config.flag("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss")),
        sliding_window=window,
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
    if family in _OTHER_ENCODERS:
        hint = f"fit sizes models that write text, and of encoders {', '.join(sorted(_BERT))}"
        raise ConfigError(f"{where}: model_type", f"is {family!r}", hint)
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
    if family in _BERT:
        most = max(1, most - _SHIFTED_POSITIONS.get(family, 0))
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


def _experts(config: ConfigValues, layers: int) -> tuple[Experts | None, frozenset[int]]:
    """Return the experts, and the layers that have them."""
    num = config.whole("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", least=0, most=2**14, default=0)
    if num < 2:
        return None, frozenset()
    size = config.whole("moe_intermediate_size", "intermediate_size", most=2**24)
    shared = config.whole("shared_expert_intermediate_size", least=0, most=2**24, default=0)
    shared = shared or config.whole("n_shared_experts", least=0, most=2**10, default=0) * size
    dense = config.whole("first_k_dense_replace", least=0, most=layers, default=0)
    named = config.values.get("mlp_only_layers")
    only_dense = {each for each in named if isinstance(each, int)} if isinstance(named, list) else set()
    step = config.whole("decoder_sparse_step", "moe_layer_freq", most=2**12, default=1)
    before = 1 if config.has("decoder_sparse_step") else 0  # with a step of 2 these families begin at layer 1, others at 0
    where = frozenset(n for n in range(dense, layers) if n not in only_dense and (n + before) % step == 0)
    experts = Experts(
        num=num,
        per_token=config.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk", most=num, default=min(2, num)),
        size=size,
        shared_size=shared,
    )
    return (experts, where) if where else (None, where)


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


def _layer_kinds(config: ConfigValues, family: str, layers: int) -> tuple[int, list[_Kind]]:
    """Return the tokens of the sliding window, and the attention of each layer."""
    if family in _BERT:
        return 0, ["encoder"] * layers
    window = config.whole("sliding_window", least=0, most=MOST_TOKENS, default=0)
    if not config.flag("use_sliding_window", True):
        window = 0
    in_window: _Kind = "sliding" if window else "full"
    kinds = config.texts("layer_types", layers)
    if kinds is not None:
        named: dict[str, _Kind] = {"sliding_attention": in_window, "chunked_attention": in_window}
        named |= {"full_attention": "full", "attention": "full"}
        found = [named.get(kind, "stateful") for kind in kinds]
        return (window if "sliding" in found else 0), found
    if every := config.whole("full_attention_interval", least=0, most=layers, default=0):
        return 0, _full_every(every, "stateful", layers)
    if not window:
        return 0, ["full"] * layers
    if family == "gemma2":
        return window, ["full" if n % 2 else "sliding" for n in range(layers)]
    if every := config.whole("sliding_window_pattern", least=0, most=layers, default=6 if family.startswith("gemma3") else 0):
        return window, _full_every(every, "sliding", layers)
    return window, ["sliding"] * layers


def _full_every(every: int, other: _Kind, layers: int) -> list[_Kind]:
    return [other if (n + 1) % every else "full" for n in range(layers)]
