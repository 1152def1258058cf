"""These tests kill or stop an engine or an ingress while streams move with their KV: real engines, NIXL over TCP, two ingresses.

A read takes milliseconds here. So where a fault is to come between the source's answer and the target's first token, the other engines
stand still first: what the source hands over then waits to be read. Two sleeps are part of the fault: when it comes, and how long an
ingress is stopped.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.records import audit, is_there, ledger_lines, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, Series, fleet
from tests.e2e_fleet.streams import Answer, Ask, completion, play

pytest.importorskip("nixl", reason="the extra kv is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT, KV_PORT = 8072, 16156
NUM_REPLICAS, NUM_INGRESSES = 3, 2
NUM_STREAMS, TOKENS = 9, 800
DRAIN_S = 2.0
ASKED_S = 30.0
"""Limit for the first request that is asked to leave, much longer than the drain."""
HELD_S = 90.0
"""Limit for KV that is kept: leases end after 30 s."""
STILL_S = 6.5
"""How long an ingress stands still: longer than `protocol.heartbeat_timeout_s`."""
DELAY_S = 0.7
"""The fault comes up to this long after the first request was asked to leave; most moves of a drain are planned in this time."""

RESULTS = ("read", "computed", "unanswered", "late", "ended", "without_kv")
"""Results of moves that the ledger may have."""

SOURCE, TARGET, INGRESS = "source", "target", "ingress"
Member = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A fault at a hand-over."""

    victim: str
    """Whose process gets the signal: the engine that drains, another engine, or an ingress."""
    is_killed: bool
    """Whether it gets SIGKILL, or else SIGSTOP."""
    at_read: bool
    """Whether the fault comes when the KV waits to be read, or else at any moment of the moves."""


SCENARIOS = {
    "handing-source-killed": Scenario(SOURCE, is_killed=True, at_read=False),
    "handing-source-stopped": Scenario(SOURCE, is_killed=False, at_read=False),
    "handing-target-killed": Scenario(TARGET, is_killed=True, at_read=False),
    "handing-target-stopped": Scenario(TARGET, is_killed=False, at_read=False),
    "reading-source-killed": Scenario(SOURCE, is_killed=True, at_read=True),
    "reading-source-stopped": Scenario(SOURCE, is_killed=False, at_read=True),
    "reading-target-killed": Scenario(TARGET, is_killed=True, at_read=True),
    "reading-ingress-killed": Scenario(INGRESS, is_killed=True, at_read=True),
    "reading-ingress-stopped": Scenario(INGRESS, is_killed=False, at_read=True),
}
INGRESS_KILLED = SCENARIOS["reading-ingress-killed"]
PROMPT_TOKENS = 600
ASK = completion(MODEL, prompt=[20 + number * number % 980 for number in range(PROMPT_TOKENS)], max_tokens=TOKENS)


@dataclass(frozen=True)
class Three:
    """A fleet of three replicas, its ledger, and the answer to `ASK`."""

    fleet: Fleet
    ledger: Path
    undisturbed: Answer


