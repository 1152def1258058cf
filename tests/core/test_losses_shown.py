"""An ingress shows the replicas that it has lost, with causes in serve-app's words."""

from typing import Any

import pytest

from serve_app.core.events import LinkEnd
from serve_app.core.lost_replicas import KEPT_S, MAX_KEPT, LostReplica, LostReplicas, cause_of, with_lost
from serve_app.errors import EngineDied, EngineOutOfMemory, EngineSilent, StepTooLong


@pytest.mark.parametrize(
    ("end", "goodbye", "cause"),
    [
        (
            LinkEnd.ENGINE_DIED,
            ("engine_dead", str(EngineDied(EngineDied.NO_MESSAGE))),
            "its engine was killed, or crashed without a message",
        ),
        (LinkEnd.ENGINE_DIED, ("engine_dead", str(EngineDied("CUDA error at 'a secret prompt'"))), "its engine died"),
        (LinkEnd.ENGINE_DIED, (EngineOutOfMemory.code, "x"), "the kernel killed its engine: out of memory"),
        (LinkEnd.ENGINE_DIED, (EngineSilent.code, "x"), "its engine hung, and its supervisor killed the engine"),
        (LinkEnd.ENGINE_DIED, (StepTooLong.code, "x"), "its engine hung, and its supervisor killed the engine"),
        (LinkEnd.BROKE_OFF, None, "the connection to it broke off: its process was killed, or the network failed"),
        (LinkEnd.UNRESPONSIVE, None, "it stopped answering"),
    ],
)
def test_a_cause_is_in_our_own_words(end: LinkEnd, goodbye: tuple[str, str] | None, cause: str) -> None:
    assert cause_of(end, goodbye) == cause


def lost_at(time: float, *replica_ids: str) -> LostReplicas:
    replicas = LostReplicas("m")
    for replica_id in replica_ids:
        replicas.lose(replica_id, LinkEnd.BROKE_OFF, "why", time=time)
    return replicas


def test_the_cause_of_a_loss_is_known_until_there_is_a_link_again() -> None:
    replicas = lost_at(100.0, "a")
    assert (replicas.cause("a"), replicas.cause("b")) == ("why", None)
    replicas.link("a")
    assert replicas.cause("a") is None


def member(replica_id: str, state: str = "ready") -> dict[str, Any]:
    return {"replica_id": replica_id, "state": state}


def test_a_lost_replica_is_shown_for_a_while_and_as_long_as_it_has_a_lease_but_not_as_ready() -> None:
    replicas = lost_at(100.0, "a", "b")
    report = {"members": [member("a"), member("c", "draining")], "decisions": []}
    a, b = (LostReplica(replica_id, "m", 100.0, "why")._asdict() for replica_id in ("a", "b"))
    members = [member("a", "lost"), member("c", "draining")]
    assert with_lost(report, [replicas], now=101.0) == {"members": members, "decisions": [], "lost": [a, b]}
    assert with_lost(report, [replicas], now=100.0 + KEPT_S) == {"members": members, "decisions": [], "lost": [a]}


def test_a_replica_that_has_a_link_again_is_not_lost() -> None:
    replicas = lost_at(100.0, "a")
    replicas.link("a")
    assert with_lost({"members": [member("a")]}, [replicas], now=101.0) == {"members": [member("a")], "lost": []}


@pytest.mark.parametrize("end", [LinkEnd.SAID_GOODBYE, LinkEnd.ENDED_HERE])
def test_a_replica_that_leaves_in_order_is_not_lost(end: LinkEnd) -> None:
    replicas = LostReplicas("m")
    replicas.lose("a", end, "why", time=100.0)
    assert replicas.shown(leased=["a"], now=100.0) == []


def test_the_oldest_of_many_losses_are_dropped() -> None:
    replicas = lost_at(100.0, *(str(number) for number in range(MAX_KEPT + 1)), "1")
    shown = [lost.replica_id for lost in replicas.shown(leased=[], now=100.0)]
    assert shown == [*(str(number) for number in range(2, MAX_KEPT + 1)), "1"]
