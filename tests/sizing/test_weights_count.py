"""Parameters and bytes of weights agree with what the models' makers and vLLM's logs say."""

import pytest

from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.quantization import online_quantization
from serve_app.sizing.weights import TensorBytes, bytes_on_each_gpu, parameters_of, weight_bytes
from tests.sizing import shapes
from tests.sizing.shapes import Config

GIB = 2**30


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (shapes.LLAMA_8B, 8_030_261_248, 8_030_261_248),  # model card, as MODELS of serve_app/simulated/profiles.py
        (shapes.LLAMA_1B, 1_235_814_400, 1_235_814_400),  # safetensors header of Llama-3.2-1B on the hub
        (shapes.QWEN_32B, 32_763_876_352, 32_763_876_352),  # the hub: 32.8 B
        (shapes.QWEN3_32B, 32_762_123_264, 32_762_123_264),  # model card: 32.8 B
        (shapes.QWEN3_EMBEDDING, 595_776_512, 595_776_512),  # the hub: 596 M
        (shapes.LLAMA_70B, 70_553_706_496, 70_553_706_496),  # the hub: 70.6 B
        (shapes.MIXTRAL, 46_702_792_704, 12_879_925_248),  # paper: 47 B and 13 B
        (shapes.QWEN3_235B, 235_093_634_560, 22_190_763_520),  # model card: 235 B and 22 B
        (shapes.BGE_M3, 566_705_152, 566_705_152),  # transformers' XLMRobertaModel without pooler
        (shapes.BERT_BASE, 108_891_648, 108_891_648),  # transformers' BertModel without pooler
        (shapes.GEMMA2_9B, 9_241_705_984, 9_241_705_984),  # the hub: 9.24 B
    ],
)
def test_the_counts_are_the_published_ones(config: Config, total: int, active: int) -> None:
    counts = parameters_of(architecture_of(config, "config.json"))
    assert (counts.total, counts.active) == (total, active)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(shapes.DEEPSEEK_V3, 671.0, 37.0), (shapes.GPT_OSS_120B, 116.8, 5.1), (shapes.LLAMA_405B, 405.9, 405.9)],
)
def test_counts_of_the_largest_models_are_near_those_of_their_papers(config: Config, billions: float, active: float) -> None:
    counts = parameters_of(architecture_of(config, "config.json"))
    assert counts.total / 1e9 == pytest.approx(billions, rel=0.001)
    assert counts.active / 1e9 == pytest.approx(active, rel=0.12)  # makers count embeddings differently


@pytest.mark.parametrize(
    ("config", "num_gpus", "gib", "error"),
    [
        # vLLM's "Model loading took" and "Loading model weights took ... GB", which are GiB.
        (shapes.LLAMA_8B, 1, 14.96, 0.001),  # github.com/vllm-project/vllm/pull/10511
        (shapes.LLAMA_8B, 2, 7.48, 0.001),  # the same
        (shapes.QWEN_14B, 2, 13.9476, 0.02),  # vllm/issues/13061
        (shapes.LLAMA_405B_FP8, 8, 57.752, 0.03),  # vllm/issues/6746
        (shapes.LLAMA_70B_FP8, 1, 67.7229, 0.01),  # vllm/pull/12569: 8-bit weights
    ],
)
def test_weights_on_each_gpu_are_what_vllm_reports(config: Config, num_gpus: int, gib: float, error: float) -> None:
    shape = architecture_of(config, "config.json")
    counts = parameters_of(shape)
    own = bytes_on_each_gpu(shape, counts, weight_bytes(shape, counts, element=2), num_gpus)
    assert own / GIB == pytest.approx(gib, rel=error)


@pytest.mark.parametrize(
    ("quantization", "gigabytes"),
    [
        # By hand for Llama 3.1 8B: 6,979,321,856 linear + 1,050,939,392 other parameters x 2 bytes.
        ({"quant_method": "fp8"}, 6.9793 + 2.1019),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 6.9793 * (4 + 20 / 128) / 8 + 2.1019),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 6.9793 / 2 + 2.1019),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 6.9793 + 2.1019),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 6.9793 * 4.5 / 8 + 2.1019),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 6.9793 * 4.5 / 8 + 2.1019),
        ({"quant_method": "from-the-future"}, 16.0605),  # 16 bits, with a note
        (None, 16.0605),
    ],
)
def test_quantization_changes_linear_layers_only(quantization: Config | None, gigabytes: float) -> None:
    shape = architecture_of(shapes.LLAMA_8B | {"quantization_config": quantization}, "config.json")
    assert weight_bytes(shape, parameters_of(shape), element=2) / 1e9 == pytest.approx(gigabytes, rel=0.001)


@pytest.mark.parametrize(("num_layers", "num_left", "keeps"), [(4, 4, True), (126, 126, True), (126, 125, False)])
def test_attention_keeps_its_type_if_all_layers_are_left_out_one_by_one(num_layers: int, num_left: int, keeps: bool) -> None:
    names = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(num_left) for part in "qkvo"]
    stored = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": names}}
    quantization = architecture_of(shapes.LLAMA_1B | stored | {"num_hidden_layers": num_layers}, "").quantization
    assert quantization is not None
    assert quantization.keeps_attention is keeps


def test_weights_quantized_while_they_are_loaded_count_like_those_of_a_quantized_checkpoint() -> None:
    shape = architecture_of(shapes.LLAMA_8B, "config.json")
    counts = parameters_of(shape)
    stored = TensorBytes(counts.total, 2 * counts.total, 0)
    online = weight_bytes(shape, counts, element=2, files=stored, online=online_quantization("fp8"))
    assert online == counts.linear + 2 * (counts.total - counts.linear)


def test_a_checkpoint_of_32_bits_takes_16_bits_on_a_gpu() -> None:
    shape = architecture_of(shapes.LLAMA_8B, "config.json")
    counts = parameters_of(shape)
    files = TensorBytes(counts.total, 4 * counts.total, 0)
    assert weight_bytes(shape, counts, element=2, files=files) == 2 * counts.total


def test_gpus_beyond_the_kv_heads_hold_copies_of_them() -> None:
    shape = architecture_of(shapes.LLAMA_8B | {"num_key_value_heads": 2}, "config.json")
    counts = parameters_of(shape)
    total = 2 * counts.total
    # k and v: 2 x 32 layers x 4,096 x 2 heads x 128 x 2 bytes, held 4 times by 8 GPUs; 65 norms of 4,096 on each.
    kv, norms = 2 * 32 * 4096 * 2 * 128 * 2, 65 * 4096 * 2
    assert bytes_on_each_gpu(shape, counts, total, 8) == (total - norms + 3 * kv) // 8 + norms
