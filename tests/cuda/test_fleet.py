"""These tests run the simulated accelerator in the CUDA image, alone and behind an ingress of the CPU image: `serve-app check`, `up`,
`status`, and the CPU image's answers.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.contracts.tables import VERSIONS
from tests.cuda.conftest import PYTHONS
from tests.cuda.mixed import mixed_fleet
from tests.e2e import cases_chat, cases_completions, cases_invalid, cases_responses
from tests.e2e.answers import differences
from tests.e2e.conftest import ask_both
from tests.e2e.fleet import MODEL, TOOL_PARSER, Pair, Server, environment, fleet_config, serve_app, wait_ready

ALL_CASES = [*cases_completions.CASES, *cases_chat.CASES, *cases_responses.CASES, *cases_invalid.CASES]
CASES = [
    case for case in ALL_CASES if not case.by_chunk
]  # how many tokens share a chunk is chance, as fast as this accelerator is
NEWER = frozenset(
    {"weight_versions", "kv_transfer_params", "safety_identifier"}
    | {f"prompt_cache_{name}" for name in ("key", "options", "retention")}
)
"""Fields that only the newer version's answers have."""
CHANGED = {("completed", "incomplete"), ("response.completed", "response.incomplete"), VERSIONS}
"""What the two versions say of a response that its ``max_output_tokens`` ended, and of themselves."""
PORTS = {"cpu": 8034, "cuda": 8036, "mixed": 8038}


@dataclass(frozen=True)
class Started:
    """A fleet and its configuration."""

    server: Server
    config: dict[str, Any]


def configuration(checkpoint: Path, port: int) -> dict[str, Any]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": TOOL_PARSER}
    config = fleet_config(checkpoint, port=port, num_replicas=1, frontend_args=tools)
    model = config["models"][MODEL]
    del model["kv_cache_gib"]
    model["simulated"] = {"profile": "h100-llama-8b", "time_scale": 0.1}
    config["timeouts"]["drain_s"] = 30.0
    return config


@pytest.fixture(scope="module")
def fleets(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Started]]:
    """Start a fleet in each environment and one over both, on one machine beside each other."""
    root = tmp_path_factory.mktemp("fleets")
    with ExitStack() as running:
        started = {}
        for name, port in PORTS.items():
            config = configuration(checkpoint, port)
            home = root / name
            fleet = mixed_fleet(config, home) if name == "mixed" else serve_app(config, home, python=PYTHONS[name])
            started[name] = Started(running.enter_context(fleet), config)
            wait_ready(started[name].server, "/readyz")
        yield started


def serve_app_command(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHONS["cuda"], "-m", "serve_app.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment(home))


def test_check_knows_vllms_arguments_in_the_cuda_image_too(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    config = configuration(checkpoint, PORTS["cuda"])
    file.write_text(yaml.safe_dump(config))
    assert serve_app_command("check", str(file), home=tmp_path).returncode == 0
    config["models"][MODEL]["engine_args"]["max_num_seq"] = 3
    file.write_text(yaml.safe_dump(config))
    refused = serve_app_command("check", str(file), home=tmp_path)
    assert refused.returncode != 0
    assert "did you mean max_num_seqs?" in refused.stdout + refused.stderr


def answers_of(fleets: Mapping[str, Started], name: str) -> dict[str, dict[str, Any]]:
    """Return the differences of a fleet's answers from those of the CPU image's fleet: case -> path -> both."""
    answers = asyncio.run(ask_both(Pair(fleets["cpu"].server, fleets[name].server, fleets[name].config), CASES))
    assert {case: both for case, both in answers.items() if any("failed" in tree for tree in both)} == {}
    return {case: found for case, both in answers.items() if (found := differences(*both))}


def is_of_newer_version(path: str, older: Any, newer: Any) -> bool:
    """Return whether a difference is one of the two versions' APIs. Keys of events stand in a list."""
    if path.endswith("keys"):
        return set(older) <= set(newer) and set(newer) - set(older) <= NEWER
    return (older is None and path.rpartition(".")[2] in NEWER) or (older, newer) in CHANGED


def test_a_fleet_of_both_images_answers_as_one_of_the_cpu_image(fleets: Mapping[str, Started]) -> None:
    assert answers_of(fleets, "mixed") == {}


def test_a_fleet_of_the_cuda_image_answers_as_one_of_the_cpu_image_but_for_its_newer_api(fleets: Mapping[str, Started]) -> None:
    sampled = {case.name for case in CASES if case.sampled}  # their trees have their fields in one text
    found = {
        case: rest
        for case, paths in answers_of(fleets, "cuda").items()
        if case not in sampled and (rest := {path: both for path, both in paths.items() if not is_of_newer_version(path, *both)})
    }
    assert found.pop("completions invalid: empty prompt list").keys() == {"body.error.message", "body.error.param"}
    assert found == {}


def test_status_tells_of_the_replica_and_its_version(fleets: Mapping[str, Started]) -> None:
    cuda = fleets["cuda"]
    told = serve_app_command("status", cuda.config["name"], "--json", home=cuda.server.log.parent)
    assert told.returncode == 0, told.stderr
    assert {member["vllm_version"] for member in json.loads(told.stdout)["members"]} == {VERSIONS[1]}


def test_an_ingress_and_a_replica_of_two_versions_say_so(fleets: Mapping[str, Started]) -> None:
    report = httpx.get(f"{fleets['mixed'].server.url}/fleet", timeout=60).json()
    assert {member["role"]: member["vllm_version"] for member in report["members"]} == {
        "ingress": VERSIONS[0],
        "replica": VERSIONS[1],
    }
