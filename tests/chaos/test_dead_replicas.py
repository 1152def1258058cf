"""These tests kill or stop a replica, or stop an ingress, under many short requests; the ledger has the replica of each request."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serve_app.core.fleet_settings import FleetSettings
from tests.chaos.records import audit, is_there, ledger_lines, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8073
NUM_STREAMS, TOKENS = 8, 20
NUM_AFTER = 120
"""Requests that end after the fault; at 5 to 10 a second most come later than a second after it."""
LIMIT_S = 300.0  # of a busy machine
DEATHS = {"replica-killed": "pid", "engine-killed": "engine_pid", "engine-stopped": "engine_pid"}
STOOD_STILL, STILL_S, BETWEEN_S = "ingress-stood-still", 6.5, 4.0
"""Longer than `protocol.heartbeat_timeout_s`, and than it takes to have links and tokens again."""
MAX_DEATHS = FleetSettings(model=MODEL).max_deaths
MOST_OF_A_DEAD_ONE, MOST_OF_A_HUNG_ONE = 0.01, 0.2


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("dead")
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["ingress"]["ledger"] = {"dir": str(root / "ledger")}
    with fleet(config, root) as running:
        yield running


@pytest.mark.parametrize("scenario", DEATHS)
@pytest.mark.parametrize("seed", seeds())
def test_a_replica_gets_hardly_a_request_from_a_second_after_its_death_on(pair: Fleet, scenario: str, seed: int) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    pair.wait_until_ready()
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=TOKENS)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    victim = chosen.choice(pair.members("replica"))
    process = psutil.Process({**victim, **victim["load"]}[DEATHS[scenario]])
    folder = Path(pair.config["ingress"]["ledger"]["dir"])
    num_before = len(ledger_lines(folder))
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        time.sleep(chosen.uniform(2.0, 4.0))
        process.suspend() if scenario == "engine-stopped" else process.kill()
        died_at, num_ended = time.time(), len(load.answers)
        wait_until(lambda: len(load.answers) >= num_ended + NUM_AFTER, limit_s=LIMIT_S, what=f"answers\n{pair.server.tail()}")
    wait_until(lambda: len(ledger_lines(folder)) >= num_before + len(load.answers), limit_s=LIMIT_S, what="the ledger's lines")
    pair.wait_until_ready()
    healed_s = time.time() - died_at
    after = [line for line in ledger_lines(folder)[num_before:] if line.time > died_at]
    late = [line for line in after if line.time > died_at + 1.0]
    to_victim = [line.time - died_at for line in after if victim["replica_id"] in line.replicas]
    share = sum(victim["replica_id"] in line.replicas for line in late) / len(late)
    measured = {"late_n": float(len(late)), "late_share": share, "last_given_s": max(to_victim, default=0.0)}
    assert len(late) >= NUM_AFTER / 2
    most = MOST_OF_A_HUNG_ONE if scenario == "engine-stopped" else MOST_OF_A_DEAD_ONE
    audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s, measured=measured, at_most={"late_share": most})


@pytest.mark.parametrize("seed", seeds())
def test_an_ingress_that_stands_still_again_and_again_costs_its_streams_time_and_no_life(pair: Fleet, seed: int) -> None:
    """Each time both ends of its links find the other silent, and a stream resumes elsewhere; a stream ends when engines die as often."""
    if is_there(STOOD_STILL, seed):
        pytest.skip("its record is there")
    pair.wait_until_ready()
    ask = completion(MODEL, prompt=f"{random.Random(seed).randrange(1000)} jumps over the lazy dog", max_tokens=1500)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    (member,) = pair.members("ingress")
    ingress, before = psutil.Process(member["pid"]), pair.resumptions()

    def stand_still() -> None:
        for _ in range(MAX_DEATHS + 1):
            ingress.suspend()
            time.sleep(STILL_S)
            ingress.resume()
            time.sleep(BETWEEN_S)

    answers = play(pair.url, [ask] * 4, stand_still)
    measured = {"resumptions": pair.resumptions() - before}
    audit(STOOD_STILL, seed, answers, undisturbed, healed_s=0.0, measured=measured)
    assert measured["resumptions"] > MAX_DEATHS * len(answers), "they did not lose their replicas so often"
