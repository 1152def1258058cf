"""The id of the weights covers the content of the files and the adapters, not their paths."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_adapter, make_tiny_llama
from serve_app.replica.weights import weights_id


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("weights") / "llama")


def id_of(
    model: Path | str,
    *,
    dtype: str = "bfloat16",
    revision: str | None = None,
    download_dir: Path | None = None,
    **additional: Any,
) -> str:
    """Return the id for the ``VllmConfig`` of ``model``."""
    return weights_id(
        SimpleNamespace(
            model_config=SimpleNamespace(model=str(model), model_weights="", revision=revision, dtype=dtype, quantization=None),
            load_config=SimpleNamespace(load_format="auto", download_dir=download_dir),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            additional_config=additional,
        )
    )


def tensors(file: Path) -> dict[str, tuple[int, int]]:
    """Return the begin and end of each tensor in the file."""
    data = file.read_bytes()
    head_bytes = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:head_bytes])
    return {
        name: (head_bytes + t["data_offsets"][0], head_bytes + t["data_offsets"][1])
        for name, t in head.items()
        if name != "__metadata__"
    }


def test_a_copy_elsewhere_has_the_same_id_whatever_lies_beside_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "README.md").write_text("another")
    assert id_of(copy) == id_of(checkpoint)
    assert id_of(copy, dtype="float32") != id_of(checkpoint)


def test_a_change_of_any_one_tensor_changes_the_id(checkpoint: Path, tmp_path: Path) -> None:
    file = shutil.copytree(checkpoint, tmp_path / "copy") / "model.safetensors"
    before = file.read_bytes()
    found = {id_of(checkpoint)}
    for begin, end in tensors(file).values():
        trained = bytearray(before)
        trained[begin:end] = bytes(byte ^ 1 for byte in trained[begin:end])
        file.write_bytes(trained)
        found.add(id_of(file.parent))
    assert len(found) == 1 + len(tensors(file))


def test_of_very_many_tensors_some_stand_for_all(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = shutil.copytree(checkpoint, tmp_path / "copy") / "model.safetensors"
    before = file.read_bytes()
    first, last = min(tensors(file).values())[0], max(tensors(file).values())[1]
    file.write_bytes(before[:first] + bytes(byte ^ 1 for byte in before[first:last]) + before[last:])
    monkeypatch.setattr("serve_app.replica.weights._MAX_SAMPLES", 1)
    assert len(tensors(file)) > 16
    assert id_of(file.parent) != id_of(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_files_without_a_known_form_differ_by_samples(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(bytes(4_000_000))
    first = id_of(tmp_path)
    file.write_bytes(bytes([1]) * 4_000_000)
    assert id_of(tmp_path) != first
    assert id_of(file) == id_of(tmp_path)


def test_weights_in_a_download_dir_which_holds_nothing_else_have_the_id_of_their_content(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    shutil.copy(checkpoint / "model.safetensors", folder / "snapshots" / "c0ffee")
    assert id_of("org/name", download_dir=tmp_path) == id_of(checkpoint)
    assert id_of("org/name", download_dir=tmp_path, revision="other") != id_of(checkpoint)


def test_weights_that_are_not_on_this_disk_are_known_by_name_and_revision() -> None:
    assert id_of("s3://bucket/a") == id_of("s3://bucket/a") != id_of("s3://bucket/b")
    assert id_of("org/name", revision="1") != id_of("org/name", revision="2")


def test_a_simulated_engine_has_the_id_of_its_seed(checkpoint: Path) -> None:
    first, other = ({"seed": seed, "eos_probability": 0.0, "profile": "a10g-llama-8b"} for seed in (0, 1))
    assert id_of(checkpoint, simulated=first) == id_of("elsewhere", simulated=first | {"profile": "t4"})
    assert id_of(checkpoint, simulated=first) != id_of(checkpoint, simulated=other)
    assert id_of(checkpoint, simulated=first) == id_of(checkpoint, simulated=first | {"calls_tools": False})
    assert id_of(checkpoint, simulated=first) != id_of(checkpoint, simulated=first | {"calls_tools": True})


def test_adapters_count_by_their_files_and_by_their_numbers(checkpoint: Path, tmp_path: Path) -> None:
    folders = [make_tiny_adapter(tmp_path / f"seed-{seed}", seed=seed) for seed in (1, 2)]

    def with_adapter(folder: Path, number: int) -> str:
        adapter = {"name": "pirate", "number": number, "path": str(folder), "sha256": None}
        return id_of(checkpoint, serve_app_adapters=[adapter])

    found = [with_adapter(folders[0], 70_000), with_adapter(folders[1], 70_000), with_adapter(folders[0], 80_000)]
    assert len({id_of(checkpoint), *found}) == 4
    assert with_adapter(folders[0], 70_000) == found[0]
