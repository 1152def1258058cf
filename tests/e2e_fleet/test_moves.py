"""Replicas stop under streams that outlive their budget, and streams move; an ingress stands still, and they stay. Simulated replicas."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, replicas, taking
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_TOKENS = 600  # 25 s, five budgets
BUDGET_S = 5.0
NUM_ROUNDS = 2
STANDSTILL_S = 8.0
"""More than `protocol.heartbeat_timeout_s`."""


@pytest.fixture(scope="module")
def churning(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        8051,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": BUDGET_S, "no_replica_s": BUDGET_S, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    with fleet(config, tmp_path_factory.mktemp("churning")) as running:
        yield running


def test_streams_that_outlive_every_budget_are_the_same_after_scaling_and_sigterm(churning: Fleet) -> None:
    ask = completion(MODEL, max_tokens=NUM_TOKENS)
    (undisturbed,) = play(churning.url, [ask])
    with Load(churning.url, ask, num_streams=6) as load:
        for _ in range(NUM_ROUNDS):
            scale(churning, 1)
            scale(churning, 2)
            terminate_one(churning)
    assert len(load.answers) >= 6
    assert [a.folded() for a in load.answers] == [undisturbed.folded()] * len(load.answers)
    moved = ("serve_app_moved_total", (("model", MODEL),))
    assert churning.ingresses()[0][moved] > 0


def test_streams_stay_at_their_replicas_while_their_ingress_stands_still(churning: Fleet) -> None:
    ask = completion(MODEL, max_tokens=NUM_TOKENS)
    (undisturbed,) = play(churning.url, [ask])
    ingress = churning.process(f"ray::ServeReplica:{churning.name}:ingress")

    def stand_still() -> None:
        ingress.suspend()
        time.sleep(STANDSTILL_S)
        ingress.resume()

    resumed, lost = churning.resumptions(), links_lost(churning)
    answers = play(churning.url, [ask] * 6, stand_still)
    assert [a.folded() for a in answers] == [undisturbed.folded()] * 6
    assert (churning.resumptions(), links_lost(churning)) == (resumed, lost)


def links_lost(churning: Fleet) -> float:
    return sum(value for (name, _), value in churning.ingresses()[0].items() if name == "serve_app_links_lost_total")


def scale(churning: Fleet, count: int) -> None:
    churning.operate("scale", churning.config, MODEL, str(count))
    wait_until(
        lambda: len(taking(series := churning.ingresses()[0])) == len(replicas(series)) == count,
        limit_s=180.0,
        what=f"{count} replicas and no other",
    )


def terminate_one(churning: Fleet) -> None:
    victim = churning.members("replica")[0]
    os.kill(victim["pid"], signal.SIGTERM)
    wait_until(
        lambda: len(now := taking(churning.ingresses()[0])) == 2 and victim["replica_id"] not in now,
        limit_s=180.0,
        what="another replica in its place",
    )
