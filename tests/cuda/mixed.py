"""This module runs a fleet of both images on one Ray cluster, as the chart does: the ingress in the CPU image's environment, the engines in
the CUDA image's. Each node is a raylet of this machine."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.ray_cluster import START_LIMIT_S, STARTED, Part, variables_of_a_cluster
from tests.cuda.conftest import PYTHONS
from tests.e2e.fleet import Server, wait_until

RAY_PORT = 8170


@contextlib.contextmanager
def mixed_fleet(config: Mapping[str, Any], home: Path) -> Iterator[Server]:
    """Run the fleet of a configuration with one model; not yet ready. Its log is that of ``serve-app up``."""
    home.mkdir(parents=True)
    folder = Path(tempfile.mkdtemp(prefix="mixed-", dir="/tmp"))  # a path of a socket has 107 bytes at most
    variables = variables_of_a_cluster(folder)
    head = Part("head", [PYTHONS["cpu"], *_ray_start("cpu", RAY_PORT + 2), *_as_head(folder)], home, variables)
    as_node = ["--address", f"127.0.0.1:{RAY_PORT}"]
    node = Part("node", [PYTHONS["cuda"], *_ray_start("cuda", RAY_PORT + 3), *as_node], home, variables)
    placed = {**config, "ingress": {**config["ingress"], "resources": {"cpu_image": 1}}}
    placed["models"] = {name: {**model, "resources": {"cuda_image": 1}} for name, model in config["models"].items()}
    file = home / "fleet.yaml"
    file.write_text(yaml.safe_dump(placed))
    command = [PYTHONS["cpu"], "-m", "serve_app.cli.main", "up", "-f", str(file), "--address", f"127.0.0.1:{RAY_PORT}"]
    up = Part("log", command, home, variables)
    try:
        for part in (head, node):
            part.start()
            wait_until(lambda part=part: part.has_said(STARTED), limit_s=START_LIMIT_S, what=part.name, every_s=0.2)  # type: ignore[misc]
        up.start()
        assert up.process is not None
        yield Server("mixed fleet", f"http://127.0.0.1:{config['ingress']['port']}", up.log, up.process)
    finally:
        for part in (up, node, head):
            part.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _ray_start(image: str, agent_port: int) -> list[str]:
    return [
        *("-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.1", "--num-cpus", "4"),
        *("--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(100 << 20)),
        *("--resources", f'{{"{image}_image": 8}}', "--dashboard-agent-listen-port", str(agent_port)),
    ]


def _as_head(folder: Path) -> list[str]:
    ports = ["--port", str(RAY_PORT), "--ray-client-server-port", str(RAY_PORT + 1)]
    return ["--head", *ports, "--include-dashboard", "false", "--temp-dir", str(folder)]
