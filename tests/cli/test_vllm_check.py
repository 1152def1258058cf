"""`serve-app check` asks vLLM itself, without a GPU and without weights."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.checkpoints import make_tiny_llama
from serve_app.cli.main import app
from serve_app.cli.vllm_check import _hint, _key_in, local_checkpoints
from serve_app.config import parse_settings

WRONG: dict[str, dict[str, Any]] = {
    "long": {"engine_args": {"max_model_len": 20480}},
    "lora": {"engine_args": {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}},
    "long-on-a-gpu": {"engine_args": {"max_model_len": 20480}, "device": "cuda", "gpus_per_replica": 1},
    "template": {"frontend_args": {"chat_template": "/nowhere.jinja"}},
    "quantization": {"engine_args": {"quantization": "fpp8"}},
}
SAID = {
    "long": "engine_args.max_model_len: User-specified max_model_len (20480) is greater than the derived max_model_len ",
    "lora": "engine_args.max_loras: max_cpu_loras (2) must be >= max_loras (4).",
    "long-on-a-gpu": "engine_args.max_model_len: User-specified max_model_len (20480) is greater than ",
    "template": "frontend_args.chat_template: VLLMValidationError: The supplied chat template (/nowhere.jinja) looks like a file path",
    "quantization": "engine_args.quantization: Unknown quantization method: fpp8. Must be one of ",
}


@pytest.mark.engine
def test_what_vllm_refuses_is_told_by_model_and_key_and_what_it_takes_is_not(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    right: dict[str, dict[str, Any]] = {
        "good": {"engine_args": {"max_model_len": 64, "enable_lora": True}},
        "elsewhere": {"model": "an/id"},
    }
    vision = tmp_path / "vision"
    vision.mkdir()
    (vision / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}')
    wrong = WRONG | {"vision": {"model": str(vision)}}
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump({"models": {n: {"model": str(folder), **m} for n, m in (right | wrong).items()}}, sort_keys=False)
    )
    result = CliRunner().invoke(app, ["check", str(file)])
    asking, *lines, last = result.output.splitlines()
    assert (result.exit_code, asking) == (1, "asking vLLM, which takes 10 to 30 s (--no-vllm leaves it out)")
    assert len(lines) == len(WRONG), result.output
    for (name, said), line in zip(SAID.items(), lines, strict=True):
        assert line.startswith(f"error: {file}: models.{name}.{said}"), line
    assert last.startswith(
        f"error: {file}: models.vision: Model architectures ['Gemma3ForConditionalGeneration'] failed to be inspected."
    )
    assert last.endswith("; this Python lacks torchvision; for torchvision and torchaudio, give all pods the CUDA image")


@pytest.mark.parametrize(
    ("said", "log", "missing"),
    [
        ("ModuleNotFoundError: No module named 'torchvision'", "", "torchvision"),
        ("ImportError: SmolVLMVideoProcessor requires the Torchvision library but it was not found", "", "torchvision"),
        ("['A'] failed to be inspected", "ModuleNotFoundError: No module named 'torchaudio'\n" * 2, "torchaudio"),
        ("ValueError: x", "ModuleNotFoundError: No module named 'torchaudio'", ""),
    ],
)
def test_the_package_that_a_model_lacks_is_told(said: str, log: str, missing: str) -> None:
    told = f"this Python lacks {missing}; for torchvision and torchaudio, give all pods the CUDA image"
    assert _hint(said, log) == (told if missing else "")


def test_a_checkpoint_that_is_not_here_is_not_asked_about(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    models = {"id": {"model": "an/id"}, "absent": {"model": "/nowhere"}, "empty": {"model": str(tmp_path / "empty")}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"models": models}, sort_keys=False))
    assert local_checkpoints(parse_settings({"models": models})) == {}
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0
    assert "note: vLLM was not asked about id, absent, empty: only names, types and ranges of its arguments" in result.output


def test_a_refusal_that_names_no_argument_is_the_models() -> None:
    settings = parse_settings({"models": {"a": {"model": "/a", "engine_args": {"seed": 1}}}})
    assert _key_in(settings.models["a"], "no such file") == "models.a"
    assert _key_in(settings.models["a"], "seed must be None") == "models.a.engine_args.seed"
