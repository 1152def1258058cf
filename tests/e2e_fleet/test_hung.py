"""These tests stop an engine core or a replica (SIGSTOP): it is killed and replaced, and streams continue. Two simulated replicas."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, replicas, taking
from tests.e2e_fleet.streams import Answer, chat, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8057
LIMIT_S = 240.0  # of a busy machine; the properties keep what was seen
LONG = {"max_tokens": 900}  # 20 s and more: on a busy machine they must not be over before the stop
ASKS = [
    *(completion(MODEL, prompt=f"{n} the quick brown fox", **LONG) for n in range(4)),
    *(chat(MODEL, prompt=f"{n} jumps over", **LONG) for n in range(4)),
]

Member = dict[str, Any]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["protocol"] = {"heartbeat_timeout_s": 60.0}  # a hung process is seen by its end, not by the silence of its link
    with fleet(config, tmp_path_factory.mktemp("pair")) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: Fleet) -> list[Answer]:
    return play(pair.url, ASKS)


def stop_engine_core(member: Member) -> None:
    os.kill(member["load"]["engine_pid"], signal.SIGSTOP)


def stop_replica(member: Member) -> None:
    os.kill(member["pid"], signal.SIGSTOP)


def busiest(pair: Fleet) -> str:
    """Return the id of the replica that holds the most requests."""
    (series,) = pair.ingresses()
    held = {dict(labels)["replica"]: v for (name, labels), v in series.items() if name == "serve_app_replica_held"}
    return max(held, key=held.__getitem__)


def engines_lost(pair: Fleet, reason: str) -> float:
    return pair.ingresses()[0].get(("serve_app_engines_lost_total", (("model", MODEL), ("reason", reason))), 0.0)


def wait_for_heir(pair: Fleet, victim: Member) -> None:
    wait_until(
        lambda: len(now := taking(pair.ingresses()[0])) == 2 and victim["replica_id"] not in now,
        limit_s=LIMIT_S,
        what=f"another replica in place of {victim['replica_id']}\n{pair.server.tail()}",
    )


def gone_after(pair: Fleet, victim: Member, since: float) -> float:
    """Wait until the ingress has no link to the replica; return the seconds since ``since``."""
    wait_until(lambda: victim["replica_id"] not in replicas(pair.ingresses()[0]), limit_s=LIMIT_S, what="the end of its link")
    return round(time.monotonic() - since, 1)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [(stop_engine_core, "engine_stopped"), (stop_replica, "")],
)
def test_streams_are_the_same_when_what_serves_them_stops(
    pair: Fleet, undisturbed: list[Answer], stop: Callable[[Member], None], reason: str, record_property: Record
) -> None:
    members = {m["replica_id"]: m for m in pair.members("replica")}
    stopped: list[Member] = []
    resumed, lost = pair.resumptions(), engines_lost(pair, reason)

    def stop_the_busiest() -> None:
        stopped.append(members[busiest(pair)])
        stop(stopped[0])
        record_property("gone after [s]", gone_after(pair, stopped[0], time.monotonic()))

    answers = play(pair.url, ASKS, stop_the_busiest)
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]
    assert all(a.is_complete() for a in answers)
    assert pair.resumptions() > resumed
    assert engines_lost(pair, reason) == lost + bool(reason)
    wait_for_heir(pair, stopped[0])


def test_an_idle_replica_whose_engine_core_stops_is_replaced_before_a_request_finds_it(
    pair: Fleet, undisturbed: list[Answer], record_property: Record
) -> None:
    victim, lost = pair.members("replica")[0], engines_lost(pair, "engine_stopped")
    stop_engine_core(victim)
    record_property("gone after [s]", gone_after(pair, victim, time.monotonic()))
    assert engines_lost(pair, "engine_stopped") == lost + 1
    assert [a.folded() for a in play(pair.url, ASKS)] == [a.folded() for a in undisturbed]
    wait_for_heir(pair, victim)
