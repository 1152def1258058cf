"""These tests drop or delay the packets between an ingress and one of two simulated replicas.

It sleeps before a fault: the fault comes at a random moment of the load, which the seed chooses.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.network import Connections, dropped, from_port, own_network, to_port, why_not
from tests.chaos.records import audit, is_there, ledger_lines, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, replicas, scrape, taking
from tests.e2e_fleet.streams import Ask, Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8068
LIMIT_S = 120.0  # of a busy machine; the records keep what was seen
NUM_STREAMS = 4
NUM_WHILE_SLOW = 16
WHY_NOT = why_not()
WAYS = {"partition": (True, True), "partition-to-replica": (True, False), "partition-from-replica": (False, True)}
"""Scenario -> whether packets are lost on the way to the replica, and on the way from it."""


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("pair")
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["ingress"]["ledger"] = {"dir": str(home / "ledger")}
    with nullcontext() if WHY_NOT else own_network(), fleet(config, home) as running:
        yield running


def ask_of(chosen: random.Random) -> Ask:
    return completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=100)


def wait_for_answers(load: Load, count: int) -> None:
    enough = len(load.answers) + count
    wait_until(lambda: len(load.answers) >= enough, limit_s=LIMIT_S, what=f"{count} more answers")


@dataclass(frozen=True)
class Link:
    """A link from the one ingress to one replica; ``port`` is the replica's, ``connections`` are the ingress's."""

    replica_id: str
    port: int
    connections: Connections

    @classmethod
    def choose(cls, pair: Fleet, chosen: random.Random) -> "Link":
        members = pair.status()["members"]
        victim = chosen.choice([m for m in members if m["role"] == "replica"])
        (ingress,) = [m for m in members if m["role"] == "ingress"]
        return cls(victim["replica_id"], victim["port"], Connections.of(ingress["pid"], victim["port"]))

    def wait_for_stream(self, pair: Fleet) -> None:
        key = ("serve_app_replica_held", (("model", MODEL), ("replica", self.replica_id)))
        what = f"a stream on {self.replica_id}\n{pair.server.tail()}"
        wait_until(lambda: scrape(pair.url).get(key, 0.0) > 0, limit_s=LIMIT_S, what=what)

    def wait_for_end(self, pair: Fleet) -> None:
        what = f"the end of the link to {self.replica_id}"
        wait_until(lambda: self.replica_id not in replicas(scrape(pair.url)), limit_s=LIMIT_S, what=what)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("scenario", WAYS)
@pytest.mark.parametrize("seed", seeds())
def test_streams_go_on_elsewhere_when_packets_are_lost_and_late_ones_reach_no_client(
    pair: Fleet, scenario: str, seed: int
) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    ask = ask_of(chosen)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    link, before_it = Link.choose(pair, chosen), taking(scrape(pair.url))
    there, back = WAYS[scenario]
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load, link.connections.counted():
        time.sleep(chosen.uniform(1.0, 3.0))
        link.wait_for_stream(pair)
        with dropped(*[to_port(link.port)] * there):
            with dropped(*[from_port(link.port)] * back):
                lost_at = time.monotonic()
                link.wait_for_end(pair)
                detected_s, before = time.monotonic() - lost_at, link.connections.num_received()
                wait_for_answers(load, NUM_STREAMS)
            if there:
                # The way back heals first: else the ingress's last packets may tell the replica's kernel to give up the old
                # connection before it has sent again what was lost.
                wait_until(lambda: link.connections.num_received() > before, limit_s=LIMIT_S, what="late frames")
        healed_at = time.monotonic()
        link.wait_for_stream(pair)
        healed_s = time.monotonic() - healed_at
        wait_for_answers(load, NUM_STREAMS)
        measured = {"detected_s": detected_s, "late_packets": link.connections.num_received() - before}
    record = audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s, measured=measured, at_most={"detected_s": 10.0})
    assert record.n >= 2 * NUM_STREAMS
    assert taking(scrape(pair.url)) == before_it


class Slowed:
    """The process stands still for four fifths of the time, in slices, until the block ends."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._enough.wait(0.1):
            self._process.suspend()
            self._enough.wait(0.4)
            self._process.resume()


@pytest.mark.parametrize("seed", seeds())
def test_a_replica_that_is_slow_gets_less_and_is_not_ejected(pair: Fleet, seed: int) -> None:
    if is_there("slow", seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    ask = ask_of(chosen)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    members = pair.members("replica")
    victim: dict[str, Any] = chosen.choice(members)
    ledger = Path(pair.config["ingress"]["ledger"]["dir"])
    before = len(ledger_lines(ledger))
    with Slowed(victim["load"]["engine_pid"]), Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        wait_for_answers(load, NUM_WHILE_SLOW)
    wait_until(lambda: len(ledger_lines(ledger)) >= before + len(load.answers), limit_s=LIMIT_S, what="the ledger's lines")
    attempts = [replica for line in ledger_lines(ledger)[before:] for replica in line.replicas]
    given = Counter(attempts)
    measured = {"share": given[victim["replica_id"]] / len(attempts)}
    record = audit("slow", seed, load.answers, undisturbed, healed_s=0.0, measured=measured)
    assert record.n >= NUM_WHILE_SLOW
    assert len(attempts) == record.n, "a request had a second attempt"
    assert 0 < measured["share"] < 0.4
    assert [m["load"]["engine_pid"] for m in pair.members("replica")] == [m["load"]["engine_pid"] for m in members]
