"""KV bytes agree with sizes worked out by hand, for grouped heads, latent vectors and sliding windows."""

import pytest

from serve_app.errors import ConfigError
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.kv_memory import kv_bytes_of_request, kv_bytes_per_token, kv_element_bytes, longest_context
from tests.sizing import shapes
from tests.sizing.shapes import Config


@pytest.mark.parametrize(
    ("config", "num_gpus", "num_bytes"),
    [
        (shapes.LLAMA_8B, 1, 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        (shapes.LLAMA_70B, 4, 81_920),  # 2 x 80 x 2 x 128 x 2
        (shapes.QWEN_32B, 1, 262_144),  # 2 x 64 x 8 x 128 x 2
        (shapes.QWEN3_235B, 8, 48_128),  # 2 x 94 x 1 x 128 x 2: a GPU holds at least one head
        (shapes.DEEPSEEK_V3, 8, 70_272),  # 61 x (512 + 64) x 2 on every GPU
        (shapes.GPT_OSS_120B, 1, 73_728),  # 2 x 36 x 8 x 64 x 2
    ],
)
def test_bytes_of_a_token(config: Config, num_gpus: int, num_bytes: int) -> None:
    assert kv_bytes_per_token(architecture_of(config, "config.json"), 2, num_gpus) == num_bytes


def test_vllm_found_the_same_bytes_on_four_h100() -> None:
    # vllm/issues/21348: Qwen3-235B-A22B-FP8 on 4 H100, 8.11 GiB of KV are 178,880 tokens.
    shape = architecture_of(shapes.QWEN3_235B_FP8, "config.json")
    assert pytest.approx(kv_bytes_per_token(shape, 2, 4), rel=0.015) == 8.11 * 2**30 / 178_880


def test_a_request_takes_whole_blocks() -> None:
    shape = architecture_of(shapes.LLAMA_8B, "config.json")
    assert kv_bytes_of_request(shape, 17, element=2, num_gpus=1, step_tokens=2048) == 32 * 131_072


def test_a_layer_with_a_sliding_window_holds_the_window_and_two_steps() -> None:
    shape = architecture_of(shapes.GPT_OSS_120B, "config.json")
    # 18 layers of 131,072 tokens, and 18 of 127 + 2 x 2,048 tokens in whole blocks, and a block: 4,224 + 16.
    layer = 2 * 8 * 64 * 2
    expected = layer * (18 * 131_072 + 18 * 4_240)
    assert kv_bytes_of_request(shape, 131_072, element=2, num_gpus=1, step_tokens=2048) == expected


@pytest.mark.parametrize("kv_bytes", [0, 1, 131_072 * 15, 131_072 * 16, 131_072 * 40_000, 2**50])
def test_the_longest_context_fits_and_a_block_more_does_not(kv_bytes: int) -> None:
    shape = architecture_of(shapes.LLAMA_8B, "config.json")
    longest = longest_context(shape, kv_bytes, element=2, num_gpus=1, step_tokens=2048)
    assert longest * 131_072 <= kv_bytes
    assert (longest + 16) * 131_072 > kv_bytes or longest == 131_072


@pytest.mark.parametrize(("config", "windowed"), [(shapes.QWEN_32B, 0), (shapes.GEMMA2_9B, 21), (shapes.GPT_OSS_120B, 18)])
def test_layers_with_a_window_are_counted(config: Config, windowed: int) -> None:
    assert architecture_of(config, "config.json").num_sliding_layers == windowed


def test_gemma_3_has_one_full_layer_in_six() -> None:
    shape = architecture_of(shapes.GEMMA3_27B, "config.json")
    assert (shape.num_full_layers, shape.num_sliding_layers) == (10, 52)


def test_linear_attention_holds_no_kv_and_is_noted() -> None:
    shape = architecture_of(shapes.QWEN3_235B | {"full_attention_interval": 4, "num_hidden_layers": 48}, "config.json")
    assert kv_bytes_per_token(shape, 2) == 2 * 12 * 4 * 128 * 2
    assert shape.notes[-1].startswith("36 layers of linear attention")


@pytest.mark.parametrize(
    ("named", "tokens"),
    [
        ({"seq_length": 8192}, 8192),
        ({"max_seq_len": 4096, "n_positions": 8192}, 4096),
        ({"model_max_length": 16384, "max_position_embeddings": 8192}, 16384),
    ],
)
def test_the_longest_context_has_several_names(named: Config, tokens: int) -> None:
    shape = architecture_of(shapes.LLAMA_8B | {"max_position_embeddings": None} | named, "config.json")
    assert (shape.max_tokens, shape.notes) == (tokens, ())


def test_a_file_without_a_longest_context_is_noted() -> None:
    shape = architecture_of(shapes.LLAMA_8B | {"max_position_embeddings": None}, "config.json")
    assert (shape.max_tokens, shape.notes) == (2048, ("the file names no longest context: 2,048 is assumed",))


def test_the_type_of_the_kv_cache_is_the_argument_else_the_checkpoint_else_the_weights() -> None:
    plain = architecture_of(shapes.LLAMA_8B, "config.json")
    asks = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}
    asking = architecture_of(shapes.LLAMA_8B | {"quantization_config": asks}, "config.json")
    found = [kv_element_bytes(plain, 2), kv_element_bytes(plain, 2, "fp8"), kv_element_bytes(asking, 2)]
    assert found == [2, 1, 1]
    with pytest.raises(ConfigError, match=r"^engine_args\.kv_cache_dtype: is 'int3'; fit knows auto, float16"):
        kv_element_bytes(plain, 2, "int3")
