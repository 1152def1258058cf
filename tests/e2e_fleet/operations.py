"""This module reads a running fleet as its operator does: its members, its processes, its series."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fleet import Server, serve_app, wait_ready, wait_until

MODEL = "tiny"
COMMAND_LIMIT_S = 180.0  # of a busy machine
ROOT = Path(__file__).parents[2]

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Fleet:
    """A ``serve-app up`` of a test."""

    name: str
    config: dict[str, Any]
    server: Server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def home(self) -> Path:
        return self.server.log.parent

    def command(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run ``serve-app`` with the fleet's own cache folder, where ``up`` keeps its run file."""
        return self._run("serve_app.cli.main", *arguments, limit_s=limit_s)

    def operate(self, action: str, config: Mapping[str, Any], *arguments: str) -> None:
        """Hand Serve a configuration, as `operate` says."""
        file = self.home / "changed.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        result = self._run("tests.e2e_fleet.operate", action, str(file), *arguments)
        assert result.returncode == 0, result.stderr

    def _run(self, module: str, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        # As in KubeRay's pods: no line of Ray's may be among the answer.
        environment = {**os.environ, "RAY_LOG_TO_STDERR": "1", "SERVE_APP_CACHE": str(self.home / "serve-app")}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)

    def status(self) -> dict[str, Any]:
        """Return what ``serve-app status --json`` prints."""
        result = self.command("status", self.name, "--json")
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    def members(self, role: str) -> list[dict[str, Any]]:
        return [m for m in self.status()["members"] if m["role"] == role]

    def family(self) -> list[psutil.Process]:
        """Return ``serve-app up`` and all processes below it."""
        main = psutil.Process(self.server.process.pid)
        return [main, *main.children(recursive=True)]

    def process(self, title: str) -> psutil.Process:
        """Return the process below ``serve-app up`` whose title starts so, such as ``ray::LeaseBoard``."""
        found = titled(self.family(), title)
        assert found, f"no process {title} below {self.server.process.pid}"
        return found[0]

    def ingresses(self, count: int = 1) -> list[Series]:
        """Return the series of each ingress; they share the port, so connections are made until ``count`` have answered."""
        found: dict[float, Series] = {}
        deadline = time.monotonic() + COMMAND_LIMIT_S
        while len(found) < count and time.monotonic() < deadline:
            series = scrape(self.url)
            found[series[("process_start_time_seconds", ())]] = series
        assert len(found) >= count, f"{len(found)} of {count} ingresses answered"
        return [found[started] for started in sorted(found)]

    def outcome(self, name: str) -> float:
        """Return how many engine requests of a fleet with one ingress ended in this way."""
        key = ("serve_app_engine_requests_total", (("model", MODEL), ("outcome", name)))
        return self.ingresses()[0].get(key, 0.0)

    def resumptions(self) -> float:
        """Return how often an engine request of a fleet with one ingress lost its replica and went on."""
        return self.ingresses()[0].get(("serve_app_resumptions_total", (("model", MODEL),)), 0.0)

    def wait_until_ready(self) -> None:
        """Wait until it answers and every ingress has all replicas that it starts with."""
        wait_ready(self.server, "/readyz")
        num_ingresses = self.config["ingress"].get("replicas", {}).get("min", 1)
        num_replicas = sum(model["replicas"]["min"] for model in self.config["models"].values())
        self.wait_for_replicas(num_replicas, num_ingresses=num_ingresses)

    def wait_for_replicas(self, count: int, *, num_ingresses: int = 1, limit_s: float = 180.0) -> None:
        """Wait until every ingress has a link to this many replicas, of all models, that take requests."""
        wait_until(
            lambda: all(len(taking(s)) == count for s in self.ingresses(num_ingresses)),
            limit_s=limit_s,
            what=f"{count} replicas at each ingress\n{self.server.tail(20)}",
        )


def scrape(url: str) -> Series:
    """Return the series of whichever ingress takes the connection."""
    text = httpx.get(f"{url}/metrics", timeout=10, verify=False).text  # else the certificates are loaded, 50 ms of CPU
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def replicas(series: Series) -> dict[str, float]:
    """Return replica id -> 1.0 when it is draining, else 0.0, of the replicas that this ingress has a link to."""
    return {dict(labels)["replica"]: v for (name, labels), v in series.items() if name == "serve_app_replica_draining"}


def taking(series: Series) -> set[str]:
    """Return the ids of the replicas that this ingress gives requests to."""
    return {replica_id for replica_id, draining in replicas(series).items() if not draining}


@contextlib.contextmanager
def fleet(config: Mapping[str, Any], home: Path, **variables: str) -> Iterator[Fleet]:
    """Run a fleet with these variables in its environment; it is ready."""
    with serve_app(config, home, variables=variables) as server:
        running = Fleet(config["name"], dict(config), server)
        running.wait_until_ready()
        yield running


def moments(fleet: Fleet, holds: Callable[[Series], bool], *, num_ingresses: int, limit_s: float) -> list[float]:
    """Return the wall-clock time at which each ingress first showed what ``holds`` asks for; polled, so up to 0.1 s late."""
    times: dict[float, float] = {}

    def all_do() -> bool:
        series = scrape(fleet.url)
        if holds(series):
            times.setdefault(series[("process_start_time_seconds", ())], time.time())
        return len(times) == num_ingresses

    wait_until(all_do, limit_s=limit_s, what=f"seen by {num_ingresses} ingresses", every_s=0.05)
    return sorted(times.values())


@dataclass(frozen=True)
class Traces:
    """The traces of a running ``serve-app up`` on the machine, to check afterwards what is left of them."""

    processes: list[psutil.Process]
    folder: Path
    port: int
    shared_memory: set[str]

    @classmethod
    def of(cls, fleet: Fleet) -> "Traces":
        family = fleet.family()
        return cls(family, temporary_folder(family[0]), fleet.config["ingress"]["port"], shared_memory(family))

    def left(self) -> list[str]:
        """Return what is still there, in words."""
        there = [f"process {p.pid} {title(p)}" for p in self.processes if is_running(p)]
        there += [str(path) for path in (self.folder, *map(Path, self.shared_memory)) if path.exists()]
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", self.port))
            except OSError:
                there.append(f"port {self.port}")
        return there


def titled(processes: Iterable[psutil.Process], start: str) -> list[psutil.Process]:
    """Return those whose command line, which Ray's workers set to what they are, starts so."""
    return [p for p in processes if title(p).startswith(start)]


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return "?"


def temporary_folder(process: psutil.Process) -> Path:
    """Return the folder that ``serve-app up`` made for its Ray cluster."""
    for child in process.children():
        if found := re.search(r"/\S*?/serve-app-\w+", " ".join(child.cmdline())):
            return Path(found.group())
    raise AssertionError("no child of serve-app up names its folder")


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped and that still have a name."""
    maps = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            maps |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return {path for path in maps if os.path.exists(path)}
