"""This module says which weights a checkpoint's folder lacks. It reads names, sizes and the index, no weights: 1 ms on a local disk."""

import json
import os
import re
from pathlib import Path

from serve_app.config.files import read_regular_file
from serve_app.errors import ConfigError

_INDEXES = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
_WHOLE = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""vLLM's load formats that read all files of a checkpoint as Hugging Face publishes it, and of which an index tells."""
_MAX_INDEX_BYTES = 64 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_OTHERS = ("adapter_model", "training_args", "optimizer", "scheduler", "rng_state")
"""Beginnings of names of files that trainers leave beside the weights."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


def missing_weights(folder: Path, load_format: str = "auto") -> str:
    """Return which weights the folder lacks, a sentence; "" if none is missed.

    Args:
        load_format: vLLM's. Some formats, as sharded_state, have files of their own, beside which an index may lie that tells of others:
            for them one file of weights is enough.
    """
    weights = [path for path in _files(folder) if path.suffix in _SUFFIXES and not path.name.startswith(_OTHERS)]
    mistral = [path for path in weights if path.match("consolidated*.safetensors")]
    if load_format == "auto" and mistral:
        weights = mistral  # vLLM then reads these alone
    elif load_format in _WHOLE and (indexes := _indexes(folder, weights)):
        problems = [_problem_by(index) for index in indexes]
        return "" if "" in problems else problems[0]
    if not weights:
        return f"{folder} holds no weights, no file that ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
    empty = [path for path in weights if not path.stat().st_size]
    if load_format not in _WHOLE and len(empty) < len(weights):
        return ""
    if empty:
        return f"{empty[0]} is empty"
    return _lacking(folder, sorted(_shards_of_same({path.name for path in weights})), "the names of the others tell of it")


def _indexes(folder: Path, weights: list[Path]) -> list[Path]:
    """Return the indexes in the folder. One without any file of its kind counts only if there are no weights of another kind."""
    kinds = {path.suffix for path in weights} or _INDEXES.keys()
    return [folder / name for kind, name in _INDEXES.items() if kind in kinds and os.path.isfile(folder / name)]


def _problem_by(index: Path) -> str:
    try:
        shards = {str(shard) for shard in json.loads(read_regular_file(index, _MAX_INDEX_BYTES))["weight_map"].values()}
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{index} is damaged: it has no weight_map that can be read"
    return _lacking(index.parent, sorted(shards), f"{index.name} names it")


def _lacking(folder: Path, shards: list[str], how_known: str) -> str:
    missing = [shard for shard in shards if not (os.path.isfile(folder / shard) and os.path.getsize(folder / shard))]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{folder} lacks {missing[0]}{more} of {len(shards)} files of weights: {how_known}" if missing else ""


def _shards_of_same(names: set[str]) -> set[str]:
    """Return the names with those of the shards that belong to them: of ``a-00001-of-00002.bin`` also ``a-00002-of-00002.bin``."""
    for found in filter(None, map(_SHARD.fullmatch, sorted(names))):
        begin, _, count, suffix = found.groups()
        names |= {f"{begin}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)}
    return names


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []
