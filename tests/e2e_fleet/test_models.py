"""These tests run `serve-app models` on a serving fleet: a model leaves while its stream runs, returns, is pinned and updated."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import assert_same, completion, play

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1500)]

STEP_LIMIT_S = 400.0
"""A command waits for a start, or for the end of a stream."""
STREAMS = [completion(MODEL, max_tokens=600)]


@pytest.fixture(scope="module")
def operated(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The model that is operated, and a second one that nothing may happen to."""
    config = configure(
        8044,
        replicas={"min": 1, "max": 2},
        timeouts={"drain_s": 60.0, "no_replica_s": 180.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["models"][MODEL]["required"] = False
    config["models"]["other"] = {**config["models"][MODEL], "replicas": {"min": 0, "max": 1}}
    with fleet(config, tmp_path_factory.mktemp("operated")) as running:
        yield running


def models(operated: Fleet, *arguments: str) -> str:
    done = operated.command("models", *arguments, "--name", operated.name, limit_s=STEP_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(operated: Fleet, name: str = MODEL) -> dict[str, Any]:
    return next(r for r in json.loads(models(operated, "list", "--json")) if r["model"] == name)


def test_a_model_is_unloaded_under_a_stream_that_loses_nothing_and_loaded_again(operated: Fleet) -> None:
    def unload() -> None:
        models(operated, "unload", MODEL)

    undisturbed = play(operated.url, STREAMS)
    ingresses = {m["pid"] for m in operated.members("ingress")}
    assert_same(play(operated.url, STREAMS, unload), undisturbed)
    assert (row(operated)["state"], row(operated)["target"]) == ("unloaded", 0)
    models(operated, "load", MODEL)
    assert row(operated)["state"] == "loaded"
    models(operated, "unload", MODEL)
    assert_same(play(operated.url, STREAMS), undisturbed)  # the request loads it again
    assert {m["pid"] for m in operated.members("ingress")} == ingresses, "an ingress was replaced"


def test_an_update_gives_every_replica_other_weights_and_keeps_the_pin(operated: Fleet, tmp_path: Path) -> None:
    weights = make_tiny_llama(tmp_path / "other", num_layers=2)
    models(operated, "pin", "other")
    before = {m["pid"] for role in ("ingress", "replica") for m in operated.members(role)}
    models(operated, "update", "other", "--model", str(weights))
    after = {role: {m["pid"] for m in operated.members(role)} for role in ("ingress", "replica")}
    assert all(pids and not pids & before for pids in after.values()), (before, after)
    assert {k: v for k, v in row(operated, "other").items() if k in ("state", "min", "loads")} == {
        "state": "loaded",
        "min": 1,
        "loads": str(weights),
    }