@pytest.fixture(scope="module")
def three(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    root = tmp_path_factory.mktemp("handed")
    config = configure(
        PORT,
        replicas={"min": NUM_REPLICAS, "max": NUM_REPLICAS},
        timeouts={"drain_s": DRAIN_S, "no_replica_s": 120.0, "stream_silence_s": 120.0},
        num_ingresses=NUM_INGRESSES,
    )
    config["models"][MODEL]["kv"] = {"transfer": "nixl", "port": KV_PORT}
    config["ingress"]["ledger"] = {"dir": str(root / "ledger")}
    with fleet(config, root) as running:
        undisturbed = play(running.url, [ASK])[0]
        assert undisturbed.is_complete()
        yield Three(running, root / "ledger", undisturbed)


def summed(many: list[Series], name: str) -> float:
    return sum(value for series in many for (key, _), value in series.items() if key == name)


def engine(member: Member) -> psutil.Process:
    return psutil.Process(member["load"]["engine_pid"])


def prepare(running: Fleet) -> None:
    """Start the ingresses anew, and have each engine answer.

    For five minutes after a read that a fault has made slow, streams would move without their KV. The first answer of an engine takes long,
    and streams of the others would be at their end before its streams begin.
    """
    running.wait_until_ready()
    for member in running.members(INGRESS):
        psutil.Process(member["pid"]).kill()
    running.wait_until_ready()
    play(running.url, [Ask(ASK.path, {**ASK.body, "max_tokens": 8, "cache_salt": str(number)}) for number in range(NUM_STREAMS)])


@contextlib.contextmanager
def standing_still(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@dataclass
class Fault:
    """A drain of one replica, and the fault."""

    running: Fleet
    scenario: Scenario
    chosen: random.Random
    at: float = 0.0
    """When the fault came, by the clock of the ledger."""

    def __call__(self) -> None:
        members = self.running.status()["members"]
        self._ingresses = [psutil.Process(m["pid"]) for m in members if m["role"] == "ingress"]
        replicas = [m for m in members if m["role"] == "replica"]
        self._source = max(replicas, key=lambda replica: int(replica["load"]["running"]))  # whose streams end last
        targets = [replica for replica in replicas if replica is not self._source]
        self._targets = [engine(target) for target in self.chosen.sample(targets, NUM_REPLICAS - 1)]
        asked = self._asked()
        victims = {SOURCE: engine(self._source), TARGET: self._targets[0], INGRESS: self._busier_ingress()}
        os.kill(self._source["pid"], signal.SIGTERM)
        with standing_still(self._targets if self.scenario.at_read else []):
            wait_until(lambda: self._asked() > asked, limit_s=ASKED_S, what="a request that is asked to leave", every_s=0.05)
            time.sleep(self.chosen.uniform(0.0, DELAY_S))
            self._strike(victims[self.scenario.victim])

    def _strike(self, victim: psutil.Process) -> None:
        self.at = time.time()
        if self.scenario.is_killed:
            victim.kill()
            return
        victim.suspend()
        if self.scenario.victim == INGRESS:
            time.sleep(STILL_S)
            victim.resume()

    def _asked(self) -> float:
        return summed(self.running.ingresses(NUM_INGRESSES), "serve_app_hand_overs_asked_total")

    def _busier_ingress(self) -> psutil.Process:
        """Return the ingress with more clients."""
        return max(self._ingresses, key=lambda p: sum(c.laddr.port == PORT for c in p.net_connections("tcp")))


def held(running: Fleet) -> dict[str, float]:
    """Return what all replicas have, by gauge: requests, and KV. Blocks of the prefix cache that no request holds do not count."""
    series = running.ingresses(NUM_INGRESSES)
    return {name: summed(series, f"serve_app_replica_{name}") for name in ("running", "waiting", "kv_usage")}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", seeds())
def test_streams_that_move_with_their_kv_outlive_engines_and_ingresses(three: Three, name: str, seed: int) -> None:
    if is_there(name, seed):
        pytest.skip("its record is there")
    running = three.fleet
    prepare(running)
    # Without salts a stream would find the KV of another in the target's prefix cache, and read nothing.
    asks = [Ask(ASK.path, {**ASK.body, "cache_salt": f"{name} {seed} {number}"}) for number in range(NUM_STREAMS)]
    num_before = len(ledger_lines(three.ledger))
    fault = Fault(running, SCENARIOS[name], random.Random(f"{name} {seed}"))
    answers = play(running.url, asks, fault)
    whole = [answer for answer in answers if not answer.cut or fault.scenario != INGRESS_KILLED]
    again = play(running.url, [ASK] * (NUM_STREAMS - len(whole)))  # its clients connect again
    running.wait_until_ready()
    healed_s = time.time() - fault.at
    moves = Counter(move.result for line in ledger_lines(three.ledger)[num_before:] for move in line.moves)
    measured = {"reconnects": float(len(again)), **{f"moves_{result}": float(moves[result]) for result in RESULTS}}
    audit(name, seed, [*whole, *again], three.undisturbed, healed_s=healed_s, measured=measured)
    wait_until(lambda: not any(held(running).values()), limit_s=HELD_S, what="replicas that hold nothing")
