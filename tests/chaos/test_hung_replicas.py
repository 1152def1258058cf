"""These tests hang a replica under streams: in a step, in its event loop, and when no process is left to judge it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.blockable import path
from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, ROOT, Fleet, fleet, is_running, replicas, scrape
from tests.e2e_fleet.streams import Load, completion, play
from tests.replica.hanging import FILE

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8063
NUM_STREAMS = 4
LIMIT_S = 300.0  # of a busy machine
JUDGES = ("ray::ServeController", "ray::LeaseBoard")


@dataclass(frozen=True)
class Pair:
    """A fleet of two replicas, and the file that makes an engine's steps hang."""

    fleet: Fleet
    file: Path


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("hung")
    file = root / "hang"
    executor = {
        "distributed_executor_backend": "tests.replica.hanging.HangingExecutor",
        "additional_config": {"simulated": {"profile": "a10g-llama-8b"}},
    }
    timeouts = {"drain_s": 5.0, "stream_silence_s": 60.0}
    config = configure(PORT, replicas={"min": 2, "max": 2}, timeouts=timeouts, engine_args=executor)
    config["models"][MODEL] |= {"kv_cache_gib": 0.25, "env": {FILE: str(file)}}
    with fleet(config, root, PYTHONPATH=f"{path(root / 'site')}:{ROOT}") as running:
        yield Pair(running, file)


Member = dict[str, Any]


def deadlock_a_step(pair: Pair, victim: Member) -> None:
    pair.file.write_text(f"deadlock {victim['load']['engine_pid']}")


def block_the_event_loop(pair: Pair, victim: Member) -> None:
    os.kill(victim["pid"], signal.SIGUSR2)


def stop_all_that_judge(pair: Pair, victim: Member) -> None:
    """Its engine, its supervisor, Serve's controller and the lease board stand still together."""
    for process in (*judges(pair), psutil.Process(victim["pid"]), psutil.Process(victim["load"]["engine_pid"])):
        process.suspend()


def judges(pair: Pair) -> list[psutil.Process]:
    return [pair.fleet.process(title) for title in JUDGES]


SCENARIOS: dict[str, Callable[[Pair, Member], None]] = {
    "step-deadlocked": deadlock_a_step,
    "event-loop-blocked": block_the_event_loop,
    "nobody-left-to-judge": stop_all_that_judge,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("seed", seeds())
def test_streams_leave_a_replica_that_hangs_within_ten_seconds(pair: Pair, scenario: str, seed: int) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    running = pair.fleet
    running.wait_until_ready()
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=300)
    undisturbed = play(running.url, [ask])[0]
    assert undisturbed.is_complete()
    victim = chosen.choice(running.members("replica"))
    to_end = [psutil.Process(victim["pid"]), psutil.Process(victim["load"]["engine_pid"])]
    if scenario == "nobody-left-to-judge":
        to_end += judges(pair)
    resumed = running.resumptions()
    held = ("serve_app_replica_held", (("model", MODEL), ("replica", victim["replica_id"])))
    with Load(running.url, ask, num_streams=NUM_STREAMS) as load:
        wait_until(lambda: scrape(running.url).get(held, 0.0) > 0, limit_s=LIMIT_S, what="a stream on it", every_s=0.2)
        time.sleep(chosen.uniform(0.0, 2.0))
        began = time.monotonic()
        SCENARIOS[scenario](pair, victim)
        try:
            wait_until(
                lambda: victim["replica_id"] not in replicas(scrape(running.url)), limit_s=LIMIT_S, what="the end of its link"
            )
            detected_s, num_before = time.monotonic() - began, len(load.answers)
            wait_until(lambda: len(load.answers) >= num_before + NUM_STREAMS, limit_s=LIMIT_S, what="answers after it")
        finally:
            if scenario == "nobody-left-to-judge":
                for process in to_end:
                    process.kill()
        wait_until(lambda: not any(map(is_running, to_end)), limit_s=LIMIT_S, what="the end of what hung")
        pair.file.unlink(missing_ok=True)
        running.wait_until_ready()
        healed_s = time.monotonic() - began
    measured = {"detected_s": detected_s, "resumptions": running.resumptions() - resumed}
    audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s, measured=measured, at_most={"detected_s": 10.0})
    assert measured["resumptions"] > 0
