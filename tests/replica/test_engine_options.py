"""Speculative decoding and quantized weights by configuration: a real engine on the CPU answers as Transformers does."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from serve_app.checkpoints import make_tiny_llama
from tests.replica.answering import engine, greedy

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def answer(checkpoint: Path, **engine_args: Any) -> list[int]:
    async def ask() -> list[int]:
        async with engine(checkpoint, engine_args={"max_model_len": 256, **engine_args}) as started:
            return (await started.ask(["base"]))["base"]

    return asyncio.run(ask())


@pytest.mark.engine
@pytest.mark.slow
def test_speculative_decoding_changes_no_answer(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base")
    assert answer(base, speculative_config=SPECULATIVE) == greedy(base)


def eight_bits(base: Path, target: Path, whole: Path) -> None:
    """Make two checkpoints of ``base``: one with 8-bit integers for its linear layers, and one with the numbers that these represent.

    The format is that of compressed-tensors, with a scale for each row of weights; the engine quantizes activations token by token.
    """
    made, meant = {}, {}
    for name, weights in load_file(base / "model.safetensors").items():
        made[name] = meant[name] = weights
        if name.endswith("_proj.weight"):
            scale = abs(weights).max(axis=1, keepdims=True) / 127
            made[name] = (weights / scale).round().astype("int8")
            made[f"{name}_scale"] = scale
            meant[name] = made[name] * scale
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel", "dynamic": False},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((base / "config.json").read_text())
    quantized = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    for folder, weights_of, more in ((target, made, {"quantization_config": quantized}), (whole, meant, {})):
        shutil.copytree(base, folder)
        save_file(weights_of, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more))


@pytest.mark.engine
@pytest.mark.slow
def test_a_quantized_checkpoint_answers_as_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base")
    eight_bits(base, tmp_path / "int8", tmp_path / "whole")
    assert answer(tmp_path / "int8") == greedy(tmp_path / "whole")
