"""Streams of a replica that stops go on at another with their KV: real engines, NIXL over TCP."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, taking
from tests.e2e_fleet.streams import completion, play

pytest.importorskip("nixl", reason="the extra kv is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPT_WORDS, NUM_TOKENS, NUM_STREAMS = 200, 1400, 4
BUDGET_S = 3.0


@pytest.fixture(scope="module")
def reading(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        8058, replicas={"min": 2, "max": 2}, timeouts={"drain_s": BUDGET_S, "no_replica_s": 60.0, "stream_silence_s": 60.0}
    )
    config["models"][MODEL]["kv"] = {"transfer": "nixl", "port": 15900}
    with fleet(config, tmp_path_factory.mktemp("reading")) as running:
        yield running


def test_streams_of_a_replica_that_stops_are_the_same_and_take_their_kv_along(reading: Fleet) -> None:
    asks = [completion(MODEL, prompt=f"{number} a" * PROMPT_WORDS, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
    undisturbed = play(reading.url, asks)

    def terminate_one() -> None:
        victim = reading.members("replica")[0]
        os.kill(victim["pid"], signal.SIGTERM)
        wait_until(
            lambda: victim["replica_id"] not in taking(reading.ingresses()[0]), limit_s=60.0, what="a replica that takes no more"
        )

    answers = play(reading.url, asks, terminate_one)
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]
    series = reading.ingresses()[0]
    results = {dict(labels)["result"]: value for (name, labels), value in series.items() if name == "serve_app_hand_overs_total"}
    assert results.get("read", 0) > 0, results
    assert series["serve_app_kv_read_tokens_total", (("model", MODEL),)] >= PROMPT_WORDS
    assert series["serve_app_kv_read_bytes_total", (("model", MODEL),)] > PROMPT_WORDS
