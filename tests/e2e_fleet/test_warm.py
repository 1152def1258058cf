"""With `warm_start` engines are forks of one process, also those that replace a killed engine, and no stream ends with it. Two simulated
replicas."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, taking
from tests.e2e_fleet.streams import chat, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8060
LIMIT_S = 240.0  # of a busy machine
LONG = {"max_tokens": 900}  # 20 s and more: the streams must not be over before the kill
ASKS = [
    *(completion(MODEL, prompt=f"{n} the quick brown fox", **LONG) for n in range(4)),
    *(chat(MODEL, prompt=f"{n} jumps over", **LONG) for n in range(4)),
]

Member = dict[str, Any]


@pytest.fixture(scope="module")
def warm(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["models"][MODEL]["warm_start"] = True
    config["protocol"] = {"heartbeat_timeout_s": 60.0}  # a death is seen by the link's end, not by silence
    with fleet(config, tmp_path_factory.mktemp("warm")) as running:
        yield running


def server_of(member: Member) -> psutil.Process:
    """Return the fork server that made this replica's engine."""
    parent = psutil.Process(member["load"]["engine_pid"]).parent()
    assert parent is not None
    assert "serve_app.replica.fork_server" in parent.cmdline()
    return parent


def members(warm: Fleet) -> dict[str, Member]:
    return {m["replica_id"]: m for m in warm.members("replica")}


def wait_for_heir(warm: Fleet, victim: str) -> None:
    wait_until(
        lambda: len(now := taking(warm.ingresses()[0])) == 2 and victim not in now,
        limit_s=LIMIT_S,
        what=f"another replica in place of {victim}\n{warm.server.tail()}",
    )


def test_streams_outlive_a_killed_fork_and_its_heir_is_a_fork_of_the_same_process(warm: Fleet) -> None:
    undisturbed = play(warm.url, ASKS)
    before = members(warm)
    (server,) = {server_of(member) for member in before.values()}
    victim, *_ = before
    resumed = warm.resumptions()

    answers = play(warm.url, ASKS, lambda: os.kill(before[victim]["load"]["engine_pid"], signal.SIGKILL))
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]
    assert all(a.is_complete() for a in answers)
    assert warm.resumptions() > resumed

    wait_for_heir(warm, victim)
    after = members(warm)
    assert len(after.keys() - before.keys()) == 1
    assert {server_of(member) for member in after.values()} == {server}
