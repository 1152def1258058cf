"""A resource runs out under running streams and comes back, or the clock steps. Two simulated replicas.

It sleeps before a fault, which comes at a random moment that the seed chooses, and while it measures
the CPU time of a process that must not spin.
"""

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.chaos.resources import (
    CGROUPS,
    cgroup,
    compiled_clock,
    connections,
    descriptors,
    full,
    is_root,
    memory_taken,
    set_clock,
    small_disk,
)
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, Series, fleet, is_running, scrape, taking, title
from tests.e2e_fleet.streams import Answer, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8071
LIMIT_S = 120.0  # of a busy machine; the records keep what was seen
NUM_STREAMS = 4
NUM_DESCRIPTORS = 256
ASK = completion(MODEL, max_tokens=300)
SHORT = completion(MODEL, max_tokens=5)

Course = Callable[[], tuple[float, float]]
"""Brings the fault about and ends it. Returns the seconds from its begin until something said why, and from its end until all was well."""

needs_root = pytest.mark.skipif(not is_root(), reason="only root may mount a disk and make a cgroup")


def needs_cgroup(controller: str) -> pytest.MarkDecorator:
    there = os.access(CGROUPS / controller / "cgroup.procs", os.W_OK)
    return pytest.mark.skipif(not there, reason=f"no writable cgroup v1 for {controller}")


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A small disk for all that the fleet writes, where we may mount one. In /tmp: Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="res-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        if is_root():
            stack.enter_context(small_disk(Path(name), 64))
        yield Path(name)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a fleet whose clock can be stepped; none without a compiler."""
    where = tmp_path_factory.mktemp("clock")
    if (library := compiled_clock(where)) is None:
        return {}
    set_clock(where / "step", 0)
    return {"LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(where / "step")}


@pytest.fixture(scope="module")
def pair(configure: Configure, home: Path, clock: dict[str, str]) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["ingress"]["ledger"] = {"dir": str(home / "ledger")}
    with fleet(config, home, TMPDIR=str(home), **clock) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: Fleet) -> Answer:
    (answer,) = play(pair.url, [ASK])
    assert answer.is_complete()
    return answer


@pytest.fixture(scope="module")
def ports(pair: Fleet) -> dict[int, int]:
    """Process id of a replica -> port of its listener."""
    return {member["pid"]: member["port"] for member in pair.members("replica")}


def ingress(pair: Fleet) -> psutil.Process:
    return pair.process(f"ray::ServeReplica:{pair.name}:ingress")


def engine_cores(pair: Fleet) -> list[psutil.Process]:
    return [p for p in pair.family() if "serve_app.replica.engine" in p.cmdline()]


def total(series: Series, name: str, **labels: str) -> float:
    return series.get((name, tuple(sorted(labels.items()))), 0.0)


def seconds_until(holds: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    wait_until(holds, limit_s=LIMIT_S, what=what)
    return time.monotonic() - began


def answers_again(pair: Fleet) -> bool:
    """Return whether it is ready and answers."""
    with contextlib.suppress(httpx.HTTPError):
        return (
            httpx.get(f"{pair.url}/readyz", timeout=5, verify=False).status_code == 200
            and play(pair.url, [SHORT])[0].is_complete()
        )
    return False


def tried(
    pair: Fleet, undisturbed: Answer, scenario: str, seed: int, course: Course, *, victims: Collection[psutil.Process] = ()
) -> None:
    """Play streams during ``course`` and let no process end but ``victims``."""
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    family = {p: name for p in pair.family() if not (name := title(p)).startswith("ray::IDLE")}  # Ray ends those it needs no more
    seen: list[float] = []

    def meanwhile() -> None:
        time.sleep(chosen.uniform(0.0, 1.0))
        seen.extend(course())

    answers = play(pair.url, [ASK] * NUM_STREAMS, meanwhile)
    said_s, healed_s = seen
    # Another replica takes the time of a start.
    at_most = {"said_s": 10.0} if victims else {"said_s": 10.0, "healed_s": 10.0}
    audit(scenario, seed, answers, undisturbed, healed_s=healed_s, measured={"said_s": said_s}, at_most=at_most)
    assert [name for p, name in family.items() if not is_running(p) and p not in victims] == []


@pytest.mark.parametrize("seed", seeds())
def test_an_ingress_without_descriptors_says_so_and_its_streams_go_on(pair: Fleet, undisturbed: Answer, seed: int) -> None:
    process = ingress(pair)

    def readiness() -> Any:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{pair.url}/readyz", timeout=5, verify=False).json()

    def course() -> tuple[float, float]:
        with descriptors(process.pid, NUM_DESCRIPTORS), connections(PORT, NUM_DESCRIPTORS + 150):
            said_s = seconds_until(
                lambda: readiness() == {"status": "crowded", "file_descriptors": NUM_DESCRIPTORS},
                "readiness that names the limit",
            )
            used_s, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(2.0)
            assert sum(process.cpu_times()[:2]) - used_s < 0.8 * (time.monotonic() - began), "it spins"
            (refused,) = play(pair.url, [SHORT])
            assert (refused.status, refused.events[0]["error"]["type"]) == (503, "too_many_connections")
        return said_s, seconds_until(lambda: answers_again(pair), "an answer")

    tried(pair, undisturbed, "descriptors-ingress", seed, course)


@pytest.mark.parametrize("seed", seeds())
def test_a_replica_without_descriptors_drops_who_proves_nothing(
    pair: Fleet, undisturbed: Answer, ports: dict[int, int], seed: int
) -> None:
    pid, port = sorted(ports.items())[0]

    def course() -> tuple[float, float]:
        with descriptors(pid, NUM_DESCRIPTORS), connections(port, NUM_DESCRIPTORS + 150) as made:
            made[0].settimeout(LIMIT_S)
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                assert made[0].recv(1) == b""
            said_s = time.monotonic() - began
            process = psutil.Process(pid)
            used_s, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(2.0)
            assert sum(process.cpu_times()[:2]) - used_s < 0.8 * (time.monotonic() - began), "it spins"
        return said_s, seconds_until(lambda: answers_again(pair), "an answer")

    tried(pair, undisturbed, "descriptors-replica", seed, course)


@needs_root
@pytest.mark.parametrize("seed", seeds())
def test_a_full_disk_is_seen_in_the_metrics_and_costs_lines_of_the_ledger(
    pair: Fleet, undisturbed: Answer, home: Path, seed: int
) -> None:
    def lost() -> float:
        return total(scrape(pair.url), "serve_app_ledger_lost_total")

    def num_bytes() -> int:
        return sum(file.stat().st_size for file in (home / "ledger").iterdir())

    def says(before: float) -> bool:
        assert play(pair.url, [SHORT])[0].is_complete()
        return lost() > before and scrape(pair.url)["serve_app_free_disk_bytes", ()] < 1 << 16

    def course() -> tuple[float, float]:
        before = lost()
        with full(home):
            said_s = seconds_until(lambda: says(before), "a lost line")
            time.sleep(3.0)
        written = num_bytes()
        return said_s, seconds_until(lambda: answers_again(pair) and num_bytes() > written, "a line of the ledger")

    tried(pair, undisturbed, "disk-full", seed, course)


@needs_cgroup("pids")
@pytest.mark.parametrize("seed", seeds())
def test_processes_that_can_start_no_thread_go_on_with_those_they_have(pair: Fleet, undisturbed: Answer, seed: int) -> None:
    members = [ingress(pair), *engine_cores(pair), *(p.parent() for p in engine_cores(pair))]

    def course() -> tuple[float, float]:
        with cgroup("pids", f"serve-app-test-{os.getpid()}") as group:
            for process in members:
                assert process is not None
                (group / "cgroup.procs").write_text(str(process.pid))
            (group / "pids.max").write_text((group / "pids.current").read_text())
            said_s = seconds_until(lambda: scrape(pair.url)["serve_app_free_threads", ()] == 0, "that no thread is free")
            for _ in range(3):
                answers = play(pair.url, [SHORT] * 8)
                assert [a.status for a in answers] == [200] * 8
                assert all(a.is_complete() for a in answers)
            (group / "pids.max").write_text("max")
        return said_s, seconds_until(lambda: answers_again(pair), "an answer")

    tried(pair, undisturbed, "threads", seed, course)


@pytest.mark.parametrize("seed", seeds())
def test_a_clock_that_steps_by_an_hour_changes_nothing(
    pair: Fleet, undisturbed: Answer, clock: dict[str, str], home: Path, seed: int
) -> None:
    if not clock:
        pytest.skip("no C compiler for the clock that can be stepped")
    step = Path(clock["CLOCK_STEP_FILE"])

    def newest_hour() -> int:
        """Return how many hours the last line of the ledger is ahead."""
        file = max((home / "ledger").glob("*.jsonl"))
        told = float(json.loads(file.read_text().splitlines()[-1])["time"])
        return round((told - time.time()) / 3600)

    def says(step_s: float) -> bool:
        return abs(scrape(pair.url)["serve_app_clock_steps_seconds", ()] - step_s) < 60.0

    def course() -> tuple[float, float]:
        said: list[float] = []
        for step_s in random.Random(seed).sample((3600, -3600), 2):
            set_clock(step, step_s)
            said.append(seconds_until(lambda: says(step_s), "the step in the metrics"))  # noqa: B023
            time.sleep(2.0)
            assert play(pair.url, [SHORT])[0].is_complete()
            wait_until(lambda: newest_hour() == step_s / 3600, limit_s=LIMIT_S, what="a line of that hour")  # noqa: B023
        set_clock(step, 0)
        return max(said), seconds_until(lambda: answers_again(pair), "an answer")

    tried(pair, undisturbed, "clock-step", seed, course)


@needs_cgroup("memory")
@pytest.mark.parametrize("seed", seeds())
def test_an_engine_core_that_the_kernel_kills_is_counted_as_out_of_memory_and_its_streams_go_on(
    pair: Fleet, undisturbed: Answer, seed: int
) -> None:
    engine = random.Random(seed).choice(engine_cores(pair))
    replica = engine.parent()
    assert replica is not None
    mib = 1 << 20

    def out_of_memory() -> float:
        return total(scrape(pair.url), "serve_app_engines_lost_total", model=MODEL, reason="engine_out_of_memory")

    def course() -> tuple[float, float]:
        before, members = out_of_memory(), taking(scrape(pair.url))
        with cgroup("memory", f"serve-app-test-{os.getpid()}") as group:
            (group / "memory.limit_in_bytes").write_text(str(256 * mib))
            for process in (replica, engine):
                (group / "cgroup.procs").write_text(str(process.pid))
            with memory_taken(group, 320 * mib):
                said_s = seconds_until(lambda: out_of_memory() == before + 1, "an engine lost for want of memory")
        return said_s, seconds_until(
            lambda: len(taking(scrape(pair.url)) - members) == 1, f"another replica\n{pair.server.tail()}"
        )

    tried(pair, undisturbed, "memory", seed, course, victims={engine, replica})
