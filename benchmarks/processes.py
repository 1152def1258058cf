"""This module runs servers under test as processes: starts, waits, measures CPU seconds by role, and ends them by pid."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

_ROLES = (
    ("VLLM::", "engine core"),
    ("/vllm-rs", "rust front end"),
    ("serve_app.replica.engine", "engine core"),
    ("OpenAiIngress", "ingress"),
    ("LLMRouter", "ingress"),
    ("ServeReplica:default:LLMServer", "api server"),
    ("ProxyActor", "proxy"),
    ("haproxy", "proxy"),
    ("HAProxyManager", "proxy"),
    ("ray", "ray"),
    ("gcs_server", "ray"),
    ("vllm", "api server"),
)


@contextlib.contextmanager
def server(command: list[str], url: str, *, log: Path, environment: dict[str, str], start_s: float) -> Iterator[psutil.Process]:
    """Run ``command`` for the block; yield when ``url`` answers 200.

    Raises:
        RuntimeError: The server ended or did not answer in ``start_s``; the message has the end of its log. Or ``url`` answered before.
    """
    _refuse_another(url)
    ended_by_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the server
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        _wait(process, url, log, start_s)
        yield psutil.Process(process.pid)
    finally:
        signal.signal(signal.SIGTERM, ended_by_term)
        below = _below(process.pid)  # Ray's processes have sessions of their own: the group's signal would not reach them
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for left in [*_below(process.pid), *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def fleet(config: Mapping[str, Any], folder: Path, *, start_s: float = 600.0) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``serve-app up`` for the block; yield its URL and its process when all ingresses of the configuration listen."""
    (folder / "fleet.yaml").write_text(yaml.safe_dump(dict(config)))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(folder / "fleet.yaml")]
    port = config["ingress"]["port"]
    num_ingresses = config["ingress"].get("replicas", {"min": 1})["min"]
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"
    with server(command, f"{url}/readyz", log=folder / "up.log", environment=quiet, start_s=start_s) as root:
        until = time.monotonic() + start_s
        while (num := sum(_listens(ingress, port) for ingress in ingresses_of(root))) < num_ingresses:
            if time.monotonic() > until:
                raise RuntimeError(f"{num} of {num_ingresses} ingresses listen")
            time.sleep(1)
        yield url, root


def ingresses_of(root: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the fleet's ingresses."""
    return [process for process in root.children(recursive=True) if role_of(process) == "ingress"]


def _listens(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections("tcp"))
    return False


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _refuse_another(url: str) -> None:
    """Raise if the URL answers: a server left by an earlier benchmark would be measured instead of the started one."""
    with contextlib.suppress(httpx.HTTPError):
        if httpx.get(url, timeout=2).status_code == 200:
            raise RuntimeError(f"{url} answers already; end the server that runs there")


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"{' '.join(process.args)} is not up: {log.read_text(errors='replace')[-2000:]}")  # type: ignore[arg-type]


def cpu_by_role(root: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds so far, user + system, of the process tree below ``root``, by role."""
    totals: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            role = role_of(process)
            totals[role] = totals.get(role, 0.0) + times.user + times.system
    return totals


def role_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline()) or process.name()
    role = next((role for mark, role in _ROLES if mark in line), "other")
    if "ServeReplica:" in line and role == "ray":
        return "ingress" if ":ingress" in line else "supervisor"
    return role
