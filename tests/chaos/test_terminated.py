"""These tests send SIGTERM to a replica or an ingress: it drains and ends, and Serve starts another. Two of each, simulated."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.records import audit, is_there, ledger_lines, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, is_running, moments, taking
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8075
NUM_INGRESSES = 2
DRAIN_S = 20.0
LONG_TOKENS = 1200  # 39 s at 32 ms a step: two of the budgets
NUM_LONG, NUM_SHORT = 8, 2
LIMIT_S = 300.0  # of a busy machine
LOOK_S = 0.05
REPLICA, INGRESS = "replica-terminated", "ingress-terminated"


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("terminated")
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": DRAIN_S, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
        num_ingresses=NUM_INGRESSES,
    )
    # On a machine where others stop an ingress for seconds, its links would be given up and new requests refused: other scenarios' faults.
    config["protocol"] = {"heartbeat_timeout_s": 60.0}
    config["ingress"] |= {"ledger": {"dir": str(root / "ledger")}, "max_loop_lag_s": 30.0}
    with fleet(config, root) as running:
        yield running


@contextlib.contextmanager
def own_stall() -> Iterator[list[float]]:
    """Keep the longest time for which this process stood still: a pause of its clients in that time says nothing of the fleet."""
    worst, over = [0.0], threading.Event()

    def watch() -> None:
        looked_at = time.monotonic()
        while not over.wait(LOOK_S):
            now = time.monotonic()
            worst[0], looked_at = max(worst[0], now - looked_at - LOOK_S), now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield worst
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("seed", seeds())
def test_a_replica_that_gets_sigterm_takes_nothing_more_and_loses_no_stream(pair: Fleet, seed: int) -> None:
    if is_there(REPLICA, seed):
        pytest.skip("its record is there")
    pair.wait_until_ready()
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=LONG_TOKENS)
    short = completion(MODEL, prompt=f"{chosen.randrange(1000)} jumps over", max_tokens=20)
    undisturbed, undisturbed_short = play(pair.url, [ask, short])
    victim = chosen.choice(pair.members("replica"))
    process, victim_id = psutil.Process(victim["pid"]), victim["replica_id"]
    folder = Path(pair.config["ingress"]["ledger"]["dir"])
    num_before = len(ledger_lines(folder))
    told_at: list[float] = []

    def terminate() -> None:
        time.sleep(chosen.uniform(0.0, 2.0))
        process.send_signal(signal.SIGTERM)
        told_at.append(time.time())
        told_at.append(
            max(moments(pair, lambda series: victim_id not in taking(series), num_ingresses=NUM_INGRESSES, limit_s=LIMIT_S))
        )
        wait_until(lambda: not is_running(process), limit_s=LIMIT_S, what="the end of the process")
        told_at.append(time.time())

    with Load(pair.url, short, num_streams=NUM_SHORT) as load, own_stall() as stalled:
        answers = play(pair.url, [ask] * NUM_LONG, terminate)
    sent_at, closed_at, ended_at = told_at
    pair.wait_until_ready()
    healed_s = time.time() - sent_at
    assert victim_id not in {m["replica_id"] for m in pair.members("replica")}
    assert [a.folded() for a in load.answers] == [undisturbed_short.folded()] * len(load.answers)
    num_all = num_before + len(answers) + len(load.answers)
    wait_until(lambda: len(ledger_lines(folder)) >= num_all, limit_s=LIMIT_S, what="the ledger's lines")
    lines = ledger_lines(folder)[num_before:]
    given = [line.time - sent_at for line in lines if line.time > sent_at and victim_id in line.replicas]
    ends = [end for line in lines for replica, end in zip(line.replicas, line.ends, strict=True) if replica == victim_id]
    measured = {
        "closed_s": closed_at - sent_at,
        "last_given_s": max(given, default=0.0),
        "lived_s": ended_at - sent_at,
        "moved": float(ends.count("moved")),
        "longest_gap_s": max(max(line.gaps_s, default=0.0) for line in lines),
        "client_stalled_s": max(stalled),
        "lost": float(len(ends) - ends.count("moved") - ends.count("length")),
    }
    # `closed_s` has no limit: the test polls two ingresses on one port until it has met both.
    most = {"last_given_s": 1.0, "lost": 0.0, "lived_s": DRAIN_S + 5.0}
    audit(REPLICA, seed, answers, undisturbed, healed_s=healed_s, measured=measured, at_most=most)
    assert measured["moved"] > 0, ends


@pytest.mark.parametrize("seed", seeds())
def test_an_ingress_that_gets_sigterm_ends_its_streams_first(pair: Fleet, seed: int) -> None:
    if is_there(INGRESS, seed):
        pytest.skip("its record is there")
    pair.wait_until_ready()
    ask = completion(MODEL, prompt=f"{seed} the lazy dog", max_tokens=400)
    undisturbed = play(pair.url, [ask])[0]
    victim = random.Random(seed).choice(pair.members("ingress"))
    process = psutil.Process(victim["pid"])
    with Load(pair.url, ask, num_streams=NUM_LONG) as load:
        wait_until(lambda: len(load.answers) >= 1, limit_s=LIMIT_S, what="an answer")
        os.kill(victim["pid"], signal.SIGTERM)
        sent_at = time.time()
        wait_until(lambda: not is_running(process), limit_s=LIMIT_S, what="the end of the process")
        lived_s = time.time() - sent_at
        wait_until(lambda: len(pair.members("ingress")) == NUM_INGRESSES, limit_s=LIMIT_S, what="another ingress")
        healed_s = time.time() - sent_at
    pair.wait_until_ready()
    measured = {"lived_s": lived_s}
    audit(INGRESS, seed, load.answers, undisturbed, healed_s=healed_s, measured=measured, at_most={"lived_s": DRAIN_S + 5.0})
