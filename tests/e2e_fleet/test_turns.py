"""These tests run two models in turns on one shared simulated GPU, with live requests for both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Ask, completion, play

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1500)]

OTHER = "other"


@pytest.fixture
def sharing(configure: Configure, tmp_path: Path) -> Iterator[Fleet]:
    timeouts = {"drain_s": 300.0, "no_replica_s": 300.0}
    config = configure(8050, replicas={"min": 0, "max": 1}, timeouts=timeouts, simulated={"profile": "a10g-llama-8b"})
    config["models"][MODEL] |= {"required": False, "gpus_per_replica": 1}
    config["models"][OTHER] = {**config["models"][MODEL]}
    config["autoscaling"] = {"max_gpus": 1}
    with fleet(config, tmp_path) as running:
        yield running


def asks(num_tokens: int) -> list[Ask]:
    return [completion(model, max_tokens=num_tokens) for model in (MODEL, OTHER)]


def decisions(sharing: Fleet) -> list[dict[str, Any]]:
    done = sharing.command("autoscale", "log", sharing.name, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_requests_for_two_models_on_one_gpu_are_all_answered_by_turns_and_no_stream_is_cut(sharing: Fleet) -> None:
    """The second pair asks for the model that has just made room: it has to come back. A stream outlasts its model's stay, by a drain."""
    answers = [*play(sharing.url, asks(200)), *play(sharing.url, asks(2000))]
    assert [(answer.status, answer.is_complete()) for answer in answers] == [(200, True)] * 4
    log = decisions(sharing)
    targets = [{name: model["target"] for name, model in row["seen"]["models"].items()} for row in log]
    assert max(sum(target.values()) for target in targets) == 1, "more replicas than GPUs"
    turns = {name for row in log for name, made in row["decided"].items() if made["rule"] == "another model's turn"}
    assert turns == {MODEL, OTHER}
