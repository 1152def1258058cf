"""These tests show that load adds a worker pod and less load removes it, unnoticed by requests: `helm/loadtest`, and streams."""

import sys
from pathlib import Path

import pytest

from tests.cluster.kube import kubectl, run, wait_until
from tests.cluster.load import load_test
from tests.cluster.release import NAMESPACE, RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MUCH, LITTLE = 16, 2  # streams beside the load test; values.yaml wants a third replica at about 10
TOKENS = 300
MIN, MAX = 2, 3  # of values.yaml


def test_load_adds_a_worker_pod_and_removes_it_again(release: Release) -> None:
    wait_until("the smallest fleet", lambda: len(release.ready_pods("model")) == MIN)
    with load_test(release) as load:
        with release.streams(num=MUCH, tokens=TOKENS) as much:
            wait_until("one more model pod", lambda: len(release.ready_pods("model")) == MAX)
        load.require_restricted()
        with release.streams(num=LITTLE, tokens=TOKENS) as little:
            wait_until("the smallest fleet again", lambda: len(release.pods("model")) == MIN)
            wait_until("the end of the load test", load.has_ended)
        result = load.result()
    much[0].require_all_complete()
    little[0].require_all_complete()
    assert (result.failed_gates(), result.states()) == (set(), {"ok"})
    assert MIN in result.ready_pods()
    assert "<html" in result.files["report.html"]


def test_every_decision_is_in_the_log_and_is_made_again_from_it(release: Release, tmp_path: Path) -> None:
    """After the test above, so that there are changes in it; the head is the same."""
    (head,) = release.ready_pods("head")
    ask = ("exec", "-n", NAMESPACE, head, "-c", "ray-head", "--", "serve-app", "autoscale", "log", RELEASE, "--address", "auto")
    log = tmp_path / "log.jsonl"
    log.write_text(kubectl(*ask, "--json"))
    ours = (sys.executable, "-m", "serve_app.cli.main", "autoscale")
    assert ", decided again: all the same\n" in run(*ours, "replay", str(log))
    assert [line for line in log.read_text().splitlines() if not line.startswith("{")] == []
    changes = run(*ours, "log", "--file", str(log))
    assert f"sim    {MIN} -> {MAX} " in changes
    assert f"sim    {MAX} -> {MIN} " in changes
