"""This module counts the GPU memory that vLLM keeps for LoRA adapters. Pure; `tests/contracts/test_vllm_lora_memory.py` compares both.

At its start vLLM allocates `max_loras` places. For each linear layer a place has a matrix A of rank x inputs and a matrix B of outputs x
rank, with the rank `max_lora_rank`, whatever the adapters have. Where GPUs share a layer by its outputs, each GPU holds all of A and its
part of B; by its inputs, its part of A and all of B. Embeddings and the output layer are not shared.
"""

from dataclasses import dataclass

from serve_app.sizing.architecture import Architecture, Experts

RANK_LIMITS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as `max_lora_rank`."""
DEFAULT_RANK = 16
_PLAIN_EMBEDDINGS = frozenset({"qwen2", "qwen2_moe", "mistral", "gemma", "gemma2", "gemma3", "gemma3_text", "opt", "gpt2"})
"""Families whose embeddings and output layer take no adapter."""
COMPARED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2"})
"""Families whose bytes are exactly those that vLLM allocates on a CPU. It has no LoRA for experts there, so none of them is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The engine settings that the memory of adapters depends on."""

    num: int
    """`max_loras`."""
    rank: int
    """`max_lora_rank`."""
    experts_apart: bool = False
    """`enable_expert_parallel`: each GPU holds whole experts, and not a part of every expert."""

    def bytes_on_each_gpu(self, shape: Architecture, element: int, num_gpus: int) -> int:
        """Return the bytes on each of ``num_gpus``. ``element``: bytes of a number, as of an unquantized weight."""
        moe_layers = shape.num_expert_layers
        moe = self._experts(shape, shape.experts, num_gpus) if shape.experts else 0
        numbers = shape.num_layers * _attention(shape, num_gpus)
        numbers += (shape.num_layers - moe_layers) * _feed_forward(shape, shape.intermediate_size, num_gpus)
        numbers += moe_layers * moe
        if shape.family not in _PLAIN_EMBEDDINGS:
            numbers += (shape.has_embeddings + shape.has_output) * (shape.vocab_size + shape.hidden_size)
        return self.num * self.rank * element * numbers

    def _experts(self, shape: Architecture, moe: Experts, num_gpus: int) -> int:
        whole, parts = (num_gpus, 1) if self.experts_apart else (1, num_gpus)
        routed = -(-moe.num // whole) * _feed_forward(shape, moe.size, parts)
        shared = _feed_forward(shape, moe.shared_size, num_gpus) if moe.shared_size else 0
        return routed + shared + shape.hidden_size + moe.num  # the last two: the router


def limit_of(rank: int) -> int:
    """Return the least `max_lora_rank` that holds adapters of this rank; the greatest if none does."""
    return next((limit for limit in RANK_LIMITS if limit >= rank), RANK_LIMITS[-1])


def _attention(shape: Architecture, num_gpus: int) -> int:
    """Return inputs and outputs of the matrices of a layer's attention, on each GPU and for a rank of 1."""
    hidden = shape.hidden_size
    if (latent := shape.latent) is not None:
        down = hidden + latent.rank + latent.rope_size
        down += hidden + latent.query_rank if latent.query_rank else 0
        queries = shape.num_heads * (latent.nope_size + latent.rope_size) // num_gpus
        values = shape.num_heads * latent.value_size // num_gpus
        up = shape.num_heads * (latent.nope_size + latent.value_size) // num_gpus
        return down + (latent.query_rank or hidden) + queries + latent.rank + up + values + hidden
    queries = shape.num_heads * shape.head_size // num_gpus
    keys = max(1, shape.num_kv_heads // num_gpus) * shape.head_size
    return 3 * hidden + queries + 2 * keys + queries + hidden


def _feed_forward(shape: Architecture, inner: int, num_gpus: int) -> int:
    """Return the same of a feed-forward of this inner size."""
    return (2 if shape.is_plain else 3) * (shape.hidden_size + inner // num_gpus)
