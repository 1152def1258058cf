"""The order of replicas that routing keeps agrees with a look at all of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import ReplicaState
from tests.core.helpers import Compared, Output, arrived, fleet_of, outputs, run, start

REQUESTS = {w: RequestState("r", prompt_tokens=1, max_tokens=1, resume=Resume.CONTINUE, weights=w) for w in (None, "v", "w")}
HELD = [RequestState(f"h{i}", prompt_tokens=1, max_tokens=1, resume=Resume.CONTINUE) for i in range(3)]
IDS = tuple("abcdefghijkl")


states = st.builds(
    lambda held, tokens, running, waiting, draining, weights: ReplicaState(
        "",
        3,
        0.0,
        {r.request_id: r for r in HELD[:held]},
        tokens,
        EngineLoad(1, running, waiting),
        draining=draining,
        weights=weights,
    ),
    st.integers(0, 3),
    *(st.integers(0, 2),) * 3,
    st.sampled_from([False, False, False, True]),
    st.sampled_from(["v", "w"]),
)
histories = st.lists(st.tuples(st.sampled_from(IDS), st.none() | states, st.sampled_from(("", *REQUESTS))), max_size=80)
"""(replica, its new state or None if it goes, the weights of the request for which a pick follows or "" for no pick)."""


@given(histories)
def test_every_pick_is_the_least_loaded_replica_with_room_whatever_changed_before(
    history: list[tuple[str, ReplicaState | None, str | None]],
) -> None:
    routing, replicas = Compared(), dict[str, ReplicaState]()
    for replica_id, state, picks in history:
        if state is None:
            replicas.pop(replica_id, None)
        else:
            state.replica_id = replica_id
            replicas[replica_id] = state
            routing.changed(replica_id)
        if picks != "":
            routing.pick(REQUESTS[picks], replicas)
    for request in REQUESTS.values():
        routing.pick(request, replicas)


def test_tokens_that_came_count_at_the_next_pick() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, arrived("r1"), arrived("r2"))
    assert run(fleet, outputs("a", Output("r1@0", [7])), arrived("r3")) == [start("r3", 0, "a")]


def test_a_replica_that_comes_back_with_other_weights_is_not_taken_for_what_it_was() -> None:
    routing, old, new = LeastOutstandingTokens(), ReplicaState("a", 3, 0.0, weights="v"), ReplicaState("a", 3, 0.0, weights="w")
    routing.changed("a")
    assert routing.least(REQUESTS["v"], {"a": old}) is old
    routing.changed("a")
    assert routing.least(REQUESTS["v"], {"a": new}) is None
    assert routing.least(REQUESTS["w"], {"a": new}) is new


def test_old_ranks_do_not_pile_up() -> None:
    routing, replicas = LeastOutstandingTokens(), {i: ReplicaState(i, 3, 0.0, outstanding_tokens=10_000) for i in IDS}
    for _ in range(1000):
        for replica_id in IDS[:3]:  # ever less to do: their old ranks are never the least again
            replicas[replica_id].outstanding_tokens -= 1
            routing.changed(replica_id)
        picked = routing.least(REQUESTS[None], replicas)
        assert picked is not None
        assert picked.replica_id == "a"
    assert sum(map(len, routing.all_loads._ranks.values())) <= 2 * len(IDS)


@pytest.mark.parametrize("order", ["first", "last", "mixed"])
def test_of_many_prompts_that_are_given_up_at_once_only_a_step_was_computed(order: str) -> None:
    requests = [RequestState(f"r{number}", 1024, 10, Resume.CONTINUE, priority=number) for number in range(100)]
    replica = ReplicaState("a", 100, 0.0, held={request.request_id: request for request in requests})
    if order == "mixed":
        random.Random(7).shuffle(requests)
    elif order == "last":
        requests.reverse()

    def computed(*given_up: RequestState) -> int:
        found = 0
        for request in given_up:
            replica.let_go(request)
            found += replica.note_given_up(request)
        return found

    assert computed(*requests[:50]) + computed(*requests[50:90]) <= 8
    replica.hear(1, now=1.0)
    assert 1 <= computed(*requests[90:]) <= 8


def test_each_prompt_that_is_given_up_while_its_step_runs_was_computed() -> None:
    requests = [RequestState(f"r{number}", 100, 10, Resume.CONTINUE, priority=number) for number in range(100)]
    replica = ReplicaState("a", 100, 0.0, held={request.request_id: request for request in requests})
    for request in requests[:80]:
        replica.let_go(request)
        assert replica.note_given_up(request)
