"""This module reads a checkpoint's config.json, and how many weights its files hold. No weight is read, and nothing is downloaded."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.config.files import read_regular_file
from serve_app.errors import ConfigError
from serve_app.sizing.architecture import Architecture
from serve_app.sizing.weights import TensorBytes

MOST_CONFIG_BYTES = 4 << 20
"""The largest config.json that is read; the largest known ones have some 100 KB."""
_GIVE_FOLDER = "give the folder of a Hugging Face checkpoint, or its config.json; a file of GGUF has none"
_MOST_INDEX_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000  # the specification's limit
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MOST_BYTES = 1 << 50


def config_file_of(path: Path) -> Path:
    """Return the config.json that ``path`` is or holds.

    Raises:
        ConfigError: ``path`` is neither a folder with a config.json nor a file.
    """
    if os.path.isdir(path):  # not `Path.is_dir`, which raises for a name too long or a folder that may not be read
        if not os.path.isfile(path / "config.json"):
            raise ConfigError(str(path), "holds no config.json", _GIVE_FOLDER)
        return path / "config.json"
    if path.suffix != ".json":
        raise ConfigError(str(path), "is no config.json", _GIVE_FOLDER)
    return path


def read_config(path: Path) -> Any:
    """Return the content of a config.json.

    Raises:
        ConfigError: It cannot be read, is too large, or is no JSON.
    """
    try:
        return json.loads(read_regular_file(path, MOST_CONFIG_BYTES))
    except ConfigError as exc:
        raise replace(exc, hint=_GIVE_FOLDER) from exc
    except RecursionError as exc:
        raise ConfigError(str(path), "nests too deep", _GIVE_FOLDER) from exc
    except ValueError as exc:
        raise ConfigError(str(path), f"is no JSON: {exc}"[:200], _GIVE_FOLDER) from exc


def tensor_bytes_of(folder: Path, shape: Architecture) -> TensorBytes | None:
    """Return what the weights' files hold, by their headers, else by their index; None without either.

    Raises:
        ConfigError: A file is there and damaged.
    """
    index, total = _index_of(folder)
    shards = sorted(folder / name for name in index) if index else sorted(folder.glob("model*.safetensors"))
    if shards and all(os.path.isfile(shard) for shard in shards):
        found = [_header_of(shard) for shard in shards]
        return TensorBytes(*(sum(getattr(each, name) for each in found) for name in ("plain", "plain_bytes", "packed_bytes")))
    if not total:
        return None
    if shape.quantization is not None:
        return TensorBytes(0, 0, total)
    return TensorBytes(total // (4 if shape.dtype == "float32" else 2), total, 0)


def _index_of(folder: Path) -> tuple[frozenset[str], int]:
    """Return the names of the shards and the sum of their bytes that an index names; 0 if it names none."""
    for name in _INDEXES:
        file = folder / name
        if not os.path.isfile(file):
            continue
        try:
            values = json.loads(read_regular_file(file, _MOST_INDEX_BYTES))
            total = (values.get("metadata") or {}).get("total_size", 0)
            shards = frozenset(map(str, values["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise ConfigError(str(file), "is damaged: metadata or weight_map is wrong", "fetch the checkpoint again") from exc
        if not isinstance(total, int | float) or not 0 <= total < _MOST_BYTES or total != int(total):
            raise ConfigError(str(file), "has a metadata.total_size that no checkpoint has", "fetch the checkpoint again")
        return (shards if name.startswith("model.") and all("/" not in shard for shard in shards) else frozenset()), int(total)
    return frozenset(), 0


def _header_of(shard: Path) -> TensorBytes:
    """Return the sizes that the header of a safetensors file names."""
    try:
        with shard.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(file.read(size))
        plain = plain_bytes = packed = 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end < _MOST_BYTES:
                raise ValueError(f"{name} ends before it begins")
            width = _width(entry)
            plain += (end - begin) // width if width else 0
            plain_bytes += end - begin if width else 0
            packed += 0 if width else end - begin
    except OSError as exc:
        raise ConfigError(str(shard), f"cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(str(shard), f"is damaged: {type(exc).__name__}: {exc}"[:200], "fetch the checkpoint again") from exc
    return TensorBytes(plain, plain_bytes, packed)


def _width(entry: Mapping[str, Any]) -> int:
    """Return the bytes of an element of a float tensor; 0 for 8-bit floats and integers."""
    return _PLAIN.get(str(entry["dtype"]), 0)
