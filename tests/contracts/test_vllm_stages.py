"""`serve-app fit` divides a model into pipeline stages as vLLM does, and counts the parameters that vLLM allocates on each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.stages import stages_of
from serve_app.sizing.weights import parameters_of
from tests.contracts.test_vllm_lora_memory import SMALL, FakeGroup
from tests.sizing import shapes

FEW = SMALL | {"num_hidden_layers": 5}
"""Three stages of them have 2, 2 and 1."""
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": shapes.LLAMA_8B | FEW | {"head_dim": 16},
    "llama tied": shapes.LLAMA_8B | FEW | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": shapes.QWEN_32B | FEW,
    "qwen3": shapes.QWEN3_32B | FEW,
    "gemma2": shapes.GEMMA2_9B | FEW,
    "gemma3": shapes.GEMMA3_27B | FEW,
    "phi3": shapes.PHI3_MINI_128K | FEW | {"rope_scaling": None, "pad_token_id": 0},
    "opt": {
        **FEW,
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "num_key_value_heads": 8,
    },
    "granite": shapes.LLAMA_8B | FEW | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]},
    "mixtral": shapes.MIXTRAL | FEW | {"num_local_experts": 4},
    "qwen3_moe": shapes.QWEN3_235B | FEW | MOE,
    "deepseek_v3": shapes.DEEPSEEK_V3 | FEW | MOE,
}


@dataclass(frozen=True)
class FakeExpertGroup(FakeGroup):
    """The one process that holds all experts, as layers of experts ask for it when they are made."""

    @property
    def device_group(self) -> "FakeExpertGroup":
        return self

    def rank(self) -> int:
        return self.rank_in_group

    def size(self) -> int:
        return self.world_size


def test_the_layers_of_a_stage_are_those_of_vllm() -> None:
    for num_layers in (1, 2, 5, 12, 30, 32, 61, 62, 80, 94, 126):
        shape = architecture_of(shapes.LLAMA_8B | {"num_hidden_layers": num_layers}, "config.json")
        for num in range(1, min(num_layers, 16) + 1):
            ranges = [get_pp_indices(num_layers, rank, num) for rank in range(num)]
            assert [stage.num_layers for stage in stages_of(shape, num)] == [end - start for start, end in ranges]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_stage_are_those_that_vllm_allocates(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for group in ("_TP", "_EP", "_DP", "_PCP", "_DCP"):
        if hasattr(parallel_state, group):
            monkeypatch.setattr(parallel_state, group, FakeExpertGroup(1))
    monkeypatch.setattr(parallel_state, "_PP", FakeGroup(3, rank, rank == 0, rank == 2))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    whole = args.create_engine_config()
    with set_current_vllm_config(whole), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        model = initialize_model(vllm_config=whole)
    allocated = sum(each.numel() for each in model.parameters())
    stage = stages_of(architecture_of(config, name), 3)[rank]
    assert parameters_of(stage).total == allocated
