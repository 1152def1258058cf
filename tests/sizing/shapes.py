"""This module holds the facts of published config.json files that memory depends on, for the tests of sizes.

Only keys that decide about memory are kept. The sources are the models' own repositories on the Hugging Face hub.
"""

from typing import Any

Config = dict[str, Any]


def _config(family: str, architecture: str, **keys: Any) -> Config:
    return {"model_type": family, "architectures": [architecture], "dtype": "bfloat16", **keys}


LLAMA_8B = _config(
    "llama",
    "LlamaForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_70B_FP8 = LLAMA_70B | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
FP8_DYNAMIC = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
LLAMA_8B_FP8 = LLAMA_8B | {"quantization_config": FP8_DYNAMIC}
LLAMA_70B_DYNAMIC = LLAMA_70B | {"quantization_config": FP8_DYNAMIC}
LLAMA_405B = LLAMA_8B | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
LLAMA_405B_FP8 = LLAMA_405B | {
    "quantization_config": {
        "quant_method": "fbgemm_fp8",
        "modules_to_not_convert": [f"model.layers.{n}.self_attn.{part}_proj" for n in range(126) for part in "qkvo"],
    }
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN_32B = _config(
    "qwen2",
    "Qwen2ForCausalLM",
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    max_position_embeddings=32768,
    sliding_window=131072,
    use_sliding_window=False,
    tie_word_embeddings=False,
)
QWEN_14B = QWEN_32B | {"intermediate_size": 13824, "num_hidden_layers": 48, "max_position_embeddings": 131072}
QWEN3_32B = _config(
    "qwen3",
    "Qwen3ForCausalLM",
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
QWEN3_32B_AWQ = QWEN3_32B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
QWEN3_32B_FP8 = QWEN3_32B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
QWEN3_EMBEDDING = QWEN3_32B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 151669,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
BGE_M3 = _config(
    "xlm-roberta",
    "XLMRobertaModel",
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    vocab_size=250002,
    max_position_embeddings=8194,
    type_vocab_size=1,
)
BERT_BASE = _config(
    "bert",
    "BertForMaskedLM",
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    vocab_size=30522,
    max_position_embeddings=512,
    type_vocab_size=2,
)
MIXTRAL = _config(
    "mixtral",
    "MixtralForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=32768,
    num_local_experts=8,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
QWEN3_235B = _config(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    num_experts=128,
    num_experts_per_tok=8,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    tie_word_embeddings=False,
)
QWEN3_235B_FP8 = QWEN3_235B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GEMMA2_9B = _config(
    "gemma2",
    "Gemma2ForCausalLM",
    hidden_size=3584,
    intermediate_size=14336,
    num_hidden_layers=42,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=256000,
    max_position_embeddings=8192,
    sliding_window=4096,
)
GEMMA3_27B = GEMMA2_9B | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
}
LLAMA_8B_LINEAR = LLAMA_8B | {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
GEMMA3_27B_LINEAR = GEMMA3_27B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
QWEN_32B_YARN = QWEN_32B | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "max_position_embeddings": 131072,
}
PHI3_MINI_128K = _config(
    "phi3",
    "Phi3ForCausalLM",
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32064,
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_scaling={"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.1] * 48},
    sliding_window=262144,
    tie_word_embeddings=False,
)
DEEPSEEK_V3 = _config(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    vocab_size=129280,
    max_position_embeddings=163840,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    n_group=8,
    topk_group=4,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    tie_word_embeddings=False,
)
GPT_OSS_120B = _config(
    "gpt_oss",
    "GptOssForCausalLM",
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    max_position_embeddings=131072,
    num_local_experts=128,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    tie_word_embeddings=False,
)
