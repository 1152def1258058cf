"""Seeded random walks through a `World` whose network fails show what clients and operators are promised: 200,000 steps.

The machine of test_fleet_machine.py predicts each instruction of one fleet. Here several fleets share replicas that really compute, and
only promises are asserted.
"""

import random
from collections import Counter, deque

import pytest

from serve_app.core.pool_sizes import PoolSizes
from tests.core.network_world import LEASE_S, World

STEPS, WALKS = 15_000, 10
KEPT, KEPT_A_REQUEST, KEPT_OF_LONG_PROMPTS = 250, 30, 150
"""The most elements that a fleet's collections may hold: without a request, and for each request. A walk has some 400 requests.

Of each long prompt of the last seconds, three elements are kept.

Without a request they are about 65, and up to 84 in the 21 slots of each of two `QueueRate`: a lane's and its tenant's.
"""


def num_kept(root: object) -> int:
    """Return how many elements the collections hold that can be reached from ``root`` through objects of this package."""
    num, seen, to_visit = 0, set[int](), [root]
    while to_visit:
        found = to_visit.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, (dict, list, tuple, set, frozenset, deque)):
            num += len(found)
            to_visit += found.values() if isinstance(found, dict) else found
        elif type(found).__module__.startswith("serve_app."):
            slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
            to_visit += [getattr(found, name, None) for name in (*slots, *getattr(found, "__dict__", {}))]
    return num


def walk(seed: int, *, drains: float = 0.0, apart: bool = False, pools: PoolSizes | None = None, deaths: float = 0.0) -> World:
    """Walk, and return the world at its end, at peace. In each world every request has one outcome, and nothing is kept."""
    world = World(random.Random(seed), drains=drains, apart=apart, pools=pools, deaths=deaths)
    for number in range(STEPS):
        world.step()
        if number % 50 == 0:
            for ingress in world.ingresses:
                ingress.fleet.validate()
                assert ingress.fleet.requests.keys() == ingress.clients.keys()
                assert (
                    num_kept(ingress.fleet) <= KEPT + KEPT_A_REQUEST * len(ingress.clients) + world.apart * KEPT_OF_LONG_PROMPTS
                )
    world.settle()
    for ingress in world.ingresses:
        ingress.fleet.validate()
        assert not ingress.fleet.requests, "a request without an outcome"
        assert not ingress.fleet.waiting
        assert num_kept(ingress.fleet) <= KEPT
    assert not any(c.running for r in world.replicas for c in r.links), "an engine works for no client"
    # A lease has to end it only where the ingress cannot say that nobody reads it, or does not know.
    held = [
        kept for r in world.replicas for kept in r.kept if kept.of.is_alive() and (kept.reader is None or kept.reader.is_alive())
    ]
    assert not held, "blocks are kept for nobody"
    assert sum(world.ended.values()) == sum(i.num_clients for i in world.ingresses)
    assert world.ended.keys() <= {"complete", "aborted", "queue_full", "no_replica", "replica_lost", "request_quarantined"} | (
        {"ingress_lost"} if deaths else set()
    )
    return world


@pytest.mark.parametrize("seed", range(WALKS))
def test_every_request_has_one_outcome_every_token_comes_once_and_nothing_is_kept(seed: int) -> None:
    world = walk(seed)
    assert any(i.fleet.drains.num_moved for i in world.ingresses)
    assert world.ended["complete"] > 0.5 * sum(world.ended.values()), world.ended
    assert all(i.fleet.failover.resumptions > 20 for i in world.ingresses)
    assert len(world.late) == world.late.maxlen, "no frame was late"


def test_requests_that_are_handed_over_have_one_outcome_too_however_that_ends() -> None:
    worlds = [walk(seed, drains=0.01) for seed in range(100, 115)]
    results = sum((i.fleet.hand_overs.results for world in worlds for i in world.ingresses), Counter[str]())

    assert results.keys() == {"read", "computed", "not_kept", "no_target", "unanswered", "ended"}
    assert sum(i.fleet.hand_overs.tokens for world in worlds for i in world.ingresses) > 0
    freed = sum((world.freed for world in worlds), Counter[str]())
    assert freed["ingress"] > 0 < freed["reader"], freed


def test_an_ingress_that_dies_between_the_phases_leaves_blocks_for_the_lease_alone() -> None:
    """Its clients lose their answers; those of the other ingress do not, and engines drop its attempts."""
    worlds = [walk(seed, drains=0.01, deaths=0.0005) for seed in range(400, 410)]
    assert all(world.ended.get("ingress_lost", 0) > 0 for world in worlds)
    freed = sum((world.freed for world in worlds), Counter[str]())
    assert freed.keys() == {"ingress", "reader", "lease"}, freed
    for world in worlds:
        world.now += LEASE_S
        world.end_leases()
        assert not any(replica.kept for replica in world.replicas)


def test_answers_that_move_without_a_drain_have_one_outcome_too() -> None:
    worlds = [walk(seed, drains=0.002, apart=True) for seed in range(200, 210)]
    asked = sum((i.fleet.hand_overs.asked for world in worlds for i in world.ingresses), Counter[str]())
    assert asked.keys() == {"drain", "prompts", "balance"}
    assert sum(i.fleet.hand_overs.tokens for world in worlds for i in world.ingresses) > 0


def test_answers_that_move_between_pools_have_one_outcome_too() -> None:
    worlds = [walk(seed, drains=0.002, pools=PoolSizes(1, 2, 1, 4)) for seed in range(300, 305)]
    asked = sum((i.fleet.hand_overs.asked for world in worlds for i in world.ingresses), Counter[str]())
    assert asked.keys() == {"drain", "role"}
    assert sum(i.fleet.hand_overs.tokens for world in worlds for i in world.ingresses) > 0
