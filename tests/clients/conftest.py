"""These fixtures start one fleet, with one simulated replica, and a program for each client library that is installed. Port 8110."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.clients.client import LIBRARIES, Client
from tests.clients.relay import Relay
from tests.clients.volley import Watched
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.serving import serving

PORT = 8110
KEY = "a-key-of-the-clients-tests"
SILENCE_S = 0.3
EOS_PROBABILITY = 0.006


@pytest.fixture(scope="package")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that wants a key, and whose only replica takes 33 ms for a token, and 0.4 ms for one of a prompt.

    With one replica, each stream is on the engine that is killed, and is silent until the next engine runs.
    """
    root = tmp_path_factory.mktemp("clients")
    (root / "keys").write_text(f"{KEY}\n")
    with fleet(_config(make_tiny_llama(root / "tiny", num_layers=8), root / "keys"), root) as running:
        yield running


def _config(model: Path, keys: Path) -> dict[str, Any]:
    tiny = {
        "model": str(model),
        "num_cpus": 0.1,
        "replicas": {"min": 1, "max": 1},
        "engine_args": {"max_model_len": 2048},
        "simulated": {"profile": "a10g-llama-8b", "eos_probability": EOS_PROBABILITY},
        "frontend_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    }
    return {
        "name": f"clients-{os.getpid()}",
        "models": {MODEL: tiny},
        "ingress": {"port": PORT, "num_cpus": 0.1, "api_keys_file": str(keys)},
        "timeouts": {"drain_s": 5.0, "no_replica_s": 300.0, "stream_silence_s": SILENCE_S},
    }


@pytest.fixture(scope="package")
def clients(keyed: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Watched]]:
    """The programs of all libraries that are installed, each with a relay of its own to the fleet."""
    logs = tmp_path_factory.mktemp("programs")
    with contextlib.ExitStack() as stack:
        running = []
        for library in LIBRARIES:
            if not library.is_missing():
                relay = stack.enter_context(serving(Relay(("127.0.0.1", PORT))))
                client = Client(library, relay.url, model=MODEL, key=KEY, log=logs / library.name)
                running.append(Watched(stack.enter_context(client), relay))
        yield running
