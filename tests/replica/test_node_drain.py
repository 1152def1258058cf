"""A replica hears that a node of its engine drains, whatever the GCS answers before."""

from collections.abc import Collection

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
