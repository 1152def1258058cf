"""A checkpoint's folder is whole if its weights are there: those that the index names where vLLM goes by it, or else any."""

import json
from pathlib import Path

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.checkpoints.complete import missing_weights

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = {"weight_map": {"a": FIRST, "b": SECOND, "c": FIRST}}
SAFETENSORS, BIN = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def fill(folder: Path, *names: str, indexes: dict[str, object] | None = None) -> Path:
    for name in names:
        (folder / name).write_bytes(b"weights")
    for name, content in (indexes or {}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("names", "indexes"),
    [
        (("model.safetensors",), {}),
        (("pytorch_model.bin", "training_args.bin"), {}),
        (("consolidated.00.pth",), {}),
        (("model.Q4_K_M.gguf",), {}),
        ((FIRST, SECOND), {}),
        ((FIRST, SECOND), {SAFETENSORS: INDEX}),
        ((FIRST, SECOND), {SAFETENSORS: INDEX, BIN: {"weight_map": {"a": "pytorch_model.bin"}}}),
    ],
)
def test_a_whole_checkpoint_lacks_nothing(names: tuple[str, ...], indexes: dict[str, object], tmp_path: Path) -> None:
    assert missing_weights(fill(tmp_path, *names, indexes=indexes)) == ""


@pytest.mark.parametrize(
    ("names", "indexes", "said"),
    [
        ((), {}, "{folder} holds no weights, no file that ends in .safetensors, .bin, .pt, .pth or .gguf"),
        (("adapter_model.safetensors", "training_args.bin", "optimizer.pt"), {}, "{folder} holds no weights"),
        ((FIRST,), {SAFETENSORS: INDEX}, f"{{folder}} lacks {SECOND} of 2 files of weights: {SAFETENSORS} names it"),
        ((), {SAFETENSORS: INDEX}, f"{{folder}} lacks {FIRST} and 1 more of 2 files of weights: {SAFETENSORS} names it"),
        ((SECOND,), {}, f"{{folder}} lacks {FIRST} of 2 files of weights: the names of the others tell of it"),
        ((FIRST, SECOND), {SAFETENSORS: []}, f"{{folder}}/{SAFETENSORS} is damaged: it has no weight_map that can be read"),
        (("pytorch_model.bin",), {BIN: {"weight_map": None}}, f"{{folder}}/{BIN} is damaged"),
        (("consolidated-00001-of-00002.safetensors",), {SAFETENSORS: INDEX}, "{folder} lacks consolidated-00002-of-00002"),
    ],
)
def test_what_is_missing_is_named(names: tuple[str, ...], indexes: dict[str, object], said: str, tmp_path: Path) -> None:
    assert missing_weights(fill(tmp_path, *names, indexes=indexes)).startswith(said.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("names", "load_format"),
    [
        (("consolidated.safetensors",), "auto"),
        (("consolidated.safetensors",), "mistral"),
        (("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"), "sharded_state"),
        (("model.pt", FIRST), "pt"),
        (("model.bin", FIRST), "npcache"),
        (("pytorch_model.bin",), "auto"),
    ],
)
def test_beside_weights_that_vllm_reads_without_the_index_no_shard_of_it_is_missed(
    names: tuple[str, ...], load_format: str, tmp_path: Path
) -> None:
    folder = fill(tmp_path, *names, indexes={SAFETENSORS: INDEX})
    assert missing_weights(folder, load_format) == ""
    for name in names:
        (folder / name).write_bytes(b"")
    assert missing_weights(folder, load_format) == f"{folder}/{min(names)} is empty"
    for name in names:
        (folder / name).unlink()
    assert missing_weights(folder, load_format).startswith(f"{folder} ")


@pytest.mark.parametrize("load_format", ["hf", "safetensors", "fastsafetensors", "instanttensor"])
def test_a_format_of_hugging_face_goes_by_the_index_whatever_else_lies_there(load_format: str, tmp_path: Path) -> None:
    folder = fill(tmp_path, "consolidated.safetensors", indexes={SAFETENSORS: INDEX})
    assert missing_weights(folder, load_format).startswith(f"{folder} lacks {FIRST} and 1 more")


def test_an_empty_file_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert missing_weights(tmp_path) == f"{tmp_path}/model.safetensors is empty"
    (tmp_path / SECOND).touch()
    fill(tmp_path, FIRST, indexes={SAFETENSORS: INDEX})
    assert missing_weights(tmp_path).startswith(f"{tmp_path} lacks {SECOND}")


def test_a_checkpoint_as_this_project_writes_it_is_whole(tmp_path: Path) -> None:
    assert missing_weights(make_tiny_llama(tmp_path / "tiny")) == ""
