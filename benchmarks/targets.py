"""The servers under test: ``vllm serve`` with its own and with its Rust front end, and fleets. One `ModelSettings` gives all engines
the same arguments.
"""

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import server
from benchmarks.rust_front_end import rust_front_end
from serve_app.checkpoints import resolve_model
from serve_app.config import ModelSettings, default_cache_dir
from serve_app.engine_args import engine_core_args, engine_environment

VLLM = [sys.executable, "-m", "benchmarks.vllm_cli"]
BARE_PORT = 8060
"""A fleet of n replicas listens n ports above it, a vLLM server with the Rust front end one below."""
_NOT_OF_RUST = ("mm_processor_cache_gb",)
"""Arguments that the Rust front end refuses; this one is of the cache of images, which no benchmark sends."""
_START_S = {"cpu": 240.0, "cuda": 1200.0}  # on a GPU: fetching weights, compiling, capturing graphs


@dataclass
class Target:
    """One server under test. ``root`` is the process from which all of its others descend."""

    name: str
    url: str
    root: psutil.Process


@contextmanager
def started(model: ModelSettings, names: Sequence[str], folder: Path) -> Iterator[list[Target]]:
    """Start these servers one after another: ``bare``, ``rust``, or ``fleet-N`` for N replicas. All stay up until left."""
    with ExitStack() as stack:
        yield [
            _vllm(stack, name, model, folder) if name in ("bare", "rust") else _fleet(stack, name, model, folder)
            for name in names
        ]


def environment(model: ModelSettings) -> dict[str, str]:
    """Return what every process of a comparison gets on top of the inherited environment."""
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING"}
    return quiet if model.device == "cuda" else {**quiet, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def source_of(model: ModelSettings) -> str:
    """Return the path or the hub's id that vLLM takes."""
    return str(resolve_model(model.model, default_cache_dir()))


def _vllm(stack: ExitStack, name: str, model: ModelSettings, folder: Path) -> Target:
    env, port = engine_environment(model, environment(model)), BARE_PORT
    if name == "rust":
        port -= 1
        binary = str(rust_front_end(default_cache_dir()))
        env |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": binary}
    url = f"http://127.0.0.1:{port}"
    command = [*VLLM, "serve", *bare_arguments(model, source_of(model), port, without=_NOT_OF_RUST if name == "rust" else ())]
    start_s = _START_S[model.device]
    root = stack.enter_context(server(command, f"{url}/health", log=folder / f"{name}.log", environment=env, start_s=start_s))
    return Target(name, url, root)


def bare_arguments(model: ModelSettings, source: str, port: int = BARE_PORT, *, without: Collection[str] = ()) -> list[str]:
    """Return the command line of ``vllm serve`` that gives its engine what an engine of the fleet gets, but the arguments ``without``."""
    arguments = engine_core_args(model, source)
    own = {"host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    given = {**arguments, **model.frontend_args, **own}
    return [source, *flags({name: value for name, value in given.items() if name not in {"model", *without}})]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as vLLM's command line takes them; None is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def _fleet(stack: ExitStack, name: str, model: ModelSettings, folder: Path) -> Target:
    replicas = int(name.removeprefix("fleet-"))
    config = fleet_config(model, replicas)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(path)]
    url = f"http://127.0.0.1:{config['ingress']['port']}"
    env, start_s = environment(model), _START_S[model.device]
    root = stack.enter_context(server(command, f"{url}/readyz", log=folder / f"{name}.log", environment=env, start_s=start_s))
    return Target(name, url, root)


def fleet_config(model: ModelSettings, replicas: int) -> dict[str, Any]:
    """Return the configuration of a fleet on this machine."""
    section = model.model_dump(mode="json", exclude_unset=True)
    section |= {"replicas": {"min": replicas, "max": replicas}, "replicas_per_node": replicas, "num_cpus": 0.1}
    return {
        "name": f"bench-fleet-{replicas}",
        "models": {model.name: section},
        "ingress": {"port": BARE_PORT + replicas, "num_cpus": 0.1},
        "timeouts": {"drain_s": 5},
    }
