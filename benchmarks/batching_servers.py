"""This module runs the batching benchmark's servers as processes: a static server, reconfigured for each setting, and a fleet."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.batching_setups import Setup, fleet_model
from benchmarks.processes import server
from benchmarks.targets import environment, fleet_config
from serve_app.config import ModelSettings

STATIC_PORT, FLEET_PORT = 18400, 18402
_START_S = 240.0
_IDLE_S = 300.0


@dataclass
class StaticServer:
    """A running ``python -m benchmarks.static_batching``."""

    file: Path
    log: Path
    url: str = f"http://127.0.0.1:{STATIC_PORT}"
    process: psutil.Process = field(init=False)

    def set(self, values: dict[str, Any]) -> None:
        """Change the server's settings when its last batch has ended; return when Serve routes requests to it again.

        The replica has the settings seconds earlier; until Serve has noticed, requests wait in its router.

        Raises:
            TimeoutError: The server does not apply the settings.
        """
        self._wait_for({"busy": False, "waiting": 0})
        self.file.write_text(yaml.safe_dump(values))
        said = self._num_changes()
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + _IDLE_S
        while self._num_changes() == said and time.monotonic() < deadline:
            time.sleep(0.1)
        self._wait_for({name: value for name, value in values.items() if name != "simulated"} | _flat(values))

    def batches(self) -> bytes:
        """Return the records of all batches since the last `set`, as JSON."""
        return httpx.get(f"{self.url}/batches", timeout=60).content

    def _num_changes(self) -> int:
        return self.log.read_text(errors="replace").count("serving at")

    def _wait_for(self, wanted: dict[str, Any]) -> None:
        deadline = time.monotonic() + _IDLE_S
        while time.monotonic() < deadline:
            found = httpx.get(f"{self.url}/settings", timeout=60).json()
            if all((found | _flat(found)).get(name) == value for name, value in wanted.items()):
                return
            time.sleep(0.1)
        raise TimeoutError(f"the static server has {found}, not {wanted}")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {"time_scale": values["simulated"]["time_scale"]} if values.get("simulated") else {}


@contextlib.contextmanager
def static_server(values: dict[str, Any], folder: Path) -> Iterator[StaticServer]:
    """Start a static server with these settings, on a Ray cluster of its own."""
    static = StaticServer(folder / "static.yaml", folder / "static.log")
    static.file.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "benchmarks.static_batching", str(static.file), "--port", str(STATIC_PORT)]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with server(command, f"{static.url}/settings", log=static.log, environment=env, start_s=_START_S) as process:
        static.process = process
        yield static


@contextlib.contextmanager
def fleet(setup: Setup, folder: Path) -> Iterator[str]:
    """Start one replica behind one ingress; yields the URL."""
    model = ModelSettings.model_validate(fleet_model(setup))
    config = fleet_config(model, 1) | {"name": "bench-batching"}
    config["ingress"] |= {"port": FLEET_PORT, "max_waiting_requests": 10_000}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(path)]
    url = f"http://127.0.0.1:{FLEET_PORT}"
    with server(command, f"{url}/readyz", log=folder / "fleet.log", environment=environment(model), start_s=_START_S):
        yield url
