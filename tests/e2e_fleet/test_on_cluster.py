"""These tests use a running Ray cluster: a batch brings its fleet and removes it; `serve-app models --address` reaches a fleet."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.chaos.ray_cluster import START_LIMIT_S, STARTED, Part, variables_of_a_cluster
from tests.e2e.fleet import answers, environment, wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

RAY_PORT, PORT = 8094, 8053
LIMIT_S = 900.0


@dataclass(frozen=True)
class Cluster:
    """``variables``: what a command needs to speak to it."""

    variables: Mapping[str, str]
    home: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{RAY_PORT}"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "serve_app.cli.main", *arguments, "--address", self.address]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``serve-app`` with a home in which no fleet was started: it knows the cluster by its address only."""
        home = self.home / "elsewhere"
        home.mkdir(exist_ok=True)
        variables = {**environment(home), **self.variables, "COLUMNS": "500"}
        command = self.command(*arguments)
        return subprocess.run(command, env=variables, cwd=self.home, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head with a token of its own, by ``ray start``."""
    home = tmp_path_factory.mktemp("cluster")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a path of a socket has 107 bytes at most
    variables = variables_of_a_cluster(folder)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
    command += ["--port", str(RAY_PORT), "--dashboard-agent-listen-port", str(RAY_PORT + 1)]
    command += ["--ray-client-server-port", str(RAY_PORT + 2), "--include-dashboard", "false", "--temp-dir", str(folder)]
    command += ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(100 << 20), "--num-cpus", "2"]
    head = Part("head", command, home, variables)
    try:
        head.start()
        wait_until(lambda: head.has_said(STARTED), limit_s=START_LIMIT_S, what="Ray's head", every_s=0.2)
        yield Cluster(variables, home)
    finally:
        head.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_batch_brings_its_fleet_to_a_cluster_that_runs_and_takes_it_away(configure: Configure, cluster: Cluster) -> None:
    config = configure(
        PORT,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": 4.0, "no_replica_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    (cluster.home / "fleet.yaml").write_text(yaml.safe_dump(config))
    (cluster.home / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(50)))
    for output in ("one.jsonl", "two.jsonl"):  # the second one finds the cluster empty, or is refused
        options = ("-o", output, "--no-chat", "--embedded", "fleet.yaml", "-p", "max_tokens=4")
        done = cluster.run("batch", "run", "prompts.txt", *options)
        assert done.returncode == 0, done.stderr
        assert f"starting the fleet of fleet.yaml on the Ray cluster at {cluster.address}" in done.stderr
        assert "ingress 1 starting" in done.stderr
        lines = [json.loads(line) for line in (cluster.home / output).read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"line-{i}" for i in range(1, 51)]
        assert {line["response"]["body"]["model"] for line in lines} == {MODEL}


def test_models_are_operated_by_the_address_of_their_cluster(configure: Configure, cluster: Cluster) -> None:
    config = configure(
        PORT,
        replicas={"min": 1, "max": 2},
        timeouts={"drain_s": 4.0, "no_replica_s": 180.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["models"][MODEL]["required"] = False
    file = cluster.home / "served.yaml"
    file.write_text(yaml.safe_dump(config))

    def models(*arguments: str) -> str:
        done = cluster.run("models", *arguments, "--name", config["name"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state() -> tuple[str, str]:
        (row,) = json.loads(models("list", "--json"))
        return row["model"], row["state"]

    up = Part("up", cluster.command("up", "-f", str(file)), cluster.home, dict(cluster.variables))
    try:
        up.start()
        wait_until(lambda: answers(f"http://127.0.0.1:{PORT}/readyz"), limit_s=LIMIT_S, what="the service", every_s=1.0)
        # The service is ready before the model, which is not required.
        wait_until(lambda: state() == (MODEL, "loaded"), limit_s=LIMIT_S, what="a loaded model", every_s=1.0)
        assert "is pinned" in models("pin", MODEL)
        assert "is not pinned" in models("pin", MODEL, "--off")
        assert "is unloaded" in models("unload", MODEL)
        assert state() == (MODEL, "unloaded")
        assert "is loaded: 1 of 1 replicas" in models("load", MODEL)
        config["models"][MODEL]["engine_args"] = {"max_model_len": 1024}
        file.write_text(yaml.safe_dump(config))
        assert "is updated" in models("update", MODEL, "-f", str(file))
        assert state() == (MODEL, "loaded")
    finally:
        if up.process is not None and up.process.poll() is None:
            up.process.terminate()
            up.process.wait(LIMIT_S)
