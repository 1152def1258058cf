"""A config.json that no checkpoint has is refused in one sentence that names the key, whatever it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.autoscaling.capacity import Slo
from serve_app.cli.fit_report import as_json_value, lines_of
from serve_app.errors import ConfigError
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.checkpoint_files import config_file_of, read_config, tensor_bytes_of
from serve_app.sizing.estimate import Wish, estimate
from serve_app.sizing.fits import accelerator_named
from serve_app.sizing.rate import Load
from serve_app.sizing.weights import TensorBytes
from tests.sizing.shapes import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, QWEN3_235B

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted({*LLAMA_8B, *QWEN3_235B, *DEEPSEEK_V3, *GPT_OSS_120B, "rope_scaling", "text_config", "full_attention_interval"})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers: is -3, and should be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: is a number of more than 20 digits, and should be"),
        ({"hidden_size": "4096"}, "hidden_size: is '4096', and should be a whole number"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"num_attention_heads": 1.5}, "num_attention_heads: is 1.5, and"),
        ({"vocab_size": True}, "vocab_size: is True, and"),
        ({"layer_types": ["full_attention"]}, "layer_types: is a list of 1 entries, and should be a list of 32 texts"),
        ({"quantization_config": "fp8"}, "quantization_config: is 'fp8', and should be a mapping"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 0}}, "quantization_config.group_size: is 0"),
        ({"quantization_config": {"quant_method": "awq", "bits": "x"}}, "quantization_config.bits: is 'x', and"),
        ({"layer_types": ["mamba"] * 32}, "layer_types: has no layer of attention; "),
        ({"model_type": "gemma2"}, "head_dim: is missing; "),
        (
            {"model_type": "t5"},
            "model_type: is 't5'; fit sizes models that write text, and of encoders bert, roberta, xlm-roberta",
        ),
        ({"model_type": ["llama"]}, "model_type: is a list of 1 entries, and should be a text"),
    ],
)
def test_a_wrong_value_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        architecture_of(LLAMA_8B | changed, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [[], "text", 3, None])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="and no mapping; give a checkpoint's"):
        architecture_of(value, "config.json")


@given(
    base=st.sampled_from([LLAMA_8B, QWEN3_235B, DEEPSEEK_V3, GPT_OSS_120B]),
    changed=st.dictionaries(st.sampled_from(KEYS), JSON | st.integers(1, 2**24), max_size=4),
    gpu=st.sampled_from(["t4", "b200"]),
    rate=st.floats(1e-3, 1e6),
)
def test_any_value_gives_an_estimate_or_a_config_error(
    base: dict[str, Any], changed: dict[str, Any], gpu: str, rate: float
) -> None:
    load = Load(
        requests_per_s=rate, prompt_tokens=3, answer_tokens=2, slo=Slo(ttft_s=2, itl_s=0.1), utilization=0.95, headroom=0.4
    )
    try:
        shape = architecture_of(base | changed, "config.json")
        found = estimate(shape, None, Wish(accelerator=accelerator_named(gpu), engine_args={}, load=load))
    except ConfigError:
        return
    assert 0 < shape.num_full_layers + shape.num_sliding_layers <= shape.num_layers
    assert found.fit.fits == (found.fit.longest_context >= found.fit.context)
    assert found.fit.fits or found.replicas is None
    assert list(lines_of("m", found))
    assert json.dumps(as_json_value(found))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is no JSON: "),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"[" * 100_000, "nests too deep"),
        (b" " * ((4 << 20) + 1), "has more than 4194304 bytes"),
    ],
    ids=["cut off", "not text", "nested", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(config_file_of(tmp_path))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json; give the folder of a Hugging Face checkpoint"):
        config_file_of(tmp_path)


def test_a_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model\.gguf: is no config\.json; give the folder of a Hugging Face checkpoint"):
        config_file_of(tmp_path / "model.gguf")


def header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def test_headers_count_floats_by_element_and_other_tensors_by_byte(tmp_path: Path) -> None:
    plain = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    packed = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [16, 24]}
    (tmp_path / "model.safetensors").write_bytes(header({"__metadata__": {"format": "pt"}, "a": plain, "b": packed}))
    assert tensor_bytes_of(tmp_path, architecture_of(LLAMA_8B, "")) == TensorBytes(4, 16, 8)


def test_an_index_counts_while_its_shards_are_missing(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 1000}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_bytes_of(tmp_path, architecture_of(LLAMA_8B, "")) == TensorBytes(500, 1000, 0)
    quantized = architecture_of(LLAMA_8B | {"quantization_config": {"quant_method": "fp8"}}, "")
    assert tensor_bytes_of(tmp_path, quantized) == TensorBytes(0, 0, 1000)


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"total_size": 1000.0}, TensorBytes(500, 1000, 0)),
        ({"format": "pt"}, None),
        (None, None),
    ],
)
def test_an_index_may_lack_its_total_or_hold_it_as_a_float(tmp_path: Path, metadata: Any, found: TensorBytes | None) -> None:
    index = {"metadata": metadata, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_bytes_of(tmp_path, architecture_of(LLAMA_8B, "")) == found
    plain = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(header({"a": plain}))
    assert tensor_bytes_of(tmp_path, architecture_of(LLAMA_8B, "")) == TensorBytes(4, 16, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"\x00"),
        ("model.safetensors", (2**60).to_bytes(8, "little")),
        ("model.safetensors", header({"a": {"dtype": "F16", "data_offsets": [4, 2]}})),
        ("model.safetensors", header({"a": []})),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": -1}, "weight_map": {}}'),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": "many"}, "weight_map": {}}'),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": 1.5}, "weight_map": {}}'),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": NaN}, "weight_map": {}}'),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": 10}}'),
        ("model.safetensors.index.json", b'{"metadata": 3, "weight_map": {}}'),
        ("model.safetensors.index.json", b"[]"),
    ],
)
def test_damaged_files_of_weights_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        tensor_bytes_of(tmp_path, architecture_of(LLAMA_8B, ""))
