"""One checkpoint for all fleets of this folder, and their configurations: ports 8040 to 8059, a name of their own each."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.e2e_fleet.operations import MODEL

Configure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, not two: an answer must not be over before a test has seen its first tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_layers=8)


@pytest.fixture(scope="session")
def configure(checkpoint: Path) -> Configure:
    """Return a function that makes a configuration of one tiny model; real engines unless ``simulated`` is given."""

    def make(port: int, *, replicas: dict[str, int], timeouts: dict[str, float], **options: Any) -> dict[str, Any]:
        model = {"name": MODEL, "model": str(checkpoint), "num_cpus": 0.1, "replicas": replicas}
        model["engine_args"] = {"max_model_len": 2048, **options.pop("engine_args", {})}
        if (simulated := options.pop("simulated", None)) is not None:
            model["simulated"] = simulated
        ingresses = options.pop("num_ingresses", 1)
        assert not options
        ingress = {"port": port, "num_cpus": 0.1, "replicas": {"min": ingresses, "max": ingresses}}
        name = f"fleet-{os.getpid()}-{port}"
        return {"name": name, "models": [model], "ingress": ingress, "timeouts": timeouts}

    return make
