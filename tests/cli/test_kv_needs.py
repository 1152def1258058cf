"""`serve-app doctor` names ports of side channels that are taken, and a limit of locked memory that is too low for RDMA."""

import contextlib
import json
import resource
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli import findings
from serve_app.cli.findings import Finding
from serve_app.cli.kv_needs import locked_memory
from serve_app.cli.main import app
from serve_app.config import parse_settings
from serve_app.config.kv import NUM_SIDE_PORTS
from serve_app.errors import ListenFailed
from serve_app.replica.side_channel import SideChannel, reserve

HOST = "127.0.0.1"
INFINITY = resource.RLIM_INFINITY
PORTS = range(15600, 15664)


@pytest.mark.parametrize(
    ("num_taken", "needed", "holder", "state", "said"),
    [
        (0, 2, "", "ok", "64 of the 64 ports from 15600 on are free"),
        (62, 2, "", "ok", "2 of the 64 ports from 15600 on are free"),
        (63, 2, "", "error", "1 of the 64 ports from 15600 on are free, 2 needed: 15600: in use"),
        (63, 2, "up, pid 7", "ok", "1 of the 64 ports from 15600 on are free, and those of up, pid 7 are its own"),
    ],
)
def test_each_replica_needs_a_free_port(num_taken: int, needed: int, holder: str, state: findings.State, said: str) -> None:
    way_out = (
        "ss -tanp 'sport >= :15600 and sport <= :15663' names the processes; or set another kv.port" if state == "error" else ""
    )
    taken = [f"{port}: in use" for port in PORTS[:num_taken]]
    assert findings.kv_ports("kv.port", PORTS, taken, needed, holder) == Finding("kv.port", state, said, way_out)


def reserved_in_a_row(count: int) -> list[SideChannel]:
    """Return so many reserved ports of the first run of ports that are free together."""
    for first in range(20000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(ListenFailed):
            found = []
            for port in range(first, first + count):
                found.append(reserve(HOST, range(port, port + 1), "a test"))
                stack.callback(found[-1].sock.close)
            stack.pop_all()
            return found
    raise AssertionError("no free ports")


def test_ports_that_other_replicas_have_reserved_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    channels = reserved_in_a_row(NUM_SIDE_PORTS)
    port = channels[0].port
    file = tmp_path / "config.yaml"
    file.write_text(
        f"name: side-channels\nmodels: {{chat: {{model: {tmp_path}, kv: {{transfer: nixl, port: {port}}}, "
        "simulated: {profile: a10g-llama-8b}}}"
    )

    def line() -> dict[str, str]:
        done = CliRunner().invoke(app, ["doctor", "--json", str(file)])
        (found,) = (finding for finding in json.loads(done.stdout) if finding["name"] == "models.chat.kv.port")
        return dict(found)

    assert line()["said"] == f"0 of the 64 ports from {port} on are free, 1 needed: {port}: Address already in use"
    channels[7].sock.close()
    assert (line()["state"], line()["said"]) == ("ok", f"1 of the 64 ports from {port} on are free")
    for channel in channels:
        channel.sock.close()


@pytest.mark.parametrize(
    ("soft", "hard", "is_named", "state", "way_out"),
    [
        (INFINITY, INFINITY, True, "ok", ""),
        (8 << 20, INFINITY, True, "error", "ulimit -l unlimited, or set"),
        (8 << 20, INFINITY, False, "warning", "ulimit -l unlimited, or set"),
        (8 << 20, 16 << 20, True, "error", "raise the hard limit (LimitMEMLOCK=infinity"),
    ],
)
def test_a_limit_of_locked_memory_has_a_way_out(soft: int, hard: int, is_named: bool, state: str, way_out: str) -> None:
    found = findings.locked_memory(soft, hard, "chat", is_named=is_named)
    assert (found.state, found.remedy[: len(way_out)], bool(found.remedy)) == (state, way_out, bool(way_out))
    assert found.said == "no limit" if state == "ok" else found.said.startswith("limit of 8192 KiB, and by RDMA model chat pins")


CUDA = "device: cuda, gpus_per_replica: 1, kv: {transfer: nixl}"


@pytest.mark.parametrize(
    ("keys", "has_device", "capabilities", "states"),
    [
        (f"{CUDA}, env: {{UCX_TLS: 'rc,cuda,sm,self'}}", False, "0", ["error"]),
        (f"{CUDA}, env: {{UCX_TLS: 'cuda,rc_mlx5'}}", False, "0", ["error"]),
        (f"{CUDA}, env: {{UCX_TLS: 'rc,cuda,sm,self'}}", True, "4000", []),  # CAP_IPC_LOCK
        (f"{CUDA}, env: {{UCX_TLS: 'tcp,cuda,sm,self'}}", True, "3fff", []),
        (CUDA, True, "0", ["warning"]),
        (CUDA, False, "0", []),
        ("kv: {transfer: nixl}", True, "0", []),  # UCX gets tcp,sm,self
        ("kv: {transfer: nixl}, env: {UCX_TLS: 'rc,sm,self'}", True, "0", ["error"]),
        ("kv: {transfer: nixl}, env: {UCX_TLS: rc}, simulated: {profile: a10g-llama-8b}", True, "0", []),
        ("device: cuda, gpus_per_replica: 1, env: {UCX_TLS: 'rc,cuda'}", True, "0", []),
    ],
)
def test_locked_memory_is_judged_where_ucx_may_use_rdma(
    keys: str, has_device: bool, capabilities: str, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    devices, status = tmp_path / "infiniband", tmp_path / "status"
    devices.mkdir()
    if has_device:
        (devices / "mlx5_0").touch()
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:0>16}\nSeccomp:\t0\n")
    settings = parse_settings({"models": {"chat": yaml.safe_load(f"{{model: /opt/m, {keys}}}")}})
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
    try:
        found = list(locked_memory(settings, devices=devices, status=status))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert [finding.state for finding in found] == states
