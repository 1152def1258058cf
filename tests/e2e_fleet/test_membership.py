"""Replicas come, go and die: every ingress knows in time, and the fleet follows its load. Simulated replicas, two ingresses."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import ELASTIC_PORT, NUM_INGRESSES
from tests.e2e_fleet.operations import MODEL, Fleet, moments, replicas, taking, temporary_folder
from tests.e2e_fleet.streams import Answer, Load, chat, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

SEEN_LIMIT_S = 3.0  # what is promised
SLACK_S = 15.0  # of a busy machine; the properties keep what was seen
START_LIMIT_S = 180.0

Record = Callable[[str, object], None]


def seen(elastic: Fleet, holds: Callable[..., bool], *, limit_s: float) -> list[float]:
    return moments(elastic, holds, num_ingresses=NUM_INGRESSES, limit_s=limit_s)


def test_both_ingresses_serve_on_the_one_port(elastic: Fleet) -> None:
    members = elastic.members("ingress")
    assert len({m["pid"] for m in members}) == NUM_INGRESSES
    assert {m["port"] for m in members} == {ELASTIC_PORT}

    def both_served() -> bool:
        assert all(a.is_complete() for a in play(elastic.url, [completion(MODEL, max_tokens=5)] * 4))
        key = ("serve_app_requests_total", (("model", MODEL), ("outcome", "complete")))
        return all(series.get(key, 0) > 0 for series in elastic.ingresses(NUM_INGRESSES))

    wait_until(both_served, limit_s=30, what="requests at both ingresses")


def test_a_replica_tells_its_start_by_phases(elastic: Fleet) -> None:
    assert all(a.is_complete() for a in play(elastic.url, [completion(MODEL, max_tokens=5)]))
    loads: list[dict[str, Any]] = []

    def told() -> bool:
        loads[:] = [m["load"] for m in elastic.members("replica")]
        return "first_token" in loads[0]["cold_start"]

    wait_until(told, limit_s=SEEN_LIMIT_S + SLACK_S, what="the first token in the lease")
    (load,) = loads
    phases = load["cold_start"]
    assert list(phases) == ["scheduled", "process", "import", "download", "load", "warm_up", "listen", "first_token"]
    assert all(seconds >= 0 for seconds in phases.values())
    assert min(phases[name] for name in ("process", "import", "load", "warm_up")) > 0
    assert load["start_s"] == pytest.approx(sum(phases.values()) - phases["first_token"], abs=0.01)
    logs = (temporary_folder(elastic.family()[0]) / "ray/session_latest/logs/serve").glob("*.log")
    lines = [line.partition("cold start: ")[2] for log in logs for line in log.read_text().splitlines() if "cold start: " in line]
    (record,) = map(json.loads, lines)
    (replica_id,) = taking(elastic.ingresses()[0])
    assert record == {
        "model": MODEL,
        "replica": replica_id,
        "start_s": load["start_s"],
        "until": "first_token",
        "phases": phases,
    }


def test_decisions_are_in_a_log_that_decides_the_same_again(elastic: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    asked = elastic.command("autoscale", "log", elastic.name, "--json")
    assert asked.returncode == 0, asked.stderr
    log.write_text(asked.stdout)
    assert ", decided again: all the same\n" in elastic.command("autoscale", "replay", str(log)).stdout
    explained = elastic.command("autoscale", "explain", "--file", str(log), "--model", MODEL).stdout
    assert explained.startswith(f"{MODEL}, 20")
    assert "bounds    1 to 2" in explained


@pytest.mark.slow
def test_load_starts_a_second_replica_and_its_end_stops_one_without_cutting_a_stream(
    elastic: Fleet, record_property: Record
) -> None:
    ask = completion(MODEL, max_tokens=300)
    undisturbed = play(elastic.url, [ask])[0]
    (first,) = taking(elastic.ingresses()[0])
    with Load(elastic.url, ask, num_streams=8) as load:
        joined = seen(elastic, lambda s: len(taking(s)) == 2, limit_s=START_LIMIT_S)
        (second,) = (m for m in elastic.members("replica") if m["replica_id"] != first)
        listening_at = second["epoch"] / 1e9
        held = ("serve_app_replica_held", (("model", MODEL), ("replica", second["replica_id"])))
        seen(elastic, lambda s: s.get(held, 0) > 0, limit_s=START_LIMIT_S)
    gone = seen(elastic, lambda s: len(taking(s)) == 1, limit_s=START_LIMIT_S)
    elastic.wait_for_replicas(1, num_ingresses=NUM_INGRESSES)

    record_property("start seen after [s]", round(joined[-1] - listening_at, 2))
    record_property("stop seen by the second ingress after [s]", round(gone[-1] - gone[0], 2))
    assert joined[-1] - listening_at <= SEEN_LIMIT_S + SLACK_S
    assert gone[-1] - gone[0] <= SEEN_LIMIT_S + SLACK_S
    assert len(load.answers) >= 8
    assert [a.folded() for a in load.answers] == [undisturbed.folded()] * len(load.answers)


def test_a_death_and_a_start_are_seen_by_every_ingress(elastic: Fleet, record_property: Record) -> None:
    (victim,) = elastic.members("replica")
    died_at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    lost = seen(elastic, lambda s: victim["replica_id"] not in replicas(s), limit_s=SEEN_LIMIT_S + SLACK_S)
    joined = seen(elastic, lambda s: len(taking(s)) == 1, limit_s=START_LIMIT_S)
    (heir,) = (m for m in elastic.members("replica") if m["replica_id"] != victim["replica_id"])

    record_property("death seen after [s]", round(lost[-1] - died_at, 2))
    record_property("start seen after [s]", round(joined[-1] - heir["epoch"] / 1e9, 2))
    assert joined[-1] - heir["epoch"] / 1e9 <= SEEN_LIMIT_S + SLACK_S


def test_without_a_replica_requests_wait_and_are_then_told_to_come_back(elastic: Fleet) -> None:
    (victim,) = elastic.members("replica")
    refused: list[Answer] = []

    def kill_and_ask() -> None:
        os.kill(victim["pid"], signal.SIGKILL)
        refused.extend(play(elastic.url, [completion(MODEL, stream=False), completion(MODEL), chat(MODEL)]))

    (broken,) = play(elastic.url, [completion(MODEL, max_tokens=1000)], kill_and_ask)
    assert [e["type"] for e in broken.errors()] == ["no_replica"]
    assert not broken.cut
    for answer in refused:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        (error,) = answer.errors()
        assert (error["type"], error["code"]) == ("no_replica", 503)

    deadline = time.monotonic() + START_LIMIT_S
    while (late := play(elastic.url, [completion(MODEL, max_tokens=20)])[0]).status == 503:
        assert time.monotonic() < deadline, "no replica came back"
    assert late.is_complete()
