"""This module converts a GGUF file of a Llama model to a Hugging Face checkpoint in bfloat16, without torch.

Source: the GGUF specification (ggml, docs/gguf.md) and llama.cpp's convert_hf_to_gguf.py, whose mapping this undoes.
It supports what the embedded models need: byte-level BPE tokenizers with llama.cpp's ``smollm`` splitting, no rope scaling.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.checkpoints.files import write_json
from serve_app.errors import CheckpointError

Report = Callable[[int, int], None]
"""A function that gets the number of finished units and the number of all units."""

OUTER_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type: a special token, which no text becomes


def convert_gguf(gguf: Path, directory: Path, report: Report) -> None:
    """Write the model in ``gguf`` into the existing ``directory``: weights, configuration, tokenizer, chat template.

    Raises:
        CheckpointError: The file is not a Llama model, or has features that this converter does not know.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _check_supported(metadata, gguf)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    write_json(directory / "config.json", _config(metadata, tied=tied))
    write_json(directory / "generation_config.json", _token_ids(metadata))
    _write_tokenizer(directory, metadata)
    _write_weights(directory, reader.tensors, metadata, report)


def hugging_face_name(name: str) -> str:
    """Return transformers' name of the tensor ``name``.

    Raises:
        CheckpointError: Llama models have no such tensor.
    """
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.partition(".")
    if not name.startswith("blk.") or part not in LAYER_NAMES or kind != "weight":
        raise CheckpointError(f"tensor {name} does not belong to a Llama model: this file cannot be converted")
    return f"model.layers.{block}.{LAYER_NAMES[part]}.weight"


def interleaved_to_halves(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a q or k projection, [heads * head size, hidden], from GGUF's rotary order to transformers'.

    GGUF rotates rows 2i and 2i+1 of each head together, and transformers rotates rows i and i + head size / 2.
    """
    num_rows, num_columns = weights.shape
    pairs = weights.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def to_bfloat16(values: NDArray[np.float32]) -> bytes:
    """Return ``values`` as little-endian bfloat16, rounded to nearest, ties to even. Not for NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").tobytes()


def _check_supported(metadata: Mapping[str, Any], gguf: Path) -> None:
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise CheckpointError(f"{gguf.name}: {key} is {metadata.get(key)!r}, only {value!r} can be converted")
    if scaling := [key for key in metadata if key.startswith("llama.rope.scaling")]:
        raise CheckpointError(f"{gguf.name}: {scaling[0]} is set, rope scaling cannot be converted")


def _config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF has it in float32; five digits restore the intended decimal number.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.5g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_token_ids(metadata),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def _write_tokenizer(directory: Path, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm" splitting: each digit alone, then GPT-2's pattern.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = _token_ids(metadata)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key.removesuffix("_id"): tokens[index] for key, index in ids.items()},
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
        },
    )
    (directory / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _write_weights(directory: Path, tensors: list[Any], metadata: Mapping[str, Any], report: Report) -> None:
    from gguf import dequantize

    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    with (directory / "model.safetensors").open("wb") as file:
        file.write(_safetensors_header(tensors))
        for index, tensor in enumerate(tensors):
            weights = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                weights = interleaved_to_halves(weights, metadata[heads[part]])
            file.write(to_bfloat16(weights))
            report(index + 1, len(tensors))


def _safetensors_header(tensors: list[Any]) -> bytes:
    """Return the header before the weights: an 8-byte length and JSON.

    The safetensors library is not used, because it needs all weights in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF puts the fastest-moving dimension first
        start, end = end, end + 2 * math.prod(shape)
        header[hugging_face_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the specification requires aligned weights
    return len(encoded).to_bytes(8, "little") + encoded
