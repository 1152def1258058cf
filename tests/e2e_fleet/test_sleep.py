"""These tests run two models that share one simulated GPU by sleeping, with live requests for both."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Ask, completion, play

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1500)]

OTHER = "other"
LIMIT_S = 120.0


@pytest.fixture
def sharing(configure: Configure, tmp_path: Path) -> Iterator[Fleet]:
    timeouts = {"drain_s": 300.0, "no_replica_s": 300.0}
    config = configure(8055, replicas={"min": 0, "max": 1}, timeouts=timeouts, simulated={"profile": "a10g-llama-8b"})
    sleep = {"replicas_per_gpu": 2, "after_s": 5.0}
    config["models"][MODEL] |= {"required": False, "gpus_per_replica": 1, "sleep": sleep}
    config["models"][OTHER] = {**config["models"][MODEL]}
    config["autoscaling"] = {"max_gpus": 1}
    with fleet(config, tmp_path) as running:
        yield running


def asks(num_tokens: int) -> list[Ask]:
    return [completion(model, max_tokens=num_tokens) for model in (MODEL, OTHER)]


def rows(sharing: Fleet) -> dict[str, dict[str, Any]]:
    done = sharing.command("models", "list", "--name", sharing.name, "--json")
    assert done.returncode == 0, done.stderr
    return {row["model"]: row for row in json.loads(done.stdout)}


def test_two_models_change_places_without_a_start_and_no_stream_is_cut(sharing: Fleet) -> None:
    first = play(sharing.url, asks(100))
    assert [(answer.status, answer.is_complete()) for answer in first] == [(200, True)] * 2
    began = time.time_ns()
    later = [*play(sharing.url, asks(200)), *play(sharing.url, asks(500))]
    assert [(answer.status, answer.is_complete()) for answer in later] == [(200, True)] * 4
    leases = sharing.members("replica")
    assert sorted(lease["model"] for lease in leases) == sorted([MODEL, OTHER])
    assert all(lease["epoch"] < began for lease in leases), "a replica has started meanwhile"
    assert sum(lease["load"]["wakes"] for lease in leases) >= 2
    limit = time.monotonic() + LIMIT_S
    while {row["state"] for row in rows(sharing).values()} != {"asleep"}:  # also the last one, which no other model asks for
        assert time.monotonic() < limit
