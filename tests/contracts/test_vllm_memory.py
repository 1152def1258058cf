"""`serve-app fit` counts KV, contexts, limits and parameters as vLLM and Transformers do for the same config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.cache import CacheConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from serve_app.checkpoints import make_tiny_llama, make_tiny_opt, resolve_model
from serve_app.config import default_cache_dir
from serve_app.errors import CheckpointError
from serve_app.simulated.profiles import ACCELERATORS, Accelerator
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.checkpoint_files import read_config, tensor_bytes_of
from serve_app.sizing.fits import DEFAULT_UTILIZATION, HIDDEN_BYTES, batch_defaults
from serve_app.sizing.kv_memory import BLOCK_TOKENS, kv_bytes_of_request, kv_bytes_per_token
from serve_app.sizing.weights import parameters_of
from tests.contracts.changes import find
from tests.contracts.tables import IS_NEWER
from tests.contracts.test_engine_defaults import FakePlatform
from tests.sizing import shapes

DENSE = {
    "llama-8b": shapes.LLAMA_8B,
    "llama-70b": shapes.LLAMA_70B,
    "qwen2.5-32b": shapes.QWEN_32B,
    "mixtral-8x7b": shapes.MIXTRAL,
    "qwen3-235b": shapes.QWEN3_235B,
    "deepseek-v3": shapes.DEEPSEEK_V3,
    "llama-8b linear": shapes.LLAMA_8B_LINEAR,
    "qwen2.5-32b yarn": shapes.QWEN_32B_YARN,
    "phi3-mini-128k": shapes.PHI3_MINI_128K,
}
NAMES = {"a100-80gb": "NVIDIA A100-SXM4-80GB", "a100-40gb": "NVIDIA A100-SXM4-40GB"}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def kv_bytes_of_vllm(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the bytes of a token on a GPU, by the pages that vLLM allocates for each layer."""
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    page = kind(
        block_size=BLOCK_TOKENS,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=torch.bfloat16,
    )
    num_bytes: int = model.get_num_layers(parallel) * page.page_size_bytes
    return num_bytes // BLOCK_TOKENS


@pytest.mark.parametrize("num_gpus", [1, 8])
@pytest.mark.parametrize("name", DENSE)
def test_kv_bytes_and_the_longest_context_are_those_of_vllm(name: str, num_gpus: int, tmp_path: Path) -> None:
    config = DENSE[name]
    model = ModelConfig(written(tmp_path, config), skip_tokenizer_init=True)
    parallel = ParallelConfig(tensor_parallel_size=num_gpus, distributed_executor_backend="mp")
    shape = architecture_of(config, "config.json")
    assert kv_bytes_per_token(shape, 2, num_gpus) == kv_bytes_of_vllm(model, parallel)
    assert shape.default_tokens == model.max_model_len


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (shapes.LLAMA_8B_LINEAR, 20480),
        (shapes.QWEN_32B_YARN, 131072),
        (shapes.QWEN_32B_YARN | {"max_position_embeddings": 32768}, 32768),
        (shapes.PHI3_MINI_128K, 131072),
        (shapes.GEMMA3_27B_LINEAR, 131072),
        (shapes.LLAMA_8B | {"seq_length": 4096}, 4096),
        (shapes.LLAMA_8B | {"model_max_length": 262144}, 262144),
    ],
    ids=["linear", "yarn", "yarn of a short file", "longrope", "gemma3", "seq_length", "model_max_length"],
)
def test_the_longest_context_that_may_be_asked_for_is_that_of_vllm(config: dict[str, Any], most: int, tmp_path: Path) -> None:
    assert architecture_of(config, "config.json").max_tokens == most
    model = ModelConfig(written(tmp_path, config), skip_tokenizer_init=True, max_model_len=most)
    assert model.max_model_len == most
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        ModelConfig(str(tmp_path), skip_tokenizer_init=True, max_model_len=most + 1)


