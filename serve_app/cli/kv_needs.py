"""These functions judge what a machine has to give models with `kv.transfer: nixl`, for `serve-app doctor`: ports, and memory to lock."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from serve_app.cli import findings
from serve_app.cli.findings import Finding
from serve_app.config import ModelSettings, Settings
from serve_app.engine_args import engine_environment
from serve_app.errors import ListenFailed
from serve_app.replica.side_channel import reserve

_RDMA = {"all", "ib", "rc", "ud", "dc", "srd"}
"""UCX's names of transports over RDMA, without what follows an underscore, as in `rc_mlx5`."""
DEVICES, STATUS = Path("/sys/class/infiniband"), Path("/proc/self/status")
"""The folder with an entry for each RDMA device, and the file with this process's capabilities."""
_IPC_LOCK = 14
"""Number of the capability of Linux with which the limit of locked memory does not count."""


def side_ports(settings: Settings, holder: str) -> Iterator[Finding]:
    """Judge the ports of side channels. An engine whose model finds none free does not start; the replicas of ``holder`` have theirs."""
    for name, model in settings.models.items():
        if model.kv.is_on:
            key, ports = f"models.{name}.kv.port", model.kv.side_ports()
            taken = [reason for port in ports if (reason := _taken(settings.protocol.host, port, key))]
            yield findings.kv_ports(key, ports, taken, min(model.replicas.min, len(ports)), holder)


def _taken(host: str, port: int, key: str) -> str:
    try:
        reserve(host, range(port, port + 1), key).sock.close()
    except ListenFailed as exc:
        return f"{port}: {exc.reason}"
    return ""


def locked_memory(settings: Settings, *, devices: Path = DEVICES, status: Path = STATUS) -> Iterator[Finding]:
    """Judge the limit of locked memory for the first model that may move KV by RDMA, those first that name it."""
    if _has_capability(status.read_text(), _IPC_LOCK):
        return
    named = {m.name: _names_rdma(m) for m in settings.models.values() if m.needs_nixl()}
    pinning = [name for name, names in named.items() if names] or [name for name, names in named.items() if names is None]
    if pinning and (named[pinning[0]] or (devices.is_dir() and any(devices.iterdir()))):
        limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield findings.locked_memory(*limits, pinning[0], is_named=bool(named[pinning[0]]))


def _names_rdma(model: ModelSettings) -> bool | None:
    """Return whether the engines' `UCX_TLS` names RDMA; None if UCX chooses."""
    names = engine_environment(model, os.environ).get("UCX_TLS", "")
    if not names or names.startswith("^"):
        return None
    return any(name.strip().partition("_")[0] in _RDMA for name in names.split(","))


def _has_capability(status: str, number: int) -> bool:
    """Return whether a process has a capability, by the text of its file /proc/PID/status."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)
