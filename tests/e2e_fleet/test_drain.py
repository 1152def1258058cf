"""These tests check that orderly actions cut no stream: controller restart, new configuration, deletion."""

import copy
import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, Traces, fleet
from tests.e2e_fleet.streams import Answer, assert_same, chat, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

STREAMS = [completion(MODEL, max_tokens=400), chat(MODEL, max_tokens=400)]
STEP_LIMIT_S = 180.0


@pytest.fixture(scope="module")
def steady(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        8042,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": 60.0, "no_replica_s": 30.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    with fleet(config, tmp_path_factory.mktemp("steady")) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(steady: Fleet) -> list[Answer]:
    return play(steady.url, STREAMS)


def pids(steady: Fleet) -> set[int]:
    return {m["pid"] for m in steady.status()["members"]}


def test_a_controller_restart_leaves_every_replica_and_stream_alone(steady: Fleet, undisturbed: list[Answer]) -> None:
    before = pids(steady)
    controller = steady.process("ray::ServeController")

    def restart() -> None:
        os.kill(controller.pid, signal.SIGKILL)
        psutil.wait_procs([controller], timeout=STEP_LIMIT_S)
        wait_until(lambda: is_healthy(steady), limit_s=STEP_LIMIT_S, what="the new controller finds its replicas")

    assert_same(play(steady.url, STREAMS, restart), undisturbed)
    assert steady.process("ray::ServeController").pid != controller.pid
    assert pids(steady) == before


def is_healthy(steady: Fleet) -> bool:
    if (asked := steady.command("status", steady.name, "--json")).returncode:
        return False
    result = json.loads(asked.stdout)
    return result["status"] == "RUNNING" and all(d["status"] == "HEALTHY" for d in result["deployments"].values())


def test_a_new_configuration_replaces_everything_under_running_streams(steady: Fleet, undisturbed: list[Answer]) -> None:
    before = pids(steady)
    changed = copy.deepcopy(steady.config)
    changed["models"][MODEL]["engine_args"]["max_num_seqs"] = 64
    short: list[Answer] = []

    def update() -> None:
        steady.operate("redeploy", changed)
        wait_until(lambda: one_more(steady, short).isdisjoint(before), limit_s=STEP_LIMIT_S, what="new processes only")

    assert_same(play(steady.url, STREAMS, update), undisturbed)
    assert all(a.is_complete() for a in short)
    steady.wait_for_replicas(1)


def one_more(steady: Fleet, short: list[Answer]) -> set[int]:
    short += play(steady.url, [completion(MODEL, max_tokens=5)])
    return pids(steady)


def test_deleting_the_application_waits_for_its_streams_and_sigterm_then_leaves_nothing(
    steady: Fleet, undisturbed: list[Answer]
) -> None:
    traces = Traces.of(steady)
    assert_same(play(steady.url, STREAMS, lambda: steady.operate("delete", steady.config)), undisturbed)
    steady.server.process.send_signal(signal.SIGTERM)
    assert steady.server.process.wait(STEP_LIMIT_S) == 0, steady.server.tail()
    wait_until(lambda: not traces.left(), limit_s=10, what="nothing left")