def kv_cache_config(whole: VllmConfig, specs: dict[str, Any], memory: int) -> Any:
    """Return how vLLM divides the memory of a worker with these layers."""
    module = "vllm.v1.core.kv_cache_planning" if IS_NEWER else "vllm.v1.core.kv_cache_utils"
    groups = [find(module, "get_global_kv_cache_groups")(whole, [specs])] if IS_NEWER else []
    (config,) = find(module, "get_kv_cache_configs")(whole, [specs], [memory], *groups)
    return config


@pytest.mark.parametrize(
    ("config", "context"), [(shapes.GEMMA2_9B, 8192), (shapes.GEMMA3_27B, 16384), (shapes.GEMMA3_27B, 131072)]
)
def test_requests_with_sliding_windows_are_within_the_error_that_fit_prints(
    config: dict[str, Any], context: int, tmp_path: Path
) -> None:
    shape = architecture_of(config, "config.json")
    model = ModelConfig(written(tmp_path, config), skip_tokenizer_init=True, max_model_len=context)
    scheduler = SchedulerConfig(
        max_model_len=context, is_encoder_decoder=False, max_num_batched_tokens=2048, async_scheduling=True
    )
    whole = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=BLOCK_TOKENS), scheduler_config=scheduler)
    whole.cache_config.kv_cache_layout = "LBNHC"  # an engine core resolves it
    whole.scheduler_config.async_scheduling = True  # as on a GPU
    layer = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": torch.bfloat16,
    }
    every = shape.num_layers // shape.num_full_layers
    specs = {
        str(n): FullAttentionSpec(**layer)
        if n % every == every - 1
        else SlidingWindowSpec(**layer, sliding_window=shape.sliding_window)
        for n in range(shape.num_layers)
    }
    cache = kv_cache_config(whole, specs, 40 << 30)
    fits = (40 << 30) / kv_bytes_of_request(shape, context, element=2, num_gpus=1, step_tokens=2048)
    assert 0.85 * fits < get_max_concurrency_for_kv_cache_config(whole, cache) < 1.01 * fits


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_opt])
def test_checkpoints_of_this_repository_count_as_vllm_counts_them(make: Any, tmp_path: Path) -> None:
    _compare(make(tmp_path / "tiny"))


def test_the_embedded_model_counts_as_vllm_counts_it() -> None:
    try:
        folder = Path(resolve_model("embedded:smollm2-135m-instruct", default_cache_dir()))
    except CheckpointError:
        pytest.skip("the embedded model is not fetched")
    _compare(folder)


def _compare(folder: Path) -> None:
    shape = architecture_of(read_config(folder / "config.json"), str(folder))
    model = ModelConfig(str(folder), skip_tokenizer_init=True)
    assert kv_bytes_per_token(shape, 2) == kv_bytes_of_vllm(model, ParallelConfig())
    files = tensor_bytes_of(folder, shape)
    assert files is not None
    assert files.plain == parameters_of(shape).total  # by the shape alone, and by the headers of the files


@pytest.mark.parametrize("name", [*DENSE, "gemma2-9b", "llama-1b"])
def test_parameters_are_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    config = {**DENSE, "gemma2-9b": shapes.GEMMA2_9B, "llama-1b": shapes.LLAMA_1B}[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(written(tmp_path, config)))
    counted = parameters_of(architecture_of(config, "config.json")).total
    assert counted == pytest.approx(sum(each.numel() for each in model.parameters()), rel=1e-5)


@pytest.mark.parametrize("accelerator", ACCELERATORS.values(), ids=lambda each: each.name)
def test_the_defaults_of_a_step_are_those_of_vllm(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    name = NAMES.get(accelerator.name, f"NVIDIA {accelerator.name.upper()}")
    seen = (accelerator.memory_bytes - HIDDEN_BYTES) / 2**30
    monkeypatch.setattr(arg_utils, "current_platform", FakePlatform(name, seen))
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    assert batch_defaults(accelerator) == (tokens[UsageContext.OPENAI_API_SERVER], seqs[UsageContext.OPENAI_API_SERVER])


def test_the_default_share_of_the_memory_is_that_of_vllm() -> None:
    assert CacheConfig().gpu_memory_utilization == DEFAULT_UTILIZATION
