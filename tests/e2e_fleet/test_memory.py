"""These tests check that Ray's memory monitor, which takes the machine for full, costs a fleet of ``serve-app up`` nothing."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serve_app.replica.oom import ABOVE_FIRST, ABOVE_OTHERS
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def full(configure: Configure, tmp_path: Path) -> Iterator[Fleet]:
    """Two replicas on a machine that is over Ray's threshold: with its monitor on, Ray ends them while they start."""
    config = configure(8058, replicas={"min": 2, "max": 2}, timeouts={"drain_s": 4.0}, simulated={"profile": "a10g-llama-8b"})
    with fleet(config, tmp_path, RAY_memory_usage_threshold="0.01") as running:
        yield running


def test_a_full_machine_ends_nothing_and_the_kernel_would_end_replicas_before_all_else_the_first_one_last(full: Fleet) -> None:
    (answer,) = play(full.url, [completion(MODEL, max_tokens=20)])
    assert answer.is_complete()
    own = adjustment(psutil.Process(full.server.process.pid))
    titles = ("ray::LeaseBoard", "ray::ServeController", "ray::ServeReplica:" + full.name + ":ingress")
    assert [adjustment(full.process(title)) for title in titles] == [own] * 3
    engines = [psutil.Process(member["load"]["engine_pid"]) for member in full.members("replica")]
    for supervised in (engines, [engine.parent() for engine in engines]):
        assert sorted(adjustment(process) for process in supervised) == [own + ABOVE_FIRST, own + ABOVE_OTHERS]


def adjustment(process: psutil.Process | None) -> int:
    assert process is not None
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
