"""This module starts the servers under test: ``vllm serve`` with either front end, fleets, Ray Serve LLM. One `ModelSettings` gives
all engines the same arguments.
"""

import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import cpu_by_role, server
from benchmarks.rust_front_end import rust_front_end
from serve_app.checkpoints import resolve_model
from serve_app.config import ModelSettings, default_cache_dir
from serve_app.engine_args import engine_core_args, engine_environment

VLLM = [sys.executable, "-m", "benchmarks.vllm_cli"]
BARE_PORT = 8060
"""Port of the bare server. A fleet of n replicas listens n ports above it, and 20 more for each further ingress; a vLLM server with the
Rust front end listens one port below it."""
_NOT_OF_RUST = ("mm_processor_cache_gb",)
"""Arguments that the Rust front end refuses. This one sizes the cache of images, which no benchmark sends."""
RAY_PORTS = {"ray": BARE_PORT - 30, "ray-direct": BARE_PORT - 31}
"""Ports of Ray Serve LLM with its defaults, and with its direct streaming, which needs its HAProxy."""
_DIRECT_STREAMING = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}
_START_S = {"cpu": 240.0, "cuda": 1200.0}  # on a GPU: fetching weights, compiling, capturing graphs


@dataclass
class Target:
    """One server under test. All its processes descend from ``root``; ``behind`` is the server behind a proxy."""

    name: str
    url: str
    root: psutil.Process
    behind: "Target | None" = None

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far, by role; a proxy is one role with the proxy's name."""
        own = cpu_by_role(self.root)
        return own if self.behind is None else {self.name: sum(own.values()), **self.behind.cpu_s()}


@contextmanager
def started(
    model: ModelSettings, names: Sequence[str], folder: Path, proxies: Mapping[str, str] | None = None, ray_python: str = ""
) -> Iterator[list[Target]]:
    """Start these servers one after another. All stay up for the block.

    Args:
        names: ``bare``, ``rust``, ``fleet-N`` for N replicas, ``fleet-N-M`` for N replicas and M ingresses, a key of `RAY_PORTS`, or a key
            of ``proxies``.
        proxies: The command of each proxy. In it, ``{port}`` is the port to listen on, ``{url}`` that of the bare server, which must be
            first in ``names``.
        ray_python: The Python of an environment with Ray Serve LLM; see `benchmarks.peers`.
    """
    with ExitStack() as stack:
        targets: list[Target] = []
        for name in names:
            if name in (proxies or ()):
                bare = next(target for target in targets if target.name == "bare")
                targets.append(_proxy(stack, name, (proxies or {})[name], bare, BARE_PORT - 1 - len(targets), folder))
            elif name in RAY_PORTS:
                targets.append(_ray_serve_llm(stack, name, model, folder, ray_python))
            else:
                targets.append((_vllm if name in ("bare", "rust") else _fleet)(stack, name, model, folder))
        yield targets


def _proxy(stack: ExitStack, name: str, command: str, bare: Target, port: int, folder: Path) -> Target:
    words, url = shlex.split(command.format(port=port, url=bare.url)), f"http://127.0.0.1:{port}"
    root = stack.enter_context(server(words, f"{url}/v1/models", log=folder / f"{name}.log", environment={}, start_s=240.0))
    return Target(name, url, root, behind=bare)


def _ray_serve_llm(stack: ExitStack, name: str, model: ModelSettings, folder: Path, python: str) -> Target:
    port, own = RAY_PORTS[name], folder / name
    own.mkdir()
    settings = {"name": model.name, **model.model_dump(mode="json", exclude_unset=True)}  # the dump omits the name
    command = [python, "-m", "benchmarks.peers", "ray-serve-llm", str(port), str(own), json.dumps(settings), "--replicas", "1"]
    env = environment(model) | (_DIRECT_STREAMING if name == "ray-direct" else {})
    url = f"http://127.0.0.1:{port}"
    root = stack.enter_context(
        server(command, f"{url}/v1/models", log=own / "log", environment=env, start_s=_START_S[model.device])
    )
    if model.simulated is not None:
        refuse_real_computation(root)
    return Target(name, url, root)


def refuse_real_computation(root: psutil.Process) -> None:
    """Raise RuntimeError if an engine core below ``root`` has one of vLLM's own workers instead of the simulated accelerator."""
    words = list[str]()
    for each in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words += each.cmdline()
    if any("VLLM::Worker" in word for word in words):
        raise RuntimeError("an engine did not take the executor of the simulated accelerator: benchmarks/peers.py sets it")


def environment(model: ModelSettings) -> dict[str, str]:
    """Return the environment variables of every process of a comparison, in addition to the inherited ones."""
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING"}
    return quiet if model.device == "cuda" else {**quiet, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def source_of(model: ModelSettings) -> str:
    """Return the path or the hub's id for vLLM."""
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
    """Return the command line of ``vllm serve`` with the engine arguments of a fleet's engine, except the arguments ``without``."""
    arguments = engine_core_args(model, source)
    own = {"host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    given = {**arguments, **model.frontend_args, **own}
    return [source, *flags({name: value for name, value in given.items() if name not in {"model", *without}})]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments in the form of vLLM's command line; None is left out."""
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
    replicas, ingresses = map(int, f"{name}-1".split("-")[1:3])
    config = fleet_config(model, replicas, ingresses)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(path)]
    url = f"http://127.0.0.1:{config['ingress']['port']}"
    env, start_s = environment(model), _START_S[model.device]
    root = stack.enter_context(server(command, f"{url}/readyz", log=folder / f"{name}.log", environment=env, start_s=start_s))
    return Target(name, url, root)


def fleet_config(model: ModelSettings, replicas: int, ingresses: int = 1) -> dict[str, Any]:
    """Return the configuration of a fleet on this machine."""
    section = model.model_dump(mode="json", exclude_unset=True)
    section |= {"replicas": {"min": replicas, "max": replicas}, "replicas_per_node": replicas, "num_cpus": 0.1}
    return {
        "name": f"bench-fleet-{replicas}-{ingresses}",
        "models": {model.name: section},
        "ingress": {
            "port": BARE_PORT + replicas + 20 * (ingresses - 1),
            "num_cpus": 0.1,
            "replicas": {"min": ingresses, "max": ingresses},
        },
        "timeouts": {"drain_s": 5},
    }
