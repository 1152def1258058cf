"""A batch whose coordinator, ingresses and replicas are killed again and again has the answers of an undisturbed one, each once.

``make chaos SCENARIO=killed_again`` asks 10,000 lines. Without it 1,500 lines are asked, and the kills come sooner.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.records import Record, commit, folder, is_there, keep, ledger_lines, seeds
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import Fleet, fleet, titled

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

PORT = 8074
SCENARIO = "batch-of-killed-parts"
NUM_LINES = 10_000 if folder() else 1_500
COORDINATOR_S, INGRESS_S, REPLICA_S = (5.0, 30.0, 90.0) if folder() else (5.0, 12.0, 20.0)
CONCURRENCY = 8
LIMIT_S = 1800.0
MOST_ANSWERED_TWICE = 0.01 if folder() else 0.03
"""Of all lines. A kill of the coordinator costs 1 to 2 answers that had just come; in short there are more kills for each line."""


@pytest.fixture(scope="module")
def trio(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three simulated replicas behind two ingresses."""
    root = tmp_path_factory.mktemp("batch")
    config = configure(
        PORT,
        replicas={"min": 3, "max": 3},
        timeouts={"drain_s": 5.0, "no_replica_s": 60.0},
        simulated={"profile": "h100-llama-8b", "eos_probability": 0.0},
        num_ingresses=2,
    )
    config["ingress"]["ledger"] = {"dir": str(root / "ledger")}
    with fleet(config, root) as running:
        yield running


class Batch:
    """One input, whose lines the ledger knows by their ids, and one output."""

    def __init__(self, fleet: Fleet, source: Path, output: str) -> None:
        self._url, self._source, self.output = fleet.url, source, source.with_name(output)
        self.said = source.with_name(f"{output}.said")

    def start(self, concurrency: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", str(self._source), "-o", str(self.output)]
        command += ["--no-chat", "--url", self._url, "--concurrency", str(concurrency)]
        with self.said.open("ab") as said:
            return subprocess.Popen(command, stderr=said, env={**os.environ, "COLUMNS": "300"})

    def answers(self) -> list[tuple[str, str, int]]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        bodies = [(line["custom_id"], line["response"]["body"]) for line in lines]
        return [(key, body["choices"][0]["text"], body["usage"]["completion_tokens"]) for key, body in bodies]


def write_lines(source: Path, chance: random.Random) -> None:
    lines = [
        {"id": f"id-{i}", "prompt": f"{i} {chance.random()}", "max_tokens": chance.randint(4, 24), "request_id": f"id-{i}"}
        for i in range(NUM_LINES)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Killer:
    """Kills a part when its time has come; ``num`` counts by part."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self._fleet, self._chance = fleet, chance
        self._due = {"ingress": time.monotonic() + INGRESS_S, "replica": time.monotonic() + REPLICA_S}
        self.num: Counter[str] = Counter()

    def look(self) -> None:
        now = time.monotonic()
        for part, every_s, least in (("ingress", INGRESS_S, 1), ("replica", REPLICA_S, 2)):
            if now < self._due[part]:
                continue
            found = [
                p for p in titled(self._fleet.family(), "ray::ServeReplica:") if (":ingress" in _title(p)) == (part == "ingress")
            ]
            if len(found) < least:  # never the last replica
                continue
            self._due[part] = now + every_s
            with contextlib.suppress(psutil.NoSuchProcess):
                self._chance.choice(found).kill()
                self.num[part] += 1


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def run_killed(batch: Batch, killer: Killer) -> None:
    """Run it to its end; its coordinator is killed each `COORDINATOR_S`, and the same command continues."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        process = batch.start(CONCURRENCY)
        until = time.monotonic() + COORDINATOR_S
        while process.poll() is None and time.monotonic() < until:
            killer.look()
            time.sleep(0.1)
        if process.poll() is not None:
            assert process.returncode == 0, batch.said.read_text()[-2000:]
            return
        process.kill()
        process.wait()
        killer.num["coordinator"] += 1
    raise AssertionError(f"not at its end after {LIMIT_S:g} s: {batch.said.read_text()[-2000:]}")


@pytest.mark.parametrize("seed", seeds())
def test_a_batch_whose_parts_are_killed_again_and_again_has_the_answers_of_an_undisturbed_one(
    trio: Fleet, tmp_path: Path, seed: int
) -> None:
    if is_there(SCENARIO, seed):
        pytest.skip("its record is there")
    trio.wait_until_ready()
    chance = random.Random(seed)
    write_lines(tmp_path / "in.jsonl", chance)
    ledger = Path(trio.config["ingress"]["ledger"]["dir"])
    num_before, began_at = len(ledger_lines(ledger)), time.monotonic()
    killed, killer = Batch(trio, tmp_path / "in.jsonl", "killed.jsonl"), Killer(trio, chance)
    run_killed(killed, killer)
    took_s = time.monotonic() - began_at
    found = ledger_lines(ledger)[num_before:]
    trio.wait_until_ready()
    reference = Batch(trio, tmp_path / "in.jsonl", "reference.jsonl")
    assert reference.start(64).wait(LIMIT_S) == 0, reference.said.read_text()[-2000:]
    wanted = reference.answers()
    assert len(wanted) == NUM_LINES
    assert killed.answers() == wanted
    complete = Counter(line.id for line in found if line.outcome == "complete")
    twice = sum(complete.values()) - len(complete)
    tokens = sum(num for _, _, num in wanted)
    measured = {
        "answered_twice_share": twice / NUM_LINES,
        "tokens_again_share": sum(line.output_tokens for line in found) / tokens - 1.0,
        "took_s": took_s,
        **{f"{part}_kills": float(num) for part, num in killer.num.items()},
    }
    rounded = {name: round(value, 4) for name, value in measured.items()}
    keep(Record(SCENARIO, seed, NUM_LINES, 0, 0.0, [0.0], round(os.getloadavg()[0], 1), rounded, commit()))
    print(rounded)
    assert killer.num["replica"] >= 1
    assert killer.num["ingress"] >= 2
    assert killer.num["coordinator"] >= 5
    assert measured["answered_twice_share"] <= MOST_ANSWERED_TWICE
