"""These tests end and restart Ray's head, whose GCS uses Redis, or its Redis. Two models, simulated, on a node of their own."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.chaos.ray_cluster import RayCluster, ray_cluster
from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL
from tests.e2e_fleet.streams import Ask, Load, completion, play

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (Debian: apt install redis-server)"),
]

PORT, RAY_PORT, REDIS_PORT = 8065, 8066, 8070
QUIET = "quiet"
LIMIT_S = 240.0  # of a busy machine; the records keep what was seen
NUM_STREAMS = 4


@dataclass(frozen=True)
class Fault:
    away_s: float
    kill: Callable[[RayCluster], None]
    start: Callable[[RayCluster], None] = lambda _: None
    """Bring back what was killed, unless waiting for the healed cluster does: that starts a head which has ended."""


def kill_gcs(cluster: RayCluster) -> None:
    """The head ends with its GCS, as KubeRay's does."""
    (gcs,) = (p for p in cluster.head.family() if p.name() == "gcs_server")
    gcs.kill()
    wait_until(lambda: not cluster.head.family(), limit_s=LIMIT_S, what="the end of the head")


FAULTS = {
    "head-killed": Fault(60.0, lambda cluster: cluster.head.kill()),
    "gcs-killed": Fault(0.0, kill_gcs),
    "redis-killed": Fault(60.0, lambda cluster: cluster.redis.kill(), lambda cluster: cluster.redis.start()),
}


@pytest.fixture(scope="module", params=seeds())
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def cluster(seed: int, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if all(is_there(scenario, seed) for scenario in FAULTS):
        pytest.skip("all records of this seed are there")
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["models"][QUIET] = {**config["models"][MODEL], "replicas": {"min": 1, "max": 1}}
    with ray_cluster(config, tmp_path_factory.mktemp("redis"), ray_port=RAY_PORT, redis_port=REDIS_PORT) as running:
        yield running


@pytest.mark.parametrize(("scenario", "fault"), FAULTS.items(), ids=FAULTS)
def test_no_request_notices_that_it_is_away(cluster: RayCluster, scenario: str, fault: Fault, seed: int) -> None:
    """Another model gets its first requests meanwhile. ``healed_s`` counts from the return."""
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=100)
    undisturbed = play(cluster.fleet.url, [ask])[0]
    assert undisturbed.is_complete()
    with Load(cluster.fleet.url, ask, num_streams=NUM_STREAMS) as load:
        time.sleep(chosen.uniform(1.0, 4.0))
        fault.kill(cluster)
        killed_at = time.monotonic()
        quiet = play(cluster.fleet.url, [Ask(ask.path, {**ask.body, "model": QUIET})] * 2)
        time.sleep(max(0.0, killed_at + fault.away_s - time.monotonic()))
        returned_at = time.monotonic()
        fault.start(cluster)
        cluster.wait_until_healed()
        healed_s = time.monotonic() - returned_at
        before = len(load.answers)
        wait_until(lambda: len(load.answers) >= before + 2 * NUM_STREAMS, limit_s=LIMIT_S, what="answers after it")
    record = audit(scenario, seed, [*load.answers, *quiet], undisturbed, healed_s=healed_s, at_most={"healed_s": 20.0})
    assert record.n >= 2 * NUM_STREAMS
    assert cluster.fleet.server.process.poll() is None, cluster.fleet.server.tail()
