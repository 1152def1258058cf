"""This module makes checkpoints with random weights for tests, in 0.1 s without torch, the same bytes for the same seed.

They serve like any model, and their answers mean nothing. Weights keep the variance of their inputs, so that the next
token depends on the whole prompt; with the usual deviation of 0.02 a two-layer model only repeats itself.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.checkpoints.files import publish_directory, write_json
from serve_app.checkpoints.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, write_tokenizer

HIDDEN = 256
INTERMEDIATE = 512
NUM_HEADS = 4  # of size 64, which every attention backend of vLLM supports
NUM_KV_HEADS = 2
MAX_TOKENS = 2048
OPT_POSITION_OFFSET = 2  # OPT's position table has two rows in front that are never used
SHARPNESS = 2.0  # of q and k: attention to few tokens; without it greedy answers soon repeat one token (at 1.0: 1 of 6 prompts)
OPT_EMBEDDING_DEVIATION = 0.05  # small: OPT's output layer is its embedding, so a larger one would repeat the last token
LOGIT_DEVIATION = 4.0  # about that of trained models: the best of 1024 tokens is clear, and sampling still varies

Weights = dict[str, NDArray[np.float32]]


def make_tiny_llama(directory: Path, *, vocab_size: int = 1024, num_layers: int = 2, seed: int = 0) -> Path:
    """Make a Llama checkpoint that completes and chats. ``directory`` must be absent or empty, or hold this checkpoint already.

    Raises:
        CheckpointError: The directory holds something else or cannot be written, or ``vocab_size`` is not possible.
    """

    def write(staging: Path) -> None:
        write_tokenizer(staging, vocab_size=vocab_size, max_tokens=MAX_TOKENS, with_template=True, wrap=False)
        write_json(staging / "config.json", _llama_config(vocab_size, num_layers))
        _write_generation_config(staging)
        _save(staging, _llama_weights(_Random(seed), vocab_size, num_layers))

    return publish_directory(directory, write)


def make_tiny_opt(directory: Path, *, vocab_size: int = 1024, num_layers: int = 2, seed: int = 0) -> Path:
    """Make a checkpoint like opt-125m, which completes, but has no chat template. Otherwise as `make_tiny_llama`."""

    def write(staging: Path) -> None:
        write_tokenizer(staging, vocab_size=vocab_size, max_tokens=MAX_TOKENS, with_template=False, wrap=False)
        write_json(staging / "config.json", _opt_config(vocab_size, num_layers))
        _write_generation_config(staging)
        _save(staging, _opt_weights(_Random(seed), vocab_size, num_layers))

    return publish_directory(directory, write)


def make_tiny_embedding(directory: Path, *, vocab_size: int = 1024, num_layers: int = 2, seed: int = 0) -> Path:
    """Make a BERT encoder: a text's embedding is the normalized mean of its tokens' 256 numbers each.

    Otherwise as `make_tiny_llama`.
    """

    def write(staging: Path) -> None:
        write_tokenizer(staging, vocab_size=vocab_size, max_tokens=MAX_TOKENS, with_template=False, wrap=True)
        write_json(staging / "config.json", _bert_config(vocab_size, num_layers))
        _write_pooling(staging)
        _save(staging, _bert_weights(_Random(seed), vocab_size, num_layers))

    return publish_directory(directory, write)


def make_tiny_adapter(directory: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """Make a LoRA adapter, in PEFT's form, for a `make_tiny_llama` of two layers. Otherwise as `make_tiny_llama`."""

    def write(staging: Path) -> None:
        random, weights = _Random(seed), Weights()
        for layer in range(2):
            for name, num_out in (("q_proj", HIDDEN), ("v_proj", HIDDEN // NUM_HEADS * NUM_KV_HEADS)):
                module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{module}.lora_A.weight"] = random.matrix(rank, HIDDEN)
                weights[f"{module}.lora_B.weight"] = random.matrix(num_out, rank)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
        write_json(staging / "adapter_config.json", config)
        _save(staging, weights, "adapter_model.safetensors")

    return publish_directory(directory, write)


KINDS: Mapping[str, Callable[[Path], Path]] = {
    "llama": make_tiny_llama,
    "opt": make_tiny_opt,
    "embedding": make_tiny_embedding,
}


class _Random:
    """Draws weights; the same seed gives the same weights on each machine."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))  # by name, because default_rng may change its algorithm

    def matrix(self, num_out: int, num_in: int, *, deviation: float | None = None) -> NDArray[np.float32]:
        """Return [out, in] normal weights; by default such that unit variance in gives unit variance out."""
        scale = num_in**-0.5 if deviation is None else deviation
        return self._generator.standard_normal((num_out, num_in), dtype=np.float32) * np.float32(scale)

    def linear(self, name: str, num_out: int, num_in: int) -> Weights:
        """Return weight and bias of a layer that has a bias."""
        bias = self.matrix(1, num_out, deviation=0.1)[0]
        return {f"{name}.weight": self.matrix(num_out, num_in), f"{name}.bias": bias}


def _llama_config(vocab_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HIDDEN // NUM_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **_token_ids(),
    }


def _llama_weights(random: _Random, vocab_size: int, num_layers: int) -> Weights:
    kv_size = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    weights = {"model.embed_tokens.weight": random.matrix(vocab_size, HIDDEN, deviation=1.0)}
    for layer in (f"model.layers.{index}" for index in range(num_layers)):
        weights[f"{layer}.input_layernorm.weight"] = _ones(HIDDEN)
        weights[f"{layer}.self_attn.q_proj.weight"] = random.matrix(HIDDEN, HIDDEN) * np.float32(SHARPNESS)
        weights[f"{layer}.self_attn.k_proj.weight"] = random.matrix(kv_size, HIDDEN) * np.float32(SHARPNESS)
        weights[f"{layer}.self_attn.v_proj.weight"] = random.matrix(kv_size, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = random.matrix(HIDDEN, HIDDEN)
        weights[f"{layer}.post_attention_layernorm.weight"] = _ones(HIDDEN)
        weights[f"{layer}.mlp.gate_proj.weight"] = random.matrix(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = random.matrix(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = random.matrix(HIDDEN, INTERMEDIATE)
    weights["model.norm.weight"] = _ones(HIDDEN)
    weights["lm_head.weight"] = random.matrix(vocab_size, HIDDEN, deviation=LOGIT_DEVIATION * HIDDEN**-0.5)
    return weights


def _opt_config(vocab_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        **_token_ids(),
    }


def _opt_weights(random: _Random, vocab_size: int, num_layers: int) -> Weights:
    decoder, deviation = "model.decoder", OPT_EMBEDDING_DEVIATION
    weights = {
        f"{decoder}.embed_tokens.weight": random.matrix(vocab_size, HIDDEN, deviation=deviation),
        f"{decoder}.embed_positions.weight": random.matrix(MAX_TOKENS + OPT_POSITION_OFFSET, HIDDEN, deviation=deviation),
    }
    for layer in (f"{decoder}.layers.{index}" for index in range(num_layers)):
        weights |= _norm(f"{layer}.self_attn_layer_norm") | _norm(f"{layer}.final_layer_norm")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights |= random.linear(f"{layer}.self_attn.{part}", HIDDEN, HIDDEN)
        for part in ("q_proj", "k_proj"):
            weights[f"{layer}.self_attn.{part}.weight"] *= np.float32(SHARPNESS)
        weights |= random.linear(f"{layer}.fc1", INTERMEDIATE, HIDDEN) | random.linear(f"{layer}.fc2", HIDDEN, INTERMEDIATE)
    weights |= _norm(f"{decoder}.final_layer_norm")
    weights[f"{decoder}.final_layer_norm.weight"] *= np.float32(LOGIT_DEVIATION / (deviation * HIDDEN**0.5))
    return weights


def _bert_config(vocab_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "hidden_act": "gelu",
        "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        **_token_ids(),
    }


def _bert_weights(random: _Random, vocab_size: int, num_layers: int) -> Weights:
    weights = {
        "embeddings.word_embeddings.weight": random.matrix(vocab_size, HIDDEN, deviation=1.0),
        "embeddings.position_embeddings.weight": random.matrix(MAX_TOKENS, HIDDEN, deviation=0.1),
        "embeddings.token_type_embeddings.weight": random.matrix(2, HIDDEN, deviation=0.1),
        **_norm("embeddings.LayerNorm"),
    }
    for layer in (f"encoder.layer.{index}" for index in range(num_layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            weights |= random.linear(f"{layer}.attention.{part}", HIDDEN, HIDDEN)
        weights |= _norm(f"{layer}.attention.output.LayerNorm") | _norm(f"{layer}.output.LayerNorm")
        weights |= random.linear(f"{layer}.intermediate.dense", INTERMEDIATE, HIDDEN)
        weights |= random.linear(f"{layer}.output.dense", HIDDEN, INTERMEDIATE)
    return weights | random.linear("pooler.dense", HIDDEN, HIDDEN)


def _token_ids() -> dict[str, Any]:
    return {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "dtype": "float32"}


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, dtype=np.float32)


def _norm(name: str) -> Weights:
    return {f"{name}.weight": _ones(HIDDEN), f"{name}.bias": np.zeros(HIDDEN, dtype=np.float32)}


def _write_generation_config(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})


def _write_pooling(directory: Path) -> None:
    """Write the files that tell sentence-transformers and vLLM how to pool token vectors."""
    # modules.json is a list, which write_json does not take.
    (directory / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},\n'
        ' {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},\n'
        ' {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]\n'
    )
    pooling = directory / "1_Pooling"
    pooling.mkdir()
    write_json(pooling / "config.json", {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _save(directory: Path, weights: Weights, name: str = "model.safetensors") -> None:
    from safetensors.numpy import save

    # save_file is not used, because only the file's owner could read the file.
    (directory / name).write_bytes(save(weights, metadata={"format": "pt"}))
