"""These tests check the files of a replica's LoRA adapters, and compare a real engine's answers with those of merged weights."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from serve_app.checkpoints import make_tiny_adapter, make_tiny_llama
from serve_app.errors import ConfigError, EngineStartFailed
from serve_app.replica.adapters import check_sums, files_of, max_rank
from tests.replica.answering import engine, greedy

RANK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model `base` and its adapters `pirate` and `lawyer`."""
    root = tmp_path_factory.mktemp("adapters")
    make_tiny_llama(root / "base")
    for seed, name in enumerate(("pirate", "lawyer"), start=7):
        make_tiny_adapter(root / name, rank=RANK, seed=seed)
    return root


def adapter(path: Path, **fields: Any) -> Mapping[str, Any]:
    return {"name": "pirate", "number": 70_000, "path": str(path), "sha256": None, **fields}


@pytest.mark.parametrize(
    ("config", "limit"), [({"r": 8}, 8), ({"r": 9}, 16), ({"r": 8, "rank_pattern": {"q_proj": 100}}, 128), ({"r": 2}, 8)]
)
def test_the_rank_limit_is_vllm_s_least_that_fits(tmp_path: Path, config: dict[str, Any], limit: int) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert max_rank([adapter(tmp_path)]) == limit


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            None,
            "adapters.pirate.path: is {0}, and adapter_config.json in it cannot be read: No such file or directory; put the adapter's",
        ),
        ("{}", "adapters.pirate.path: is {0}, whose adapter_config.json has no rank (r) to be read; export it by PEFT"),
        ("[1]", "adapters.pirate.path: is {0}, whose adapter_config.json has no rank (r) to be read; export it by PEFT"),
        ('{"r": 1000}', "adapters: have a rank of 1000; vLLM takes 512 at most"),
    ],
)
def test_a_folder_that_is_no_adapter_is_reported_by_its_name(tmp_path: Path, config: str | None, said: str) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError) as refused:
        max_rank([adapter(tmp_path)])
    assert str(refused.value).startswith(said.format(tmp_path))


def test_other_weights_than_the_configured_ones_are_refused(folder: Path) -> None:
    path = folder / "pirate" / "adapter_model.safetensors"
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    check_sums([adapter(path.parent, sha256=right), adapter(path.parent)])
    with pytest.raises(ConfigError, match=f"adapters.pirate.sha256: is {'0' * 64}, and {path} has {right}; "):
        check_sums([adapter(path.parent, sha256="0" * 64)])


def test_without_weights_there_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"which has no adapter_model.safetensors or adapter_model.bin; put the adapter's folder there"
    ):
        list(files_of([adapter(tmp_path)]))


def merged(base: Path, lora: Path, target: Path) -> Path:
    """Make a checkpoint with the adapter's product added to each weight that it is for: alpha / rank is 2."""
    shutil.copytree(base, target)
    weights, parts = load_file(base / "model.safetensors"), load_file(lora / "adapter_model.safetensors")
    for name, down in parts.items():
        if name.endswith(".lora_A.weight"):
            up = parts[name.replace("lora_A", "lora_B")]
            weights[name.removeprefix("base_model.model.").replace(".lora_A", "")] += 2.0 * (up @ down)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.engine
def test_each_request_of_a_batch_is_answered_by_its_own_adapter(folder: Path, tmp_path: Path) -> None:
    async def ask() -> dict[str, list[int]]:
        adapters = {name: {"path": str(folder / name)} for name in ("pirate", "lawyer")}
        async with engine(folder / "base", adapters=adapters) as started:
            return await started.ask(["pirate", "base", "lawyer"])

    answers = asyncio.run(ask())
    expected = {"base": greedy(folder / "base")}
    for name in ("pirate", "lawyer"):
        expected[name] = greedy(merged(folder / "base", folder / name, tmp_path / name))
    assert answers == expected
    assert len({tuple(answer) for answer in expected.values()}) == 3


@pytest.mark.engine
def test_an_adapter_of_another_model_fails_the_start_and_is_named(folder: Path, tmp_path: Path) -> None:
    lora = shutil.copytree(folder / "pirate", tmp_path / "wide")
    weights = load_file(lora / "adapter_model.safetensors")
    wide = {name: value.repeat(2, axis=1) if "lora_A" in name else value for name, value in weights.items()}
    save_file(wide, lora / "adapter_model.safetensors")

    async def start() -> None:
        async with engine(folder / "base", adapters={"wide": {"path": str(lora)}}):
            pass

    with pytest.raises(EngineStartFailed, match=rf"adapters.wide.path: is {lora}, which vLLM cannot load; "):
        asyncio.run(start())
