"""Replicas come and go, five at a time, under streams that outlive them. Simulated replicas."""

import random
import time
from collections.abc import Iterator

import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, replicas, taking
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SCENARIO = "twenty-changes"
PORT = 8074
LEAST, MOST, NUM_SWINGS = 2, 7, 4
BUDGET_S = 20.0
NUM_STREAMS, NUM_TOKENS, SHORT_TOKENS = 12, 1900, 20
SLOWNESS = 4.0
"""A token takes 170 ms, so that a stream takes 320 s: the starts of ten replicas cost two cores longer than a minute."""
LIMIT_S = 300.0  # of a busy machine
STREAM_LIMIT_S = 700.0


@pytest.fixture(scope="module")
def swinging(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": LEAST, "max": LEAST},  # a number that a test may set; Serve keeps that of a scaled model to itself
        timeouts={"drain_s": BUDGET_S, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b", "time_scale": SLOWNESS},
    )
    with fleet(config, tmp_path_factory.mktemp("swinging")) as running:
        yield running


@pytest.mark.parametrize("seed", seeds(long=True))
def test_twenty_changes_cut_no_stream_and_refuse_no_request(swinging: Fleet, seed: int) -> None:
    if is_there(SCENARIO, seed):
        pytest.skip("its record is there")
    prompt = f"{random.Random(seed).randrange(1000)} the quick brown fox"
    ask, short = (completion(MODEL, prompt=prompt, max_tokens=count) for count in (NUM_TOKENS, SHORT_TOKENS))
    undisturbed, undisturbed_short = play(swinging.url, [ask, short], limit_s=STREAM_LIMIT_S)
    assert undisturbed.is_complete()
    scale(swinging, MOST)  # so that streams begin on replicas that go
    before = num_moved(swinging)
    took: list[float] = []

    def swing() -> None:
        began = time.monotonic()
        for number in range(NUM_SWINGS):
            scale(swinging, MOST if number % 2 else LEAST)
        took.append(time.monotonic() - began)

    with Load(swinging.url, short, num_streams=2) as load:
        answers = play(swinging.url, [ask] * NUM_STREAMS, swing, limit_s=STREAM_LIMIT_S)
    bad = sum(not a.is_complete() or a.folded() != undisturbed_short.folded() for a in load.answers)
    measured = {
        "changes": float(NUM_SWINGS * (MOST - LEAST)),
        "changes_took_s": took[0],
        "moved": num_moved(swinging) - before,
        "short_n": float(len(load.answers)),
        "short_failures": float(bad),
    }
    assert measured["moved"] > 0
    assert took[0] < min(a.times[-1] - a.times[0] for a in answers), "a stream ended before the last change"
    audit(SCENARIO, seed, answers, undisturbed, healed_s=0.0, measured=measured, at_most={"short_failures": 0})


def num_moved(swinging: Fleet) -> float:
    return swinging.ingresses()[0][("serve_app_moved_total", (("model", MODEL),))]


def scale(swinging: Fleet, count: int) -> None:
    swinging.operate("scale", swinging.config, MODEL, str(count))
    wait_until(
        lambda: len(taking(series := swinging.ingresses()[0])) == len(replicas(series)) == count,
        limit_s=LIMIT_S,
        what=f"{count} replicas and no other\n{swinging.server.tail(20)}",
    )
