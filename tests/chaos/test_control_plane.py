"""Serve's controller and the lease board are killed under running streams and new requests. Two simulated replicas."""

import random
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), pytest.mark.xdist_group("chaos")]

PORT = 8064
HEALED_LIMIT_S = 120.0  # of a busy machine; the records keep what was seen
NUM_STREAMS = 4
TITLES = {"board-killed": "ray::LeaseBoard", "controller-killed": "ray::ServeController"}


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    with fleet(config, tmp_path_factory.mktemp("pair")) as running:
        yield running


def heir(pair: Fleet, title: str, victim: psutil.Process) -> bool:
    try:
        return pair.process(title) != victim
    except AssertionError:
        return False


@pytest.mark.parametrize(("scenario", "title"), TITLES.items(), ids=TITLES)
@pytest.mark.parametrize("seed", seeds())
def test_no_request_notices_that_the_control_plane_is_killed(pair: Fleet, scenario: str, title: str, seed: int) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=100)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    victim = pair.process(title)
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        time.sleep(chosen.uniform(1.0, 4.0))
        victim.kill()
        killed_at = time.monotonic()
        wait_until(lambda: heir(pair, title, victim), limit_s=HEALED_LIMIT_S, what=f"another {title}\n{pair.server.tail()}")
        healed_s = time.monotonic() - killed_at
        before = len(load.answers)
        wait_until(lambda: len(load.answers) >= before + 2 * NUM_STREAMS, limit_s=HEALED_LIMIT_S, what="answers after it")
    record = audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s)
    assert record.n >= 2 * NUM_STREAMS
    assert record.failures == 0
