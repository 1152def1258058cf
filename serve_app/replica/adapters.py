"""This module checks a replica's LoRA adapters and lets the engine load each of them before the first request.

An engine that loads an adapter with its first request fails in the middle of a step if it cannot, and all requests that it runs fail with
it. Loaded before the first request, a bad adapter fails the replica's start, which reports why. Later vLLM may unload an adapter and read
it again (`max_cpu_loras`, by use).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from serve_app.config.adapters import CONFIG, WEIGHTS, rank_in
from serve_app.errors import ConfigError

KEY = "serve_app_adapters"


def adapters_in(additional_config: Any) -> list[Mapping[str, Any]]:
    """Return the adapters that `engine_args.engine_core_args` has written into vLLM's ``additional_config``."""
    return list(additional_config.get(KEY, ())) if isinstance(additional_config, Mapping) else []


def max_rank(adapters: Iterable[Mapping[str, Any]]) -> int:
    """Return vLLM's smallest rank limit that all adapters fit; vLLM reserves memory for it.

    Raises:
        ConfigError: An adapter's folder lacks its configuration, the configuration cannot be read, or no limit of vLLM is enough.
    """
    needed = max(_rank(adapter) for adapter in adapters)
    limits = sorted(get_args(MaxLoRARanks))
    if needed > limits[-1]:
        raise ConfigError("adapters", f"have a rank of {needed}", f"vLLM takes {limits[-1]} at most")
    return int(next(limit for limit in limits if limit >= needed))


def check_sums(adapters: Iterable[Mapping[str, Any]]) -> None:
    """Compare the weights with the SHA-256 that the configuration gives.

    Raises:
        ConfigError: The sums differ, or there are no weights.
    """
    for adapter in adapters:
        path = _weights(adapter)
        if (wanted := adapter["sha256"]) is None:
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            raise _wrong(adapter, "sha256", f"is {wanted}, and {path} has {found}", "give the other file, or this sum")


def files_of(adapters: Sequence[Mapping[str, Any]]) -> Iterator[Path]:
    """Yield all files that determine the answers, in an order that is equal on each node."""
    for adapter in sorted(adapters, key=lambda each: str(each["name"])):
        yield Path(adapter["path"]) / CONFIG
        yield _weights(adapter)


def load_all(core: Any, adapters: Iterable[Mapping[str, Any]]) -> None:
    """Let vLLM's engine core load each adapter.

    Raises:
        ConfigError: The engine core could not load an adapter.
    """
    for adapter in adapters:
        try:
            core.add_lora(LoRARequest(adapter["name"], adapter["number"], adapter["path"]))
        except Exception as exc:  # of any kind: shapes, modules, features, files
            raise _wrong(
                adapter, "path", f"is {adapter['path']}, which vLLM cannot load", f"{type(exc).__name__}: {exc}"
            ) from exc


def _rank(adapter: Mapping[str, Any]) -> int:
    try:
        return rank_in(Path(adapter["path"]))
    except OSError as exc:
        raise _wrong(
            adapter, "path", f"is {adapter['path']}, and {CONFIG} in it cannot be read: {exc.strerror}", _ON_NODES
        ) from exc
    except ValueError as exc:
        raise _wrong(
            adapter, "path", f"is {adapter['path']}, whose {CONFIG} has no rank (r) to be read", "export it by PEFT"
        ) from exc


def _weights(adapter: Mapping[str, Any]) -> Path:
    folder = Path(adapter["path"])
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise _wrong(adapter, "path", f"is {folder}, which has no {' or '.join(WEIGHTS)}", _ON_NODES)


_ON_NODES = "put the adapter's folder there on every node of the model's replicas"


def _wrong(adapter: Mapping[str, Any], key: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"adapters.{adapter['name']}.{key}", problem, hint)
