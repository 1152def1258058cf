"""`serve-app fit` counts the places for LoRA adapters as vLLM allocates them for small models of each compared family."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from serve_app.sizing.adapters import COMPARED, DEFAULT_RANK, RANK_LIMITS, Places
from serve_app.sizing.architecture import architecture_of
from tests.sizing import shapes

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
}
FAMILIES = {
    "llama": shapes.LLAMA_8B | {"head_dim": 16},
    "mistral": shapes.LLAMA_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "qwen2": shapes.QWEN_32B,
    "qwen3": shapes.QWEN3_32B,
    "gemma2": shapes.GEMMA2_9B,
}


@dataclass(frozen=True)
class FakeGroup:
    """The processes that share a layer, as layers ask for them when they are made."""

    world_size: int
    rank_in_group: int = 0
    is_first_rank: bool = True
    is_last_rank: bool = True


def test_the_compared_families_are_those_of_this_test() -> None:
    assert FAMILIES.keys() == COMPARED


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_places_have_the_bytes_that_vllm_allocates(
    family: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = FAMILIES[family] | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(parallel_state, "_TP", FakeGroup(num_gpus))
    monkeypatch.setattr(parallel_state, "_PP", FakeGroup(1))
    args = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        max_model_len=64,
        max_num_batched_tokens=64,
    )
    whole = args.create_engine_config()
    with set_current_vllm_config(whole), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=whole)
        manager = LoRAModelManager(model, 8, 64, config["vocab_size"], whole.lora_config, torch.device("cpu"), whole)
    places = Places(num=3, rank=8)
    assert places.bytes_on_each_gpu(architecture_of(config, family), 2, num_gpus) == sum(allocated(manager))


def allocated(manager: LoRAModelManager) -> Iterator[int]:
    """Yield the bytes of each matrix A and B. A layer of several parts has a tuple of them."""
    for layer in manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            yield sum(part.nbytes for part in stacked) if isinstance(stacked, tuple) else stacked.nbytes


def test_the_ranks_are_those_of_vllm() -> None:
    assert (get_args(MaxLoRARanks), LoRAConfig().max_lora_rank) == (RANK_LIMITS, DEFAULT_RANK)
