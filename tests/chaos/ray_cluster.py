"""This module runs Ray as on Kubernetes: Redis, a head with its state there, a node with the fleet, ``serve-app up --address``.

Each part is a process of the test's own that it may kill and start again, as the kubelet does with a pod. As in KubeRay's pods,
``ray start --block`` ends its whole node when one of Ray's own processes has ended.
"""

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.e2e.fleet import Server, environment, wait_until
from tests.e2e_fleet.operations import Fleet, is_running

STARTED = "Ray runtime started"
END_LIMIT_S = 60.0
START_LIMIT_S = 120.0
HEALED_LIMIT_S = 240.0  # of a busy machine; the records keep what was seen
GCS_RECONNECT_S = "600"
"""The chart's value for every pod. With Ray's own 60 s, raylets and workers end when the head is away for longer."""


@dataclass
class Part:
    """A program and what it was started with."""

    name: str
    command: Sequence[str]
    home: Path
    variables: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    log_at_start: int = field(default=0, init=False)
    """How many bytes its log had when it was last started."""

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    def start(self) -> None:
        """Start it, or start it again with the same arguments; its output is appended to one file."""
        with self.log.open("ab") as out:
            self.log_at_start = out.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment(self.home), **self.variables},
                cwd=self.home,
                start_new_session=True,
            )

    def has_said(self, words: str) -> bool:
        """Return whether it has said this since it was last started."""
        return words.encode() in self.log.read_bytes()[self.log_at_start :]

    def family(self) -> list[psutil.Process]:
        """Return it and all processes below it; nothing when it has ended."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def kill(self) -> None:
        """SIGKILL the whole family and wait for its end."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait(END_LIMIT_S)
        wait_until(lambda: not any(map(is_running, family)), limit_s=END_LIMIT_S, what=f"the end of {self.name}")

    def tail(self, num_lines: int = 20) -> str:
        return "\n".join([f"--- {self.name}", *self.log.read_text(errors="replace").splitlines()[-num_lines:]])


@dataclass(frozen=True)
class RayCluster:
    """The parts of a fleet whose Ray has a Redis."""

    redis: Part
    head: Part
    node: Part
    folder: Path
    """Ray's own."""
    fleet: Fleet
    """Its server is ``serve-app up --address``, which has none of the fleet's processes below it."""

    def wait_until_healed(self) -> None:
        """Start the head whenever it has ended, until Serve says that the application runs and the board has all its members."""
        models = self.fleet.config["models"].values()
        num_members = sum(model["replicas"]["min"] for model in models) + 1

        def is_healed() -> bool:
            if not self.head.family():
                # In a new container it is not there. Here `ray start` would take the node's raylet for a cluster that still runs.
                (self.folder / "ray_current_cluster").unlink(missing_ok=True)
                self.head.start()
            if not self.head.has_said(STARTED):
                return False  # asked now, the command would wait for a minute
            said = self.fleet.command("status", self.fleet.name, "--json")
            report = json.loads(said.stdout) if said.returncode == 0 else {}
            return report.get("status") == "RUNNING" and len(report["members"]) == num_members

        wait_until(is_healed, limit_s=HEALED_LIMIT_S, what=f"the control plane is back\n{self.head.tail()}", every_s=0.5)


def variables_of_a_cluster(folder: Path) -> dict[str, str]:
    """Return what all processes of a Ray cluster in ``folder`` get: a token of its own, and no memory monitor."""
    return {
        "TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }


@contextlib.contextmanager
def ray_cluster(config: Mapping[str, Any], home: Path, *, ray_port: int, redis_port: int) -> Iterator[RayCluster]:
    """Run the fleet of ``config`` with one ingress; it is ready. Leaves nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # a path of a socket has 107 bytes at most
    shared = {**variables_of_a_cluster(folder), "RAY_gcs_rpc_server_reconnect_timeout_s": GCS_RECONNECT_S}
    redis = Part("redis", redis_command(redis_port), home, {})
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.1"]
    ray_start += ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(100 << 20)]
    as_head = ["--head", "--port", str(ray_port), "--num-cpus", "0", "--include-dashboard", "false", "--temp-dir", str(folder)]
    as_head += ["--dashboard-agent-listen-port", str(ray_port + 1), "--ray-client-server-port", str(ray_port + 2)]
    as_node = ["--address", f"127.0.0.1:{ray_port}", "--num-cpus", "8", "--dashboard-agent-listen-port", str(ray_port + 3)]
    head = Part("head", ray_start + as_head, home, {**shared, "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}"})
    node = Part("node", ray_start + as_node, home, shared)
    file = home / "fleet.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(file), "--address", f"127.0.0.1:{ray_port}"]
    up = Part("log", command, home, shared)
    try:
        redis.start()
        head.start()
        wait_until(lambda: head.has_said(STARTED), limit_s=START_LIMIT_S, what="Ray's head", every_s=0.2)
        node.start()
        wait_until(lambda: node.has_said(STARTED), limit_s=START_LIMIT_S, what="Ray's node", every_s=0.2)
        up.start()
        assert up.process is not None
        url = f"http://127.0.0.1:{config['ingress']['port']}"
        running = Fleet(config["name"], dict(config), Server("fleet", url, up.log, up.process))
        running.wait_until_ready()
        yield RayCluster(redis, head, node, folder, running)
    finally:
        for part in (up, node, head, redis):
            part.kill()
        shutil.rmtree(folder, ignore_errors=True)


def redis_command(port: int) -> list[str]:
    """As the chart's own Redis: each change is in a file within a second, so that one that was killed comes back with its data."""
    return ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--appendonly", "yes", "--save", ""]
