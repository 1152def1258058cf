"""A replica hears that a node of its engine drains, whatever the GCS answers before."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest

from serve_app.replica.node_drain import until_one_drains
from tests.doubles.fleet import in_loop


@in_loop
async def test_only_a_node_of_the_engine_counts_and_a_gcs_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Collection[str] | Exception] = [set(), {"other"}, OSError("away"), OSError("away"), {"other", "second"}]
    asked = list[str]()

    def nodes() -> set[str]:
        asked.append("nodes")
        if len(asked) == 1:
            raise OSError("no answer yet")
        return {"second", "third"}

    def draining() -> Collection[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await until_one_drains(nodes, draining, every_s=0.0) == "second"
    assert answers == []
    assert asked == ["nodes", "nodes"]
    assert caplog.text.count("whether a node of this engine drains is unknown: away") == 1


@pytest.mark.slow
def test_an_actor_hears_that_ray_drains_the_other_node_of_its_group() -> None:
    with tempfile.TemporaryDirectory(prefix="drain-", dir="/tmp") as folder:  # a path of a socket has 107 bytes at most
        (Path(folder) / "ray").mkdir()
        command = [sys.executable, "-m", "tests.replica.draining", f"{folder}/ray"]
        env = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240, env=env)
    said = done.stdout.splitlines()
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=240, env={**os.environ, "RAY_TMPDIR": folder}
        ).stdout.splitlines()
    drained, heard = (line.split() for line in said if line.startswith(("drained", "heard")))
    assert (drained[0], heard[0], drained[1]) == ("drained", "heard", heard[1])
