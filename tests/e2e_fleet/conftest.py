"""These fixtures give the fleets of this folder a checkpoint and configurations: ports 8040 to 8060, a name of their own each."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.e2e.fleet import serve_app
from tests.e2e_fleet.operations import MODEL, Fleet

Configure = Callable[..., dict[str, Any]]

ELASTIC_PORT = 8041
NUM_INGRESSES = 2


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, not two: an answer must not be over before a test has seen its first tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_layers=8)


@pytest.fixture(scope="session")
def configure(checkpoint: Path) -> Configure:
    """Return a function that makes a configuration of one tiny model; real engines unless ``simulated`` is given."""

    def make(port: int, *, replicas: dict[str, int], timeouts: dict[str, float], **options: Any) -> dict[str, Any]:
        model = {"model": str(checkpoint), "num_cpus": 0.1, "replicas": replicas}
        model["engine_args"] = {"max_model_len": 2048, **options.pop("engine_args", {})}
        if (simulated := options.pop("simulated", None)) is not None:
            model["simulated"] = simulated
        ingresses = options.pop("num_ingresses", 1)
        assert not options
        ingress = {"port": port, "num_cpus": 0.1, "replicas": {"min": ingresses, "max": ingresses}}
        name = f"fleet-{os.getpid()}-{port}"
        return {"name": name, "models": {MODEL: model}, "ingress": ingress, "timeouts": timeouts}

    return make


@pytest.fixture(scope="package")
def elastic(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One replica that may become two, behind two ingresses on one port. Would wait a minute for its streams when it stops."""
    config = configure(
        ELASTIC_PORT,
        replicas={"min": 1, "max": 2, "utilization": 0.05},
        timeouts={"drain_s": 60.0, "no_replica_s": 4.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
        num_ingresses=NUM_INGRESSES,
    )
    config["protocol"] = {"heartbeat_timeout_s": 60.0}  # a death is seen by the link's end, not by silence
    with serve_app(config, tmp_path_factory.mktemp("elastic")) as server:
        running = Fleet(config["name"], config, server)
        running.wait_until_ready()
        yield running
