"""This module computes an id of the weights that an engine runs, LoRA adapters included.

Replicas with equal ids may continue each other's answers. The id covers the content of the files, not their paths or times: two nodes
have copies. Reading all of a large model would take minutes, so a few bytes of each tensor represent it. A training step changes all
weights that it touches.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from serve_app.replica.adapters import adapters_in, files_of

_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 4096
"""The most samples of a checkpoint: some have 90,000 tensors, and each read may go over the network."""


def weights_id(vllm_config: Any) -> str:
    """Return 16 hex digits for the weights of a vLLM ``VllmConfig`` and the precision in which they run.

    The tokens of a simulated engine come from its seed. Weights that are streamed from a bucket are identified by its address only.
    """
    model, load, more = vllm_config.model_config, vllm_config.load_config, vllm_config.additional_config
    adapters = adapters_in(more)
    numbers = sorted(adapter["number"] for adapter in adapters)  # a resumed request asks for its adapter by number
    if isinstance(more, Mapping) and (simulated := more.get("simulated")):
        calls = ["calls_tools"] if simulated.get("calls_tools") else []  # nothing without: the ids of other replicas stay
        seeded = json.dumps([simulated.get("seed"), simulated.get("eos_probability"), *calls, *numbers])
        return hashlib.sha256(seeded.encode()).hexdigest()[:16]
    precision = (model.dtype, model.quantization, vllm_config.cache_config.cache_dtype, load.load_format)
    digest = hashlib.sha256(json.dumps([*(str(part) for part in precision), *numbers]).encode())
    if not (files := _files(_folder(model, load))):
        digest.update(f"{model.model_weights or model.model}@{model.revision}".encode())
    files += files_of(adapters)
    num_samples = max(16, _MAX_SAMPLES // max(1, len(files)))
    for path in files:
        digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for offset in _offsets(path, file, num_samples):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _folder(model: Any, load: Any) -> Path:
    """Return the place of the files: the model's own folder or file, or the hub's cache, into which vLLM has downloaded them.

    A ``download_dir`` holds the weights alone: vLLM downloads config.json into the hub's own cache all the same.
    """
    from huggingface_hub import snapshot_download

    path = Path(model.model)
    with contextlib.suppress(OSError, ValueError):  # not in the cache, or not the name of a repository
        if not path.exists():
            path = Path(
                snapshot_download(model.model, cache_dir=load.download_dir, revision=model.revision, local_files_only=True)
            )
    return path


def _files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(p for p in folder.glob("*") if p.suffix in _SUFFIXES)


def _offsets(path: Path, file: BinaryIO, num_samples: int) -> Iterator[int]:
    """Yield offsets to read: the head of the file and the middle of each tensor, or of some of many; in other formats equal distances."""
    if path.suffix != ".safetensors":
        size = path.stat().st_size
        yield from (size * k // num_samples for k in range(num_samples))
        return
    yield 0
    file.seek(0)
    head_bytes = int.from_bytes(file.read(8), "little")
    tensors = json.loads(file.read(head_bytes))
    names = sorted(tensors.keys() - {"__metadata__"})
    for name in names[:: 1 + len(names) // num_samples]:
        begin, end = tensors[name]["data_offsets"]
        yield 8 + head_bytes + max(begin, (begin + end - _SAMPLE_BYTES) // 2)
