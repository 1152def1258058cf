"""The fingerprint is that of a model's configuration file, however vLLM changed its copy of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import ModelSettings
from serve_app.engine_args import engine_core_args, frontend_engine_args
from serve_app.links.fingerprint import model_fingerprint

LLAMA = {"model_type": "llama", "vocab_size": 512, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def fingerprint(folder: Path, **fields: Any) -> str:
    """Return the fingerprint of the ``ModelConfig`` of ``folder``."""
    known: dict[str, Any] = {
        "model": str(folder),
        "hf_config_path": None,
        "trust_remote_code": False,
        "revision": None,
        "code_revision": None,
        "config_format": "auto",
        "hf_token": None,
        "hf_overrides": {},
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
    }
    return model_fingerprint(SimpleNamespace(**{**known, **fields}))


def test_the_maximum_length_and_the_path_are_not_part_of_it_but_the_configuration_is(checkpoint: Path, tmp_path: Path) -> None:
    before = fingerprint(checkpoint)
    assert before == fingerprint(checkpoint, max_model_len=1024) == fingerprint(checkpoint.rename(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere/config.json").write_text(json.dumps({**LLAMA, "vocab_size": 513}))
    assert fingerprint(tmp_path / "elsewhere") != before


def test_what_loading_writes_into_vllms_copy_of_the_configuration_changes_nothing(checkpoint: Path) -> None:
    written = SimpleNamespace(num_labels=1, sliding_window=None, tie_word_embeddings=False)
    assert fingerprint(checkpoint) == fingerprint(checkpoint, hf_config=written, hf_text_config=written)


@pytest.mark.parametrize("overrides", [{"vocab_size": 256}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_overrides_are_part_of_it(checkpoint: Path, overrides: dict[str, Any]) -> None:
    assert fingerprint(checkpoint, hf_overrides=overrides) != fingerprint(checkpoint)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that claims tied embeddings and has an ``lm_head``, and whose attention slides."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("sliding") / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 64,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.engine
@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"disable_sliding_window": True},
        {"load_format": "dummy"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"max_model_len": 32, "enforce_eager": False, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_an_engine_and_its_front_end_agree_whatever_the_engines_arguments(sliding: Path, engine_args: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = ModelSettings(name="m", model=str(sliding), engine_args=engine_args)
    both = engine_core_args(model, model.model), frontend_engine_args(model, model.model)
    engine, front_end = (AsyncEngineArgs(**arguments).create_engine_config().model_config for arguments in both)
    engine.hf_config.update({"written": "by the model while it was loaded"})
    assert model_fingerprint(engine) == model_fingerprint(front_end)
